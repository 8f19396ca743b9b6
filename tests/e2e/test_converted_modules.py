"""From a model of torch, transformers or JAX to a server that gives the framework's answers: convert, build, serve, ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from commands import Command
from penstock.tensor import Array, DataType
from processes import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
NETS = """
def torch_net():
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2)
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(32, 5)).eval()


def jax_net():
    import jax
    import numpy as np

    first, second = (np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in ((4, 8), (8, 3)))

    def predict(x):
        return {"probabilities": jax.nn.softmax(jax.nn.relu(x @ first) @ second)}

    return predict
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def served(
    penstock: Command, source: str, inputs: Mapping[str, Array], declared: Sequence[str] = ()
) -> dict[str, Array]:
    """The server's answers for ``inputs``, from a bundle of the converted ``source``."""
    options = [text for one in declared for text in ("--inputs", one)]
    done = penstock("convert", source, "-o", "net.onnx", "--json", *options)
    assert done.code == 0, done.err
    assert done.json["parity"]["holds"]
    done = penstock("build", "net.onnx", "--synthetic", "16", "--budget", "5s", "-o", "net.bundle")
    assert done.code == 0, done.err
    tensors = []
    for name, array in inputs.items():
        tensors.append(triton.InferInput(name, list(array.shape), DataType.from_numpy(array.dtype).value))
        tensors[-1].set_data_from_numpy(array)
    with ServerProcess("net.bundle") as server:
        client = triton.InferenceServerClient("{}:{}".format(*server.address))
        answer = client.infer("net", tensors)
        client.close()
    return {one["name"]: answer.as_numpy(one["name"]) for one in answer.get_response()["outputs"]}


def close(found: Array, wanted: Array) -> None:
    """Assert that the output of a bundle is within the loss that a build permits."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_torch(penstock: Command) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    import served_nets  # type: ignore[import-not-found] # noqa: PLC0415 - the fixture wrote it

    image = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
    found = served(penstock, "served_nets:torch_net", {"input": image}, ["input:float32[N,3,16,16]"])
    with torch.no_grad():
        close(found["OUTPUT__0"], served_nets.torch_net()(torch.from_numpy(image)).numpy())


def test_hugging_face(penstock: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    from benchmarks.zoo.huggingface import MODELS  # noqa: PLC0415 - needs the packages

    folder = MODELS["bert"].make(tmp_path / "folder")
    tokenizer = transformers.BertTokenizer(str(Path(str(folder), "vocab.txt")))
    words = dict(tokenizer(["a b c", "z x"], padding=True, return_tensors="np"))
    inputs = {name: array.astype(np.int64) for name, array in words.items()}
    found = served(penstock, str(folder), inputs)
    assert (tmp_path / "vocab.txt").is_file()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        wanted = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    close(found["logits"], wanted.logits.numpy())


def test_jax(penstock: Command) -> None:
    pytest.importorskip("jax2onnx")
    import served_nets  # noqa: PLC0415 - the fixture wrote it

    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    found = served(penstock, "served_nets:jax_net", {"x": x}, ["x:float32[N,4]"])
    close(found["probabilities"], np.asarray(served_nets.jax_net()(x)["probabilities"]))
