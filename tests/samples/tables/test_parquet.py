from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.samples.open import load_dataset
from penstock.samples.tables.parquet import parquet_samples
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 1)),)
FEATURES = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), Y)
COLUMNS = Signature(
    (
        TensorSpec("age", DataType.INT64, (-1, 1)),
        TensorSpec("city", DataType.BYTES, (-1, 1)),
        TensorSpec("member", DataType.BOOL, (-1,)),
        TensorSpec("curve", DataType.FP32, (-1, -1)),
    ),
    Y,
)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415 - an extra

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def read(tmp_path: Path, columns: dict[str, Any], signature: Signature) -> Dataset:
    return load_dataset(write(tmp_path / "data.parquet", columns), signature)


def test_columns_in_order_are_the_features_of_the_only_input(tmp_path: Path) -> None:
    data = read(tmp_path, {"a": [1.0, 4.0], "b": [2, 5], "labels": [0, 1], "c": np.float32([-3, 60])}, FEATURES)
    np.testing.assert_array_equal(data.inputs["x"], np.float32([[1, 2, -3], [4, 5, 60]]))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1]


def test_columns_are_named_after_inputs_and_may_hold_lists(tmp_path: Path) -> None:
    columns = {
        "curve": [[0.5], [1.0, 2.0]],
        "city": ["Bergen", "Köln"],
        "member": [True, False],
        "age": [7, 81],
        "labels": ["no", "yes"],
        "other": [None, 3.5],
    }
    data = read(tmp_path, columns, COLUMNS)
    assert (data.count, data.sizes) == (2, 2)
    last = data.sample(1)
    assert (last["age"].tolist(), last["member"].tolist(), last["curve"].tolist()) == ([[81]], [False], [[1, 2]])
    assert data.labels is not None
    assert data.labels.tolist() == ["no", "yes"]


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"a": [1.0], "b": [2.0]}, r"has the columns \['a', 'b'\], but the model has the inputs \['x'\]"),
        ({"a": [1.0], "b": ["two"], "c": [1.0]}, "column 'b' has 'two' in a row"),
        ({"a": [1.0], "b": [None], "c": [1.0]}, "column 'b' has no value in a row"),
        ({"a": [1.0], "b": [float("nan")], "c": [1.0]}, "sample 0 of .*NaN or infinity"),
        ({"a": [], "b": [], "c": []}, "has no samples"),
        ({"a": [1.0], "b": [2.0], "c": [3.0], "label": [1]}, "column 'label' of .* may be labels or a feature"),
    ],
)
def test_tables_that_do_not_suit_the_model_are_rejected(tmp_path: Path, columns: dict[str, Any], cause: str) -> None:
    with pytest.raises(InvalidData, match=cause):
        read(tmp_path, columns, FEATURES)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"a,b,c\n1,2,3\n" * 10, b"PAR1" + bytes(40) + b"PAR1"])
def test_damaged_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_bytes(content)
    with pytest.raises(InvalidData, match=r"cannot read '.*data.parquet'"):
        load_dataset(tmp_path / "data.parquet", FEATURES)


def test_a_cut_or_changed_file_is_an_error_or_the_same_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", {name: np.arange(300.0) for name in "abc"}, row_group_size=100)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for number in range(60):
        broken = bytearray(content)
        if number % 2:
            del broken[int(rng.integers(1, len(content))) :]
        else:
            broken[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            assert load_dataset(path, FEATURES).count <= 300
        except InvalidData:
            continue


def test_a_file_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows, width = 4000, 512
    lists = list(np.random.default_rng(0).random((rows, width)))
    path = write(tmp_path / "data.parquet", {"x": lists}, row_group_size=500)
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), Y)
    samples = parquet_samples(path, signature)
    next(samples)
    tracemalloc.start()
    seen = 1 + sum(1 for _ in samples)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == rows
    assert peak < rows * width  # an eighth of the file


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match=r"pip install 'penstock\[parquet\]'"):
        load_dataset(tmp_path / "data.parquet", FEATURES)
