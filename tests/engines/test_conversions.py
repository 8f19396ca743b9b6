"""Tensors in the forms of ONNX Runtime's Python interface, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engines.conversions import from_maps, from_text, from_value, to_text, to_value
from penstock.errors import InvalidArgument, Unsupported
from penstock.tensor import DataType, TensorSpec

NUMBERS = [datatype for datatype in DataType if datatype is not DataType.BYTES]


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda one: one.value)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_values_keep_their_numbers_datatype_and_shape(datatype: DataType, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(datatype.dtype)
    found = from_value(to_value(array))
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert found.tobytes() == array.tobytes()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_text_is_kept(texts: list[str]) -> None:
    array = np.empty(len(texts), np.object_)
    array[:] = [text.encode() for text in texts]
    assert from_text(to_text("x", array)).tolist() == array.tolist()


def test_bytes_that_are_no_text_are_padded_or_refused() -> None:
    found = to_text("x", np.array([b"\xff", b"ab"], np.object_))
    assert (found.dtype.itemsize, found.tolist()) == (3, [b"\xff", b"ab"])
    with pytest.raises(InvalidArgument, match="element 1 of input 'x' contains a zero byte"):
        to_text("x", np.array([b"\xff", b"a\0"], np.object_))
    with pytest.raises(InvalidArgument, match="exceeds the limit"):
        to_text("x", np.array([b"\xff" * 1_000_000] + [b"a"] * 100, np.object_))


def test_maps_become_rows_in_the_order_of_their_keys() -> None:
    spec = TensorSpec("p", DataType.FP32, (-1, 2))
    assert from_maps(spec, [{1: 0.5, 0: 0.25}, {0: 1.0, 1: 2.0}]).tolist() == [[0.25, 0.5], [1.0, 2.0]]
    with pytest.raises(Unsupported, match="maps with different keys"):
        from_maps(spec, [{0: 1.0}, {1: 1.0}])
