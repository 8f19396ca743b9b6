from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.samples import folder
from penstock.samples.folder import read_folder
from penstock.samples.stacked import check_dataset
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 4)),)
TEXT = Signature((TensorSpec("ids", DataType.INT64, (-1, -1)), TensorSpec("mask", DataType.INT64, (-1, -1))), Y)
ROWS = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), Y)


def save(parent: Path, name: str, **arrays: object) -> None:
    path = parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


@pytest.mark.parametrize("spooled", [0, 1 << 20])
def test_each_file_is_a_sample_and_sizes_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spooled: int
) -> None:
    monkeypatch.setattr(folder, "_SPOOLED_BYTES", spooled)
    for number, length in enumerate((3, 5, 3, 2)):
        ids = np.full((1, length) if number % 2 else length, number)
        save(tmp_path, f"{number % 2}/{number}.npz", ids=ids, mask=np.ones_like(ids), labels=number)
    data = read_folder(tmp_path, TEXT)
    assert (data.count, data.sizes, data.joins) == (4, 3, True)
    assert data.labels is not None
    assert data.labels.tolist() == [0, 2, 1, 3]
    assert [(call.samples.tolist(), call.inputs["ids"].tolist()) for call in data.calls(8)] == [
        ([0, 1], [[0, 0, 0], [2, 2, 2]]),
        ([2], [[1] * 5]),
        ([3], [[3] * 2]),
    ]


def test_a_folder_of_rows_is_the_same_data_as_an_array_of_rows(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((5, 3), np.float32)
    for number in range(5):
        save(tmp_path, f"{number}.npz", x=x[number : number + 1])
    found = read_folder(tmp_path, ROWS)
    np.testing.assert_array_equal(found.inputs["x"], x)
    assert found.digest == check_dataset({"x": x}, ROWS).digest


def test_large_files_are_read_when_their_samples_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_SPOOLED_BYTES", 100)
    for number in range(3):
        save(tmp_path, f"{number}.npz", x=np.full(3, number, np.float32))
    data = read_folder(tmp_path, ROWS)
    (tmp_path / "1.npz").unlink()
    np.testing.assert_array_equal(data.sample(2)["x"], [[2, 2, 2]])
    save(tmp_path, "2.npz", x=np.ones((1, 4), np.float32))
    with pytest.raises(InvalidData, match=r"the sample has shape \[1, 4\]"):
        data.sample(2)


def test_a_file_that_loses_rows_in_use_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_SPOOLED_BYTES", 0)
    save(tmp_path, "0.npz", x=np.ones((2, 3), np.float32))
    data = read_folder(tmp_path, ROWS, independent=True)
    save(tmp_path, "0.npz", x=np.ones((1, 3), np.float32))
    with pytest.raises(InvalidData, match="has changed"):
        data.sample(1)


def test_npy_files_hold_the_only_input(tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.float32([1, 2, 3]))
    np.save(tmp_path / "a.npy", np.float32([[4, 5, 6]]))
    np.testing.assert_array_equal(read_folder(tmp_path, ROWS).inputs["x"], [[4, 5, 6], [1, 2, 3]])
    with pytest.raises(InvalidData, match=r"hold one array, but the model has the inputs \['ids', 'mask'\]"):
        read_folder(tmp_path, TEXT)


def test_files_of_other_kinds_are_named_in_a_warning_and_hidden_files_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "0.npz", x=np.zeros(3, np.float32))
    for name in ("README.md", "labels.csv", ".DS_Store"):
        (tmp_path / name).write_text("junk")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/1.npz").write_text("junk")
    os.symlink(tmp_path, tmp_path / "loop")
    with caplog.at_level(logging.WARNING):
        assert read_folder(tmp_path, ROWS).count == 1
    (record,) = caplog.records
    assert "2 file(s) that are not npz are ignored: README.md, labels.csv" in record.getMessage()


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({}, "has no npz, npy, image or sound files"),
        ({"a.txt": b""}, "has no npz, npy, image or sound files"),
        ({"a.npz": b"junk"}, "a.npz': it is not an npz file"),
        ({"a.npz": b"PK\x03\x04junk"}, "a.npz"),
        ({"a.npz": b"PK", "b.npy": b"\x93NUMPY"}, "has both npz and npy files"),
    ],
)
def test_junk_is_refused(tmp_path: Path, files: dict[str, bytes], cause: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=cause):
        read_folder(tmp_path, ROWS)


@pytest.mark.parametrize(
    ("arrays", "cause"),
    [
        ({"z": np.zeros(3, np.float32)}, r"1.npz': no array for input\(s\) \['x'\]; the data have \['z'\]"),
        ({"x": np.zeros(3)}, "1.npz': input 'x' is FP32, but the data is float64"),
        ({"x": np.zeros(4, np.float32)}, r"1.npz': input 'x' has shape \[-1, 3\], but the sample has shape \[1, 4\]"),
        ({"x": np.zeros((2, 1, 3), np.float32)}, r"the sample has shape \[2, 1, 3\]"),
        ({"x": np.full(3, np.nan, np.float32)}, "1.npz': input 'x' contains NaN or infinity"),
        ({"x": np.zeros((0, 3), np.float32)}, "1.npz': the sample has no rows"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(tmp_path: Path, arrays: dict[str, np.ndarray], cause: str) -> None:
    save(tmp_path, "0.npz", x=np.zeros(3, np.float32))
    save(tmp_path, "1.npz", **arrays)
    with pytest.raises(InvalidData, match=cause):
        read_folder(tmp_path, ROWS)
