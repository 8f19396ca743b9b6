"""Operators in Python, from the conversion to a server's process."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.artifact import Artifact
from penstock.engines.custom_ops import OperatorFailed, run_file
from penstock.errors import InvalidArgument, InvalidModel
from penstock.offline.apart import apart
from penstock.offline.convert.certificate import certificate_of
from penstock.offline.convert.convert import Conversion, ParityFailed, convert
from penstock.online.instances.process_instance import ProcessModel

pytest.importorskip(
    "penstock.engines.extensions", exc_type=ImportError, reason="the extra penstock[extensions] is not installed"
)
torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:torch"
)
X = np.linspace(-5, 5, 12, dtype=np.float32).reshape(3, 4)
NAMED = "penstock_python::sums"
OPS = """
    import numpy as np
    import penstock

    @penstock.register_op("penstock_python::sums", form="python", inputs=["float32", "float32", "int64"], outputs=["float32"] * 2)
    def sums(x, limit, axes):
        return np.minimum(x, limit), x.sum(tuple(axes), dtype=np.float32)
"""


@torch.library.custom_op("penstock_python::sums", mutates_args=())
def sums(x: torch.Tensor, limit: float, axes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.clamp_max(x, limit), x.sum(axes)


@sums.register_fake
def _(x: torch.Tensor, limit: float, axes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:1])


class Net(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, total = sums(x * 2, 0.5, [1])
        return torch.tanh(low), total


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})
    monkeypatch.setattr("penstock.engines.custom_ops._files", {})


def converted(folder: Path, text: str = OPS, name: str = "model.onnx") -> Conversion:
    (folder / "my_ops.py").write_text(textwrap.dedent(text))
    return convert(Net(), folder / name, inputs="x:float32[N,4]", ops=folder / "my_ops.py")


def test_a_prototype_is_proved_and_says_what_it_needs(tmp_path: Path) -> None:
    done = converted(tmp_path)
    certificate = certificate_of(done.artifact)
    assert certificate is not None
    assert certificate.holds
    assert any(NAMED in note and "'my_ops.py'" in note for note in certificate.notes)
    expected = [one.numpy() for one in Net()(torch.from_numpy(X))]
    with penstock.open(tmp_path / "model.onnx", ops=tmp_path / "my_ops.py") as model:
        for found, wanted in zip(model.infer({"x": X}).values(), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_model_loads_no_operators_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(tmp_path)
    monkeypatch.setattr("penstock.engines.custom_ops._registered", {})
    with pytest.raises(InvalidModel, match=f"needs the operator '{NAMED}'"):
        penstock.open(tmp_path / "model.onnx")


def test_a_wrong_function_is_found_by_the_proof(tmp_path: Path) -> None:
    with pytest.raises(ParityFailed, match=r"node '\w*sums\w* \(sums\)'"):
        converted(tmp_path, OPS.replace("x, limit)", "x, 1.01 * limit).astype('f')"))
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"float32", "float32", "int64"', '"float32", "int64", "int64"', "declares the inputs FP32, INT64, INT64, but"),
        ('"float32", "float32", "int64"', '"float64", "float32", "int64"', "but the model has FP32, numbers, whole"),
        ('"float32", "float32", "int64"', '"float32"', "declares the inputs FP32, but"),
        ('["float32"] * 2', '["float32"]', "declares the outputs FP32, but the model has FP32, FP32"),
    ],
)
def test_types_that_the_operator_does_not_have(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        converted(tmp_path, OPS.replace(old, new))
    assert f"{NAMED}(Tensor x, float limit, SymInt[] axes)" in caught.value.hint


def test_a_function_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(OperatorFailed, match=rf"'{NAMED}' raised ZeroDivisionError: .*\(my_ops.py:7\)"):
        converted(tmp_path, OPS.replace("return np", "return 1 / 0, np"))


def test_an_exported_program_and_then_another_opset(tmp_path: Path) -> None:
    """Other processes open the files, so the operators must be in both."""
    defined = "@torch.library" + Path(__file__).read_text().partition("@torch.library")[2].partition("\nclass Net")[0]
    missing = 'import torch\nif not hasattr(torch.ops.penstock_python, "sums"):  # this process has it\n'
    library = missing + textwrap.indent(defined, "    ")
    (tmp_path / "both.py").write_text(f"{library}\n{textwrap.dedent(OPS)}")
    torch.export.save(torch.export.export(Net(), (torch.from_numpy(X),)), tmp_path / "net.pt2")
    done = convert(tmp_path / "net.pt2", tmp_path / "net.onnx", ops=tmp_path / "both.py")
    newer = convert(tmp_path / "net.onnx", tmp_path / "newer.onnx", opset=22, ops=tmp_path / "both.py")
    for one in (done, newer):
        assert one.certificate is not None
        assert one.certificate.holds
        assert NAMED in str(one.certificate.notes)
    assert newer.opset == 22


@pytest.fixture
def in_process(tmp_path: Path) -> Iterator[ProcessModel]:
    artifact = Artifact.from_bytes(converted(tmp_path).artifact.data)
    run_file(tmp_path / "my_ops.py")
    file = artifact.in_memory()
    model = ProcessModel.load("onnxruntime", artifact, {"threads": 1}, file)
    yield model
    model.unload()
    os.close(file)


def test_a_server_gives_the_files_to_the_processes_of_models(in_process: ProcessModel) -> None:
    found = in_process.forward({"x": X})
    np.testing.assert_allclose(found["OUTPUT__1"], 2 * X.sum(axis=1), atol=1e-5)


def test_a_model_with_operators_in_python_runs_where_they_are(tmp_path: Path) -> None:
    artifact = converted(tmp_path).artifact
    np.testing.assert_allclose(apart.forward(artifact, {"x": X})["OUTPUT__1"], 2 * X.sum(axis=1), atol=1e-5)
