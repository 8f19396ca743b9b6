from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("skl2onnx", reason="the extra penstock[sklearn] is not installed")

from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

from benchmarks.zoo.sklearn import MODELS
from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.tables.table import declared, table_of
from penstock.tensor import DataType


def test_each_column_of_a_table_is_an_input_of_its_type(tmp_path: Path) -> None:
    table = table_of(MODELS["table"].make(tmp_path))
    kinds = {column.name: column.datatype for column in table.columns}
    assert kinds == {
        "age": DataType.FP32,
        "net income": DataType.FP32,
        "city": DataType.BYTES,
        "rooms": DataType.INT64,
        "note": DataType.BYTES,
    }
    probe = table.columns[2].probe(np.random.default_rng(0), 9)
    assert set(probe.ravel().tolist()) <= {b"Rome", b"Oslo", b"Paris"}


def test_a_matrix_and_a_text_are_one_input(tmp_path: Path) -> None:
    (matrix,) = table_of(MODELS["logistic_letters"].make(tmp_path)).columns
    assert (matrix.name, matrix.width) == ("features", 5)
    text = table_of(MODELS["text"].make(tmp_path))
    assert text.as_text
    assert text.rows({"text": np.array([["é".encode()]], np.object_)}) == ["é"]


def test_declarations_of_unknown_columns_are_refused(tmp_path: Path) -> None:
    table = table_of(MODELS["table"].make(tmp_path))
    options = ConvertOptions(inputs=(InputSpec("town", DataType.BYTES, ("N", 1)),))
    with pytest.raises(InvalidArgument, match="no input 'town'") as raised:
        declared(table, options)
    assert '--inputs "city:string[N,1]"' in raised.value.hint


def test_a_declaration_changes_the_type_of_numbers(tmp_path: Path) -> None:
    table = table_of(MODELS["table"].make(tmp_path))
    specs = declared(table, ConvertOptions(inputs=(InputSpec("age", DataType.FP64, None),)))
    assert {spec.name: spec.datatype for spec in specs}["age"] is DataType.FP64


@pytest.mark.parametrize("scaler", [StandardScaler(), RobustScaler(), MinMaxScaler(), MaxAbsScaler(), SimpleImputer()])
def test_plausible_values_lie_in_the_range_of_training(scaler: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)) * [1, 20, 0.1] + [0, 1000, -5]
    (column,) = table_of(make_pipeline(scaler, LogisticRegression()).fit(x, x[:, 0] > 0)).columns
    probe = np.abs(column.probe(rng, 200)).max(axis=0)
    largest = np.abs(x).max(axis=0)
    assert probe.shape == (3,)
    assert ((probe > 0.3 * largest) & (probe < 6 * largest)).all()
