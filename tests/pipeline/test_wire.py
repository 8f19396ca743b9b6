"""Inputs and outputs of pipelines as tensors and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.nested import write_json
from penstock.pipeline.function import Function
from penstock.pipeline.graph import declare
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.pipeline.wire import signature_of, to_json, to_members, to_tensors, to_values
from penstock.tensor import DataType, Signature

TEXTS = ValueType(Media.TEXT, DataType.BYTES, many=True)


def function(inputs: dict[str, ValueType], outputs: dict[str, ValueType]) -> Function:
    return Function("f", inputs, outputs, declare(Signature((), ()), []), {})


def tensor(*shape: int, many: bool = False, datatype: DataType = DataType.FP32) -> ValueType:
    return ValueType(Media.TENSOR, datatype, shape, many)


@pytest.mark.parametrize(
    ("kind", "value", "shape", "plain"),
    [
        (TEXT, "größe", [1], "größe"),
        (FILE, b"\xff\x00", [1], "/wA="),
        (TEXTS, ["a", ""], [-1], ["a", ""]),
        (TEXTS, [], [-1], []),
        (tensor(2), np.float32([1, 2.5]), [2], [1.0, 2.5]),
        (tensor(), np.float32(0.1), [1], float(np.float32(0.1))),
        (tensor(2, many=True), [np.float32([1, 2]), np.float32([3, 4])], [-1, 2], [[1.0, 2.0], [3.0, 4.0]]),
        (tensor(-1, 4, many=True), [], [-1, -1, 4], []),
        (tensor(1, datatype=DataType.INT64), np.array([2**53 + 1]), [1], [2**53 + 1]),
        (tensor(1, datatype=DataType.BF16), np.ones(1, DataType.BF16.dtype), [1], [1.0]),
        (tensor(2, datatype=DataType.BYTES), np.array([b"a", "b"], object), [2], ["a", "b"]),
    ],
)
def test_outputs(kind: ValueType, value: Any, shape: list[int], plain: Any) -> None:
    made = function({}, {"y": kind})
    (spec,) = signature_of(made).outputs
    assert (list(spec.shape), spec.datatype) == (shape, kind.datatype)
    tensors = to_tensors(made, {"y": value})
    spec.check(tensors["y"])
    found = to_json(made, tensors)["y"]
    assert found == plain
    assert type(found) is type(plain)


def test_an_optional_output_may_be_absent() -> None:
    made = function({}, {"y": TEXT, "z": TEXT})
    assert list(to_tensors(made, {"y": "a"})) == ["y"]


@pytest.mark.parametrize(
    ("kind", "array", "value"),
    [
        (TEXT, np.array(["größe".encode()], object), "größe"),
        (FILE, np.array([b"\xff"], object), b"\xff"),
        (TEXTS, np.array([b"a", b"b"], object), ["a", "b"]),
        (tensor(), np.float32([3]), np.float32(3)),
    ],
)
def test_inputs(kind: ValueType, array: Any, value: Any) -> None:
    made = function({"x": kind}, {})
    signature_of(made).inputs[0].check(array)
    assert to_values(made, {"x": array}) == {"x": value}


def test_a_tensor_of_bytes_keeps_all_its_elements() -> None:
    array = np.array([[b"a", b"\xff"], [b"", b"b"]], object)
    assert to_values(function({"x": tensor(-1, 2, datatype=DataType.BYTES)}, {}), {"x": array})["x"] is array


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="input 'x' is not UTF-8"):
        to_values(function({"x": TEXT}, {}), {"x": np.array([b"\xff"], object)})


def test_a_list_of_different_shapes_is_refused() -> None:
    made = function({}, {"y": tensor(-1, many=True)})
    with pytest.raises(InvalidArgument, match="output 'y' have different shapes"):
        to_tensors(made, {"y": [np.zeros(1, np.float32), np.zeros(2, np.float32)]})


@pytest.mark.parametrize(
    "datatype", [DataType.UINT8, DataType.INT64, DataType.FP16, DataType.FP32, DataType.BOOL, DataType.BF16]
)
def test_large_arrays_are_written_as_their_lists_are(datatype: DataType) -> None:
    made = function({}, {"y": tensor(-1, -1, 3, datatype=datatype)})
    for shape in ((2, 9000, 3), (3000, 5, 3), (1, 1, 3)):
        array = np.random.default_rng(0).normal(0, 100, shape).astype(datatype.dtype)
        if datatype.is_float:
            array[0, 0] = [np.nan, np.inf, -0.0]
        lists = to_json(made, {"y": array})
        kept = to_members(made, {"y": array})
        assert isinstance(kept["y"], np.ndarray)
        assert write_json(kept) == write_json(lists)
