"""Reading returns the written content, or raises an error."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.offline.compress import checkpoint as module
from penstock.offline.compress.checkpoint import read_checkpoint, write_checkpoint
from penstock.tensor import Array

ARRAYS = {
    "a.0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 4), np.int8),
}


class Kept(msgspec.Struct):
    """Plain data beside arrays."""

    about: dict[str, Any]
    arrays: dict[str, Array]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "deep" / "file", Kept({"x": [1, 0.1], "y": {"z": None}}, ARRAYS))
    return tmp_path / "deep" / "file"


def test_arrays_and_plain_data_come_back(path: Path) -> None:
    found = read_checkpoint(path, Kept)
    assert found is not None
    assert found.about == {"x": [1, 0.1], "y": {"z": None}}
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_no_file_is_nothing(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path / "file", Kept) is None


def test_any_changed_byte_or_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in [*changed, *(whole[:length] for length in (0, 1, len(whole) // 2, len(whole) - 1))]:
        path.write_bytes(damaged)
        with pytest.raises(InvalidArgument, match="damaged"):
            read_checkpoint(path, Kept)


@pytest.mark.parametrize(
    "packed",
    [
        ["|O", [1], b"12345678"],
        ["<f4", [1 << 60], b"1234"],
        ["<f4", [-1, -1], b"1234"],
        ["<f4", [1], b"123"],
        ["no type", [1], b"1"],
        ["<f4", "shape", b"1234"],
        "an array",
    ],
    ids=str,
)
def test_made_up_arrays_are_refused(tmp_path: Path, packed: object) -> None:
    payload = msgspec.msgpack.encode({"about": {}, "arrays": {"a": packed}})
    (tmp_path / "file").write_bytes(hashlib.sha256(payload).digest() + payload)
    with pytest.raises(InvalidArgument, match="damaged"):
        read_checkpoint(tmp_path / "file", Kept)


def test_a_file_of_another_kind_is_refused(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not a file of Penstock"):
        read_checkpoint(path, dict[str, int])


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ARRAY_BYTES", 20)
    with pytest.raises(ResourceExhausted, match="is too large for a checkpoint"):
        write_checkpoint(tmp_path / "file", ARRAYS)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceExhausted, match="cannot write"):
        write_checkpoint(tmp_path / "file" / "x", {})
