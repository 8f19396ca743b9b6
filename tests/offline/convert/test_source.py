from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import models
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, InvalidData, NotFound, PenstockError, Unsupported
from penstock.offline.convert.source import CUSTOM, read_sample, resolve
from source_models import OnnxSource

MODULE = """
import sys
from sklearn.linear_model import LinearRegression

print("loading")
estimator = LinearRegression()


def make_model():
    print("making")
    return estimator


def with_defaults(size=3):
    return estimator


def function(x, y):
    return x + y


def nothing():
    return None


def fails():
    raise KeyError("weights")


def leaves():
    sys.exit(3)


class Estimator(LinearRegression):
    pass
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_nets.py").write_text(MODULE)
    (tmp_path / "broken_net.py").write_text("import absent_package\n")
    (tmp_path / "invalid_net.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "user_nets", raising=False)


@pytest.mark.parametrize(
    ("name", "format", "cls"),
    [
        ("user_nets:make_model", "sklearn", "LinearRegression"),
        ("user_nets:with_defaults", "sklearn", "LinearRegression"),
        ("user_nets:estimator", "sklearn", "LinearRegression"),
        ("user_nets:Estimator", "sklearn", "Estimator"),
        ("user_nets:function", "jax", "function"),
    ],
)
def test_functions(name: str, format: str, cls: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = resolve(name)
    assert (source.format, type(source.given).__name__, source.name, source.files) == (format, cls, name, ())
    assert source.digest() == ""
    assert capsys.readouterr().out == ""  # stdout is for results


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("user_nets:absent", InvalidArgument, "cannot load the model 'user_nets:absent': AttributeError"),
        ("broken_net:f", InvalidArgument, "No module named 'absent_package'"),
        ("invalid_net:f", InvalidArgument, "SyntaxError"),
        ("no_such_module:f", InvalidArgument, "No module named 'no_such_module'"),
        ("user_nets:fails", InvalidArgument, r"raised KeyError: 'weights' \(user_nets.py, line 27\)"),
        ("user_nets:leaves", InvalidArgument, "raised SystemExit: 3"),
        ("user_nets:nothing", Unsupported, "is of type NoneType, which is not a model"),
        ("absent.keras", NotFound, "no model 'absent.keras'"),
        ("https://example.com/a.onnx", Unsupported, "is a URL"),
        ("user_nets.py", Unsupported, "is a text"),
    ],
)
def test_wrong_sources(name: str, error: type[PenstockError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        resolve(name)
    assert raised.value.hint


def test_objects() -> None:
    assert resolve(LogisticRegression()).format == "sklearn"
    assert resolve(LogisticRegression(), "xgboost").format == "xgboost"
    assert resolve(OnnxSource(models.linear(3, 2))).format == CUSTOM
    assert resolve(lambda x: x).format == "jax"
    with pytest.raises(Unsupported, match="is of type int"):
        resolve(3)


def test_modules_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    assert resolve(net).format == "torch"
    assert resolve(torch.jit.script(net)).format == "torchscript"
    assert resolve(torch.export.export(net, (torch.zeros(1, 3),))).format == "exported_program"
    torch.save(net.state_dict(), "net.pt")
    assert resolve(net, weights=Path("net.pt")).format == "state_dict"
    with pytest.raises(InvalidArgument, match="'net.pt' contains weights, but no model") as raised:
        resolve("net.pt")
    assert "--weights net.pt" in raised.value.hint


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")

    class Own(transformers.ViTModel):  # type: ignore[name-defined,misc]
        pass

    config = transformers.ViTConfig(hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    model = Own(config)
    assert resolve(model).format == "huggingface"
    assert resolve(model.embeddings).format == "torch"


def test_modules_of_linen_with_their_variables() -> None:
    linen = pytest.importorskip("flax.linen")
    source = resolve((linen.Dense(2), {"params": {}}))
    assert (source.format, source.name) == ("jax", "Dense")
    for other in ((LogisticRegression(), {}), (linen.Dense(2),), (np.sin, {})):
        with pytest.raises(Unsupported, match="is of type tuple"):
            resolve(other)


def test_files_that_belong_beside_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    for name in ("vocab.txt", "model.safetensors", "tokenizer.json", "modeling.py"):
        (folder / name).write_text(name)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    assert {file.name for file in resolve(folder).companions} == {"vocab.txt", "tokenizer.json"}
    assert resolve(lambda x: x).companions == ()


def test_files_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text("layer { }")
    (tmp_path / "net.caffemodel").write_bytes(b"weights")
    source = resolve(tmp_path / "net.prototxt")
    assert [file.name for file in source.files] == ["net.prototxt", "net.caffemodel"]
    before = source.digest()
    (tmp_path / "net.caffemodel").write_bytes(b"Weights")
    assert source.digest() != before
    folder = tmp_path / "folder"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(b"x")
    (folder / "variables" / "data").write_bytes(b"y")
    assert {file.name for file in resolve(folder).files} == {"saved_model.pb", "data"}
    path = models.external_linear(folder)
    assert [file.name for file in resolve(path).files] == [path.name, "w.bin"]
    assert resolve(Artifact.from_file(path)).format == "onnx"


def test_samples(tmp_path: Path) -> None:
    np.savez("one.npz", x=np.ones((1, 3), np.float32), text=np.array(["a"]))
    found = read_sample("one.npz")
    assert found["x"].dtype == np.float32
    assert found["text"].tolist() == ["a"]
    torch = pytest.importorskip("torch")
    assert read_sample({"x": torch.ones(2, requires_grad=True), "n": 3})["n"].shape == ()


@pytest.mark.parametrize(
    ("sample", "error", "message"),
    [
        ("absent.npz", NotFound, "no sample"),
        ("user_nets.py", InvalidData, "'user_nets.py' is not an npz file"),
        ("single.npy", InvalidData, "a single array"),
        ([1, 2], InvalidData, "must be a mapping"),
        ({"x": np.ones(2, np.complex64)}, InvalidData, "input 'x'"),
    ],
)
def test_wrong_samples(sample: object, error: type[PenstockError], message: str) -> None:
    np.save("single.npy", np.ones(3))
    with pytest.raises(error, match=message) as raised:
        read_sample(sample)
    assert raised.value.hint
