from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from penstock.artifact import Artifact, Format, sha256
from penstock.errors import InvalidModel, NotFound, Unsupported


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "Model.ONNX"
    path.write_bytes(b"model")
    artifact = Artifact.from_file(str(path))
    assert (artifact.data, artifact.format, artifact.path) == (b"model", Format.ONNX, path)
    assert artifact.digest == hashlib.sha256(b"model").hexdigest() == sha256(b"model")
    assert artifact.size_bytes == 5


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no model file"):
        Artifact.from_file(tmp_path / "m.onnx")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(InvalidModel, match="is empty"):
        Artifact.from_file(tmp_path / "m.onnx")


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(InvalidModel, match="cannot read model file"):
        Artifact.from_file(tmp_path / "m.onnx")


@pytest.mark.parametrize("name", ["m.pt", "m", "onnx"])
def test_unknown_suffix_lists_the_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"not a model file that Penstock reads \(known suffixes: \.onnx"):
        Artifact.from_file(tmp_path / name)


def test_derive_keeps_the_way_it_came() -> None:
    first = Artifact.from_bytes(b"1", Format.ONNX)
    second = first.derive(b"2", "fold", {"level": 1}, {"nodes": 3})
    third = second.derive(b"3", "quantise", {}, {})
    assert first.provenance == ()
    assert [(step.name, step.source_digest) for step in third.provenance] == [
        ("fold", first.digest),
        ("quantise", second.digest),
    ]
    assert (third.provenance[0].options, third.provenance[0].facts) == ({"level": 1}, {"nodes": 3})
    assert (third.data, third.digest, third.path) == (b"3", sha256(b"3"), None)


def test_immutable() -> None:
    with pytest.raises(AttributeError):
        Artifact.from_bytes(b"1", Format.ONNX).data = b"2"  # type: ignore[misc]
