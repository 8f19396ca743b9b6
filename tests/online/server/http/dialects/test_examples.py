"""Examples, classes and values."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.examples import read, write_classes, write_values
from penstock.online.server.to_thread import finish
from penstock.tensor import DataType, TensorSpec

AGE = TensorSpec("age", DataType.FP32, (-1, 1))
SIZE = TensorSpec("size", DataType.INT64, (-1,))
GRID = TensorSpec("grid", DataType.FP32, (-1, 2, -1))
NAME = TensorSpec("name", DataType.BYTES, (-1, 2))
FLAG = TensorSpec("flag", DataType.BOOL, (-1, 1))


def ask(specs: list[TensorSpec], **members: Any) -> dict[str, Any]:
    return {name: array.tolist() for name, array in finish(read(json.dumps(members).encode(), specs)).items()}


def classes(labels: dict[str, list[str]] | None = None, **outputs: Any) -> Any:
    return json.loads(write_classes({name: np.array(one) for name, one in outputs.items()}, labels or {}))


def values(**outputs: Any) -> Any:
    return json.loads(write_values({name: np.array(one) for name, one in outputs.items()}))


def test_features_become_rows() -> None:
    examples = [{"age": 1.5, "size": 3, "other": "x"}, {"age": [2], "size": [4]}]
    assert ask([AGE, SIZE], examples=examples) == {"age": [[1.5], [2]], "size": [3, 4]}
    assert ask([GRID], examples=[{"grid": [1, 2, 3, 4]}]) == {"grid": [[[1, 2], [3, 4]]]}
    assert ask([NAME], examples=[{"name": ["a", {"b64": "Yg=="}]}]) == {"name": [[b"a", b"b"]]}
    assert ask([AGE, FLAG], examples=[{"age": True, "flag": True}]) == {"age": [[1]], "flag": [[True]]}


def test_the_context_is_part_of_each_example() -> None:
    found = ask([AGE, SIZE], context={"age": 1, "size": 7}, examples=[{"age": 2}, {}], signature_name="")
    assert found == {"age": [[2], [1]], "size": [7, 7]}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "Expecting 'examples'"),
        ({"examples": []}, "Expecting 'examples'"),
        ({"examples": {"age": 1}}, "Expecting 'examples'"),
        ({"examples": [1]}, "Example must be JSON object"),
        ({"examples": [{"age": 1}], "context": []}, "Example must be JSON object"),
        ({"examples": [{"age": 1}, {}]}, "neither example 1 nor the context has a feature 'age'"),
        ({"examples": [{"age": [1, 2]}]}, "does not fit an input of shape"),
        ({"examples": [{"age": [[1]]}]}, "does not fit an input of shape"),
        ({"examples": [{"age": []}]}, "does not fit an input of shape"),
        ({"examples": [{"age": 1}, {"age": [1, 2]}]}, "unevenly"),
        ({"examples": [{"age": "a"}]}, "do not fit FP32"),
        ({"examples": [{"age": 1}], "signature_name": "z"}, "not found"),
    ],
)
def test_what_is_refused(members: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ask([AGE], **members)


def test_a_row_whose_shape_is_open_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="does not fit"):
        ask([TensorSpec("g", DataType.FP32, (-1, -1, -1))], examples=[{"g": [1, 2]}])


def test_classes() -> None:
    words = np.array([[b"cat", b"dog"]], object)
    assert classes(labels_out=words, probability=[[0.75, 0.25]]) == {"results": [[["cat", 0.75], ["dog", 0.25]]]}
    named = classes(classes=words, more=words, scores=[[0.75, 0.25]], others=[[0.0, 0.0]])
    assert named == {"results": [[["cat", 0.75], ["dog", 0.25]]]}
    scores = [[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    assert classes({"y": ["cat", "dog"]}, y=scores)["results"][1] == [["cat", 1.0], ["dog", 0.0], ["2", 0.0]]
    assert classes(y=scores)["results"][0] == [["0", 0.5], ["1", 0.25], ["2", 0.25]]
    assert classes({"y": ["a", "b", "c", "d"]}, y=scores)["results"][1][2] == ["c", 0.0]


def test_values() -> None:
    assert values(y=[1.5, 2.5]) == {"results": [1.5, 2.5]}
    assert values(y=[[1.5], [2.5]], z=[1]) == {"results": [1.5, 2.5]}
    assert values(outputs=[1.5], z=[2.5]) == {"results": [1.5]}


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": [1.0]},
        {"y": [[1]]},
        {"y": [[1.0]], "z": [[1.0]]},
        {"y": [[1.0]], "z": np.array([[b"a", b"b"]], object)},
        {"z": np.array([[b"a"]], object)},
    ],
)
def test_outputs_that_are_no_classes(outputs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="not a classification"):
        classes(**outputs)


@pytest.mark.parametrize("outputs", [{"y": 1.0}, {"y": [[1.0, 2.0]]}, {"y": [1]}, {"y": [1.0], "z": [1.0]}])
def test_outputs_that_are_no_values(outputs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="not a regression"):
        values(**outputs)
