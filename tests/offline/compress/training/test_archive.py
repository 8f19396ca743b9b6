"""What is read back is what was written, or an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidArgument, ResourceExhausted
from penstock.offline.compress.training.archive import read_archive, write_archive

ARRAYS = {
    "a.0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 4), np.int8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_archive(tmp_path / "deep" / "file.npz", ARRAYS, {"x": [1, 0.1], "y": {"z": None}})
    return tmp_path / "deep" / "file.npz"


def test_arrays_and_notes_come_back(path: Path) -> None:
    found = read_archive(path)
    assert found is not None
    arrays, about = found
    assert about == {"x": [1, 0.1], "y": {"z": None}}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    assert [file.name for file in path.parent.iterdir()] == ["file.npz"]


def test_no_file_is_nothing(tmp_path: Path) -> None:
    assert read_archive(tmp_path / "file.npz") is None


def test_any_changed_byte_or_cut_is_noticed(path: Path) -> None:
    """Bytes that carry nothing, such as a date in the zip's directory, may change."""
    whole = path.read_bytes()
    noticed = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = read_archive(path)
        except InvalidArgument:
            noticed += 1
            continue
        assert found is not None
        assert all(np.array_equal(found[0][name], array) for name, array in ARRAYS.items())
    assert noticed > len(whole) / 7 / 2
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidArgument, match="damaged"):
            read_archive(path)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "file.npz", a=np.array([object()], dtype=object))
    with pytest.raises(InvalidArgument, match="damaged"):
        read_archive(tmp_path / "file.npz")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceExhausted, match="cannot write"):
        write_archive(tmp_path / "file" / "x.npz", ARRAYS, {})
