from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

import models
import penstock
from penstock.artifact import Artifact
from penstock.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    WrongResult,
)
from penstock.offline.convert.certificate import certificate_of
from penstock.offline.convert.convert import ParityFailed, convert
from penstock.offline.sessions import signature_of
from source_models import OnnxSource
from tests.compared import artifact, parsed


def scaled(factor: float) -> Artifact:
    """``models.linear(3, 2)`` with other weights."""
    proto = onnx.load_model_from_string(models.linear(3, 2).data)
    tensor = proto.graph.initializer[0]
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(factor), tensor.name))
    return Artifact.from_bytes(proto.SerializeToString())


def test_a_source_is_written_with_its_certificate(tmp_path: Path) -> None:
    source = OnnxSource(models.linear(3, 2))
    stages = []
    done = convert(source, tmp_path / "model.onnx", lambda stage, *_: stages.append(stage))
    assert done.output == tmp_path / "model.onnx"
    assert (done.exporter, done.opset, done.warnings) == ("test 1.0", 17, ("a warning of the exporter",))
    written = Artifact.from_file(tmp_path / "model.onnx")
    found = certificate_of(written)
    assert found is not None
    assert found == msgspec.structs.replace(done.certificate, graph_digest=found.graph_digest)  # type: ignore[type-var]
    assert (found.holds, found.exporter, found.framework) == (True, "test 1.0", "OnnxSource")
    assert signature_of(written) == source.signature
    assert [step.name for step in done.artifact.provenance] == ["convert"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert stages[0] == "open"


def test_without_an_output_the_model_stays_in_memory() -> None:
    done = penstock.convert(OnnxSource(models.linear(3, 2)))
    assert done.output is None
    assert done.artifact.path is None
    assert certificate_of(done.artifact) is not None


def test_wrong_outputs_are_not_written(tmp_path: Path) -> None:
    source = OnnxSource(models.linear(3, 2), scaled(1.01))
    with pytest.raises(ParityFailed, match="does not give the outputs of 'OnnxSource'") as raised:
        convert(source, tmp_path / "model.onnx")
    assert raised.value.conversion is not None
    assert not raised.value.conversion.certificate.holds  # type: ignore[union-attr]
    assert not list(tmp_path.iterdir())


def test_wrong_outputs_are_written_on_request(tmp_path: Path) -> None:
    done = convert(OnnxSource(models.linear(3, 2), scaled(1.01)), tmp_path / "model.onnx", keep_failed=True)
    assert not done.certificate.holds  # type: ignore[union-attr]
    found = certificate_of(Artifact.from_file(tmp_path / "model.onnx"))
    assert found is not None
    assert not found.holds


def test_without_a_comparison_there_is_no_certificate(tmp_path: Path) -> None:
    done = convert(OnnxSource(models.linear(3, 2), scaled(1.01)), tmp_path / "model.onnx", parity=False)
    assert done.certificate is None
    assert certificate_of(Artifact.from_file(tmp_path / "model.onnx")) is None


def test_an_invalid_export_is_diagnosed(tmp_path: Path) -> None:
    source = OnnxSource(models.linear(3, 2), models.unknown_operator())
    with pytest.raises(WrongResult, match=r"test 1\.0 wrote an invalid model"):
        convert(source, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def _fails(error: BaseException) -> OnnxSource:
    def export() -> Artifact:
        raise error

    return OnnxSource(models.linear(3, 2), export)


def test_an_exception_of_a_framework_becomes_an_error() -> None:
    with pytest.raises(PenstockError, match="'OnnxSource' cannot be exported: KeyError: 'no rule'") as raised:
        convert(_fails(KeyError("no rule")))
    assert raised.value.hint


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(KeyboardInterrupt):
        convert(_fails(KeyboardInterrupt()), tmp_path / "model.onnx")
    assert not list(temporary.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"opset": 5}, InvalidArgument, "--opset must be from 7 to 24, got 5"),
        ({"dynamic": {"z": {0: "n"}}}, InvalidArgument, "--dynamic names input 'z'"),
        ({"dynamic": ["x:3=n"], "inputs": ["x[2,3]"]}, InvalidArgument, "axis 3 of input 'x', which has 2 dimension"),
        (
            {"inputs": ["x[2]"], "sample": {"x": np.zeros((2, 3))}},
            InvalidArgument,
            "1 dimensions, but the sample has 2",
        ),
        ({"ops": "absent.py"}, InvalidArgument, "no Python file 'absent.py'"),
        ({"weights": "absent.pt"}, NotFound, "no file 'absent.pt' with weights"),
        ({"sample": "absent.npz"}, NotFound, "no sample 'absent.npz'"),
        ({"format": "karas"}, InvalidArgument, "no format 'karas'"),
    ],
)
def test_wrong_options(keywords: dict[str, object], error: type[PenstockError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        convert(OnnxSource(models.linear(3, 2)), **keywords)  # type: ignore[arg-type]
    assert raised.value.hint


def test_pickles_need_trust(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
    with pytest.raises(PermissionDenied, match=r"'net\.pt' is a pickled PyTorch module .* can run code") as raised:
        convert(tmp_path / "net.pt")
    assert "--trust-pickle" in raised.value.hint


def test_the_source_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(models.linear(3, 2).data)
    with pytest.raises(InvalidArgument, match="is the source and cannot be overwritten"):
        convert(tmp_path / "model.onnx", tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["model.bin", "model"])
def test_the_output_is_named_onnx(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="must end in .onnx"):
        convert(OnnxSource(models.linear(3, 2)), tmp_path / name)


def test_external_weights_stay_beside_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    source = OnnxSource(Artifact.from_file(models.external_linear(folder)))
    done = convert(source, tmp_path / "model.onnx")
    assert not done.artifact.beside  # small weights are embedded
    assert certificate_of(done.artifact) is not None


def test_outputs_that_are_all_random_are_not_proved() -> None:
    model = parsed("g (float[N,3] x) => (float[N,3] y) { y = RandomNormalLike(x) }")
    with pytest.raises(ParityFailed, match="not proved to be those of .*all outputs are random") as raised:
        convert(OnnxSource(artifact(model)))
    assert raised.value.conversion is not None
    assert "proves nothing" in raised.value.conversion.certificate.text  # type: ignore[union-attr]
