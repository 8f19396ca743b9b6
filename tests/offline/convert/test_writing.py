from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import models
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.offline.convert.certificate import Certificate, certificate_of
from penstock.offline.convert.writing import (
    check_companions,
    check_output,
    check_room,
    kept,
    write,
    write_companions,
)
from penstock.offline.optimize import mapped
from penstock.offline.sessions import loaded

HOLDS = Certificate(True, 1, 0.0, 1e-6)


def test_a_model_is_written_with_its_certificate(tmp_path: Path) -> None:
    written = write(models.linear(3, 2), HOLDS, tmp_path / "a.onnx")
    assert certificate_of(written) is not None
    assert write(models.linear(3, 2), None, tmp_path / "b.onnx").data == models.linear(3, 2).data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


def test_a_model_that_exceeds_the_limit_keeps_its_weights_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "LIMIT_BYTES", 1 << 20)
    source = models.linear(1 << 10, 300)
    large = kept(Artifact.from_file(models.external_linear(tmp_path)))
    assert not large.beside
    (tmp_path / "large.onnx").write_bytes(source.data)
    large = mapped.artifact_of(__import__("onnx").load_model_from_string(source.data))
    assert large.beside
    target = tmp_path / "new" / "big.onnx"
    target.parent.mkdir()
    written = write(kept(large), HOLDS, target)
    assert [entry.path for entry in written.beside] == ["big.onnx.data"]
    assert certificate_of(written) is not None
    assert sorted(path.name for path in target.parent.iterdir()) == ["big.onnx", "big.onnx.data"]
    x = np.ones((1, 1 << 10), np.float32)
    with loaded(written) as model, loaded(source) as original:
        np.testing.assert_array_equal(model.forward({"x": x})["y"], original.forward({"x": x})["y"])


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    source = tmp_path / "source.onnx"
    for output, message in ((tmp_path / "a.bin", "must end in .onnx"), (source, "is the source"), (tmp_path, ".onnx")):
        with pytest.raises(InvalidArgument, match=message):
            check_output(output, [source])


def test_companions(tmp_path: Path) -> None:
    folder, output = tmp_path / "source", tmp_path / "out" / "model.onnx"
    for parent in (folder, output.parent):
        parent.mkdir()
    (folder / "vocab.txt").write_bytes(b"a\nb\n")
    files = [folder / "vocab.txt"]
    for _ in range(2):  # equal files may exist
        check_companions(files, output)
        assert write_companions(files, output) == (output.parent / "vocab.txt",)
    check_companions(files, folder / "model.onnx")
    assert write_companions(files, folder / "model.onnx") == (folder / "vocab.txt",)
    (output.parent / "vocab.txt").write_bytes(b"a\nc\n")
    with pytest.raises(InvalidArgument, match="differs from the file that belongs to the model") as raised:
        check_companions(files, output)
    assert raised.value.hint


def test_a_source_that_is_too_large() -> None:
    check_room(1 << 20, None)
    with pytest.raises(ResourceExhausted, match="needs about .* GiB of memory") as raised:
        check_room(1 << 50, None)
    assert raised.value.hint


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(ResourceExhausted, match="which has 0.0 GiB free") as raised:
        check_room(1 << 20, tmp_path / "a.onnx")
    assert "TMPDIR" in raised.value.hint
