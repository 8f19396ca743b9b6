"""Rows and columns."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.predictions import PredictionForm, read, write
from penstock.online.server.to_thread import finish
from penstock.tensor import DataType, TensorSpec

X = TensorSpec("x", DataType.FP32, (-1, 2))
N = TensorSpec("n", DataType.INT64, (-1,))
PLAIN = TensorSpec("p", DataType.FP32, (3,))


def ask(specs: list[TensorSpec], batchable: bool = True, /, **members: Any) -> tuple[dict[str, Any], PredictionForm]:
    arrays, form = finish(read(json.dumps(members).encode(), specs, batchable))
    return {name: array.tolist() for name, array in arrays.items()}, form


def answer(form: PredictionForm, **outputs: Any) -> Any:
    return json.loads(write({name: np.asarray(one) for name, one in outputs.items()}, form))


def test_rows_of_the_only_input() -> None:
    assert ask([X], instances=[[1, 2], [3, 4]]) == ({"x": [[1, 2], [3, 4]]}, PredictionForm.ROWS)
    assert ask([X], instances=[{"x": [1, 2]}]) == ({"x": [[1, 2]]}, PredictionForm.ROWS)
    text = TensorSpec("t", DataType.BYTES, (-1,))
    assert ask([text], instances=["a", {"b64": "Yg=="}]) == ({"t": [b"a", b"b"]}, PredictionForm.ROWS)


def test_rows_of_several_inputs() -> None:
    rows = [{"x": [1, 2], "n": 5}, {"n": 6, "x": [3, 4]}]
    assert ask([X, N], instances=rows) == ({"x": [[1, 2], [3, 4]], "n": [5, 6]}, PredictionForm.ROWS)


def test_columns() -> None:
    assert ask([X], inputs=[[1, 2]]) == ({"x": [[1, 2]]}, PredictionForm.COLUMNS)
    assert ask([X], inputs={"x": [[1, 2]]}, signature_name="serving_default") == (
        {"x": [[1, 2]]},
        PredictionForm.COLUMNS,
    )
    assert ask([X, N], inputs={"n": [1], "x": [[1, 2]]}) == ({"n": [1], "x": [[1, 2]]}, PredictionForm.COLUMNS)
    text = TensorSpec("t", DataType.BYTES, ())
    assert ask([text], False, inputs={"b64": "Yg=="}) == ({"t": b"b"}, PredictionForm.COLUMNS)


def test_a_model_without_batch_dimension_takes_one_row_as_a_whole() -> None:
    assert ask([PLAIN], False, instances=[[1, 2, 3]]) == ({"p": [1, 2, 3]}, PredictionForm.WHOLE)
    assert ask([PLAIN], False, inputs=[1, 2, 3]) == ({"p": [1, 2, 3]}, PredictionForm.COLUMNS)
    with pytest.raises(InvalidArgument, match="no batch dimension"):
        ask([PLAIN], False, instances=[[1, 2, 3], [4, 5, 6]])


def test_fixed_dimensions_may_be_rows_too() -> None:
    assert ask([PLAIN], False, instances=[1, 2, 3]) == ({"p": [1, 2, 3]}, PredictionForm.ROWS)


@pytest.mark.parametrize(
    ("inputs", "members", "message"),
    [
        ([X], {}, "Missing 'inputs' or 'instances' key"),
        ([X], {"instances": [[1, 2]], "inputs": [[1, 2]]}, "only one of 'inputs' or 'instances'"),
        ([X], {"instances": []}, "at least one value"),
        ([X], {"instances": {"x": 1}}, "to be a list"),
        ([X], {"instances": None}, "to be a list"),
        ([X], {"instances": [[1, 2], {"x": [1, 2]}]}, "element: 1 of 'instances'"),
        ([X, N], {"instances": [{"x": [1, 2], "n": 1}, {"x": [1, 2]}]}, "element: 1 of 'instances'"),
        ([X], {"instances": [{"z": 1}]}, "does not have named input: z"),
        ([X], {"inputs": {"z": 1}}, "does not have named input: z"),
        ([X, N], {"instances": [[1, 2]]}, "a model with one input"),
        ([X, N], {"inputs": [[1, 2]]}, "a model with one input"),
        ([X], {"instances": [[1], [2, 3]]}, "unevenly"),
        ([X], {"inputs": [[1, 2]], "signature_name": 5}, "must be a string"),
        ([X], {"inputs": [[1, 2]], "signature_name": "tpu"}, 'Serving signature key "tpu" not found'),
    ],
)
def test_what_is_refused(inputs: list[TensorSpec], members: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ask(inputs, **members)


def test_answers() -> None:
    assert answer(PredictionForm.COLUMNS, y=[[1.0]]) == {"outputs": [[1.0]]}
    assert answer(PredictionForm.COLUMNS, y=5, z=[1]) == {"outputs": {"y": 5, "z": [1]}}
    assert answer(PredictionForm.ROWS, y=[[1.0], [2.0]]) == {"predictions": [[1.0], [2.0]]}
    assert answer(PredictionForm.ROWS, y=[1, 2], z=[[3], [4]]) == {
        "predictions": [{"y": 1, "z": [3]}, {"y": 2, "z": [4]}]
    }
    assert answer(PredictionForm.WHOLE, y=[1, 2]) == {"predictions": [[1, 2]]}
    assert answer(PredictionForm.WHOLE, y=1, z=2) == {"predictions": [{"y": 1, "z": 2}]}
    words = np.array([[b"a"], [b"b"]], object)
    assert answer(PredictionForm.ROWS, w=words, w_bytes=words) == {
        "predictions": [{"w": ["a"], "w_bytes": [{"b64": "YQ=="}]}, {"w": ["b"], "w_bytes": [{"b64": "Yg=="}]}]
    }


def test_outputs_that_are_no_rows() -> None:
    with pytest.raises(InvalidArgument, match="Tensor name: z has inconsistent batch size: 1 expecting 2"):
        answer(PredictionForm.ROWS, y=[1, 2], z=[1])
    with pytest.raises(InvalidArgument, match="Tensor name: y has no shape information"):
        answer(PredictionForm.ROWS, y=1)


@given(hnp.arrays(np.int16, st.tuples(st.integers(1, 5), st.just(2))), hnp.arrays(np.int64, st.integers(1, 5)))
def test_rows_and_columns_say_the_same(x: np.ndarray, n: np.ndarray) -> None:
    count = min(len(x), len(n))
    x, n = x[:count].astype(np.float32), n[:count]
    rows = [{"x": one.tolist(), "n": int(number)} for one, number in zip(x, n, strict=True)]
    by_rows, _ = finish(read(json.dumps({"instances": rows}).encode(), [X, N], batchable=True))
    by_columns, _ = finish(
        read(json.dumps({"inputs": {"x": x.tolist(), "n": n.tolist()}}).encode(), [X, N], batchable=True)
    )
    for arrays in (by_rows, by_columns):
        np.testing.assert_array_equal(arrays["x"], x)
        np.testing.assert_array_equal(arrays["n"], n)
    written = json.loads(write(by_rows, PredictionForm.ROWS))["predictions"]
    assert written == rows
    assert json.loads(write(by_rows, PredictionForm.COLUMNS))["outputs"] == {"x": x.tolist(), "n": n.tolist()}
