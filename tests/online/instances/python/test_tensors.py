"""Tensors and types in the module that models written for Triton import."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.online.instances.python.backend_utils import as_module
from penstock.online.instances.python.tensors import (
    TritonModelException,
    check_output,
    check_rows,
    check_type,
    datatype_of,
    numpy_to_triton_type,
    rows_of,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from penstock.tensor import DataType, TensorSpec

Tensor = as_module("pb_utils").Tensor


def test_a_tensor_is_a_named_array() -> None:
    array = np.ones((2, 3), np.float32)
    tensor = Tensor("x", array)
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [2, 3], True)
    assert tensor.as_numpy() is array
    assert triton_to_numpy_type(tensor.triton_dtype()) is np.float32


def test_dlpack_passes_the_memory_itself() -> None:
    tensor = Tensor("x", np.arange(3.0))
    again = Tensor.from_dlpack("y", tensor)
    assert np.shares_memory(again.as_numpy(), tensor.as_numpy())
    with pytest.raises(TritonModelException, match="'z' cannot be read through DLPack"):
        Tensor.from_dlpack("z", [1, 2])


@pytest.mark.parametrize("wrong", [[1, 2], np.array(["text"])], ids=["a list", "text"])
def test_what_is_no_array_is_refused(wrong: object) -> None:
    with pytest.raises(TritonModelException, match=r"tensor 'x' (needs a numpy array|has dtype .*use np\.object_)"):
        Tensor("x", wrong)


@pytest.mark.parametrize(("number", "name"), [(1, "BOOL"), (2, "UINT8"), (11, "FP32"), (13, "STRING"), (14, "BF16")])
def test_types_have_the_numbers_of_tritons_schema(number: int, name: str) -> None:
    datatype = datatype_of(f"TYPE_{name}")
    assert triton_to_numpy_type(number) is datatype.dtype.type is triton_string_to_numpy(f"TYPE_{name}")
    assert numpy_to_triton_type(datatype.dtype) == number


def test_types_that_there_are_not() -> None:
    assert triton_to_numpy_type(0) is None
    assert triton_to_numpy_type(15) is None
    assert numpy_to_triton_type(np.complex64) is None
    with pytest.raises(ValueError, match="FP8"):
        datatype_of("TYPE_FP8")


def test_outputs_are_checked_against_their_spec() -> None:
    spec = TensorSpec("y", DataType.FP32, (-1, 2))
    check_output(spec, np.ones((3, 2), np.float32))
    with pytest.raises(PenstockError, match=r"output 'y' has shape \[3, 1\].*\[-1, 2\]"):
        check_output(spec, np.ones((3, 1), np.float32))
    with pytest.raises(PenstockError, match="output 'y' has datatype FP64.*FP32"):
        check_output(spec, np.ones((3, 2)))


def test_no_answer_can_hold_other_dtypes_or_objects() -> None:
    check_type("y", np.array([b"a", "b"], object))
    with pytest.raises(PenstockError, match="dtype complex128"):
        check_type("y", np.ones(2, complex))
    with pytest.raises(PenstockError, match="contains a int"):
        check_type("y", np.array([b"a", 1], object))


def test_rows_must_agree_with_the_request() -> None:
    inputs = {"a": np.ones((3, 2)), "b": np.ones(3)}
    assert rows_of(inputs) == 3
    assert rows_of({**inputs, "c": np.ones(4)}) is None
    assert rows_of({"a": np.float32(1).reshape(())}) is None
    check_rows("y", np.ones((3, 5)), 3)
    check_rows("y", np.ones(7), None)
    with pytest.raises(PenstockError, match=r"has shape \[7\] for a request with a batch of 3"):
        check_rows("y", np.ones(7), 3)
