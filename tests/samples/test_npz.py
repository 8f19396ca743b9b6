"""npz files: pickles and damage are refused, and large arrays are mapped."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidData, NotFound
from penstock.samples import npz
from penstock.samples.npz import read_npy, read_npz
from penstock.samples.open import load_dataset
from penstock.tensor import DataType, Signature, TensorSpec

Y = TensorSpec("y", DataType.FP32, (-1, 4))
SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (Y,))
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def saved(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)
    return path


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data.npz")
    with pytest.raises(InvalidData, match="is a pipe"):
        load_dataset(tmp_path / "data.npz", SIGNATURE)


class Bomb:
    """An object whose pickle creates the given file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]


def test_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    fuse = tmp_path / "executed"
    objects = saved(tmp_path / "objects.npz", x=np.array([Bomb(fuse)], dtype=object))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Bomb(fuse)))
    for path in (objects, tmp_path / "pickle.npz"):
        with pytest.raises(InvalidData, match="cannot read") as raised:
            load_dataset(path, SIGNATURE)
        assert "without Python objects" in raised.value.hint
    assert not fuse.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.npz"):
        load_dataset(tmp_path / "none.npz", SIGNATURE)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("x = 1, 2, 3")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "folder.npz").mkdir()
    np.save(tmp_path / "single.npy", X)
    with zipfile.ZipFile(tmp_path / "foreign.npz", "w") as archive:
        archive.writestr("x", b"not an array")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(InvalidData) as raised:
            load_dataset(path, SIGNATURE)
        assert path.name in raised.value.message


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_archives_are_refused(tmp_path: Path, compressed: bool) -> None:
    whole = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(whole, x=np.random.default_rng(0).random((50, 3), np.float32))
    data, path = whole.getvalue(), tmp_path / "damaged.npz"
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidData):
            load_dataset(path, SIGNATURE)
    for place in range(0, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            load_dataset(path, SIGNATURE)
        except InvalidData:
            continue


def test_a_header_that_is_not_python_is_refused(tmp_path: Path) -> None:
    header = b"{'shape': (3,),\n"
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(InvalidData, match="cannot read"):
        load_dataset(path, SIGNATURE)


def test_a_shape_that_lies_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**44, 3)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(InvalidData, match="cannot read"):
        load_dataset(tmp_path / "huge.npz", SIGNATURE)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("compressed", [False, True])
def test_large_arrays_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool, order: str) -> None:
    monkeypatch.setattr(npz, "_MAPPED_BYTES", 100)
    x, path = np.asarray(np.random.default_rng(0).random((50, 3)), order=order), tmp_path / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, first=np.arange(3), x=x)
    found = read_npz(path)
    np.testing.assert_array_equal(found["x"], x)
    np.testing.assert_array_equal(found["first"], np.arange(3))
    assert isinstance(found["x"], np.memmap)
    assert isinstance(found["first"], np.memmap) is (found["first"].nbytes + 128 >= 100)


@pytest.mark.parametrize("compressed", [False, True])
def test_damage_to_a_large_array_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    monkeypatch.setattr(npz, "_MAPPED_BYTES", 1)
    whole, path = io.BytesIO(), tmp_path / "data.npz"
    (np.savez_compressed if compressed else np.savez)(whole, x=np.random.default_rng(0).random((50, 3), np.float32))
    data = whole.getvalue()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            found = read_npz(path)["x"]
        except (InvalidData, KeyError):
            continue
        np.testing.assert_array_equal(found, np.random.default_rng(0).random((50, 3), np.float32))


def test_objects_and_lies_in_large_arrays_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "_MAPPED_BYTES", 1)
    fuse = tmp_path / "executed"
    objects = saved(tmp_path / "objects.npz", x=np.array([Bomb(fuse)], dtype=object))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 3)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    for path in (objects, tmp_path / "huge.npz"):
        with pytest.raises(InvalidData, match="cannot read"):
            read_npz(path)
    assert not fuse.exists()


def test_an_npy_file_has_one_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.testing.assert_array_equal(read_npy(tmp_path / "x.npy"), X)
    saved(tmp_path / "x.npz", x=X).rename(tmp_path / "y.npy")
    np.save(tmp_path / "z.npy", np.array([Bomb(tmp_path / "executed")], object), allow_pickle=True)
    for name in ("y.npy", "z.npy"):
        with pytest.raises(InvalidData, match=name):
            read_npy(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_two_arrays_of_one_name_are_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "twice.npz"
    np.savez(path, x=np.zeros(2))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", archive.read("x.npy"))
    with pytest.raises(InvalidData, match="several arrays of one name"):
        read_npz(path)
