"""Files of PyTorch: what is loaded, and what is refused."""

import contextlib
import importlib
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.zoo.torch import MODELS
from penstock.errors import InvalidArgument, InvalidModel, NotFound, PenstockError, PermissionDenied
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from penstock.offline.convert.frameworks.torch import CONVERTER  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)

INPUT = InputSpec("x", DataType.FP32, ("N", 4))


def module():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU(), torch.nn.Linear(3, 2))


def opened(source, **options):
    return CONVERTER.open(source, ConvertOptions(inputs=(INPUT,), **options))


@pytest.mark.parametrize("name", ["script_decision", "program_counter", "pickled_resnet"])
@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_truncated(name, kept, tmp_path):
    path = MODELS[name].make(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(InvalidModel) as caught:
        CONVERTER.open(path, MODELS[name].options)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["script_decision", "program_counter", "pickled_resnet"])
def test_changed_bytes_end_in_one_of_our_errors_or_in_a_model(name, tmp_path):
    path, generator = MODELS[name].make(tmp_path), np.random.default_rng(0)
    data = path.read_bytes()
    for place in generator.integers(0, len(data), 25):
        changed = bytearray(data)
        changed[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(changed)
        with contextlib.suppress(PenstockError):
            CONVERTER.open(path, MODELS[name].options).close()


@pytest.mark.parametrize(
    "data", [b"PK\x03\x04" + bytes(100), b"\x80\x02.", b"def model(): pass", b"\x89HDF\r\n\x1a\n" + bytes(100)]
)
def test_other_files(data, tmp_path):
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(InvalidModel):
        opened(tmp_path / "model.pt")


def test_missing_file(tmp_path):
    with pytest.raises(NotFound):
        opened(tmp_path / "model.pt")


def test_an_archive_of_other_files(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/notes.txt", "nothing")
    with pytest.raises(InvalidModel):
        opened(tmp_path / "model.pt")


def test_a_pickle_needs_trust(tmp_path):
    torch.save(module(), tmp_path / "model.pt")
    with pytest.raises(PermissionDenied, match=r"torch\.nn\.modules\.linear\.Linear") as caught:
        opened(tmp_path / "model.pt")
    assert "--trust-pickle" in caught.value.hint
    source = opened(tmp_path / "model.pt", trust_pickle=True)
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(source.forward({"x": x})["OUTPUT__0"], module()(torch.from_numpy(x)).detach(), atol=1e-6)


class Attack:
    def __init__(self, function, *arguments) -> None:
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "attack",
    [
        Attack(os.system, "touch attacked"),
        Attack(eval, "open('attacked', 'w')"),
        Attack(pickle.loads, b"."),
        Attack(torch.hub.load, "x", "y"),
        Attack(torch.load, "x"),
        Attack(getattr, "x", "y"),
    ],
)
def test_even_a_trusted_pickle_runs_no_code(attack, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save([module(), attack], tmp_path / "model.pt")
    with pytest.raises(PermissionDenied, match="not modules of PyTorch"):
        opened(tmp_path / "model.pt", trust_pickle=True)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_trusted_pickle_names_all_forbidden_classes(tmp_path):
    torch.save([Attack(os.system, "a"), Attack(eval, "b")], tmp_path / "model.pt")
    with pytest.raises(PermissionDenied, match=r"builtins\.eval.*posix\.system"):
        opened(tmp_path / "model.pt", trust_pickle=True)


def test_a_name_off_the_allow_list_is_refused_before_its_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "side_effect.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\nclass A: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.save([module(), importlib.import_module("side_effect").A()], tmp_path / "model.pt")
    (tmp_path / "imported").unlink()
    monkeypatch.delitem(sys.modules, "side_effect")
    with pytest.raises(
        PermissionDenied, match="'side_effect.A', which are not modules of PyTorch, torchvision or timm"
    ):
        opened(tmp_path / "model.pt", trust_pickle=True)
    assert not (tmp_path / "imported").exists()


def weights_file(tmp_path: Path, kind: str) -> Path:
    weights, path = module().state_dict(), tmp_path / f"weights.{kind}"
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save({"epoch": 3, "state_dict": weights} if kind == "ckpt" else weights, path)
    return path


@pytest.mark.parametrize("kind", ["safetensors", "pt", "ckpt"])
def test_weights_of_a_module(kind, tmp_path):
    path = weights_file(tmp_path, kind)
    source = opened(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU(), torch.nn.Linear(3, 2)), weights=path
    )
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(source.forward({"x": x})["OUTPUT__0"], module()(torch.from_numpy(x)).detach(), atol=1e-6)
    if kind == "ckpt":
        return
    with pytest.raises(InvalidArgument, match="only weights") as caught:
        opened(path)
    assert "--weights" in caught.value.hint


def test_weights_that_do_not_fit(tmp_path):
    path = weights_file(tmp_path, "safetensors")
    with pytest.raises(
        InvalidArgument, match=r"the module has no '2.bias', '2.weight'.*0\.weight is \[3, 4\] instead of \[5, 4\]"
    ):
        opened(torch.nn.Sequential(torch.nn.Linear(4, 5)), weights=path)
    with pytest.raises(InvalidArgument, match="it lacks '3.weight'"):
        opened(torch.nn.Sequential(*module(), torch.nn.Linear(2, 2)), weights=path)


@pytest.mark.parametrize("kept", [0, 4, 30, -1])
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_truncated_weights(kind, kept, tmp_path):
    path = weights_file(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidModel):
        opened(module(), weights=path)


def test_weights_that_are_something_else(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "w.pt")
    with pytest.raises(InvalidModel, match="contains a list"):
        opened(module(), weights=tmp_path / "w.pt")
    with open(tmp_path / "w.pt", "wb") as file:
        torch.save({"a": Attack(os.system, "touch attacked")}, file)
    with pytest.raises(InvalidModel, match="cannot read the weights"):
        opened(module(), weights=tmp_path / "w.pt")


def test_tied_weights_of_which_one_name_is_stored(tmp_path):
    def tied():
        made = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
        made[1].weight = made[0].weight
        return made

    save_file({"0.weight": torch.ones(5, 4)}, tmp_path / "w.safetensors")
    source = CONVERTER.open(
        tied(), ConvertOptions(inputs=(InputSpec("ids", DataType.INT64, ("N",)),), weights=tmp_path / "w.safetensors")
    )
    assert source.forward({"ids": np.zeros(1, np.int64)})["OUTPUT__0"].tolist() == [[4.0] * 5]


def test_weights_for_a_file_are_refused(tmp_path):
    data = io.BytesIO()
    torch.save(module().state_dict(), data)
    (tmp_path / "w.pt").write_bytes(data.getvalue())
    program = MODELS["program_counter"].make(tmp_path)
    with pytest.raises(InvalidArgument, match="--weights needs a module"):
        opened(program, weights=tmp_path / "w.pt")
