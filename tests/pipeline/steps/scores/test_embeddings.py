"""Pooling and lengths against PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.scores.embeddings import L2Normalise, Pool
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import Array, DataType

_TOKENS = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 9), st.integers(1, 5)), elements=st.floats(-9, 9, width=32)
)


def pooled(tokens: Array, mask: Array | None = None, how: Any = "mean") -> Array:
    """The result of the step."""
    found: Array = Pool(how=how).run({"value": tokens} if mask is None else {"value": tokens, "mask": mask})["value"]
    return found


@given(_TOKENS, st.data())
def test_pooling_equals_sentence_transformers(tokens: Array, data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(tokens), max_size=len(tokens)).filter(any)))
    wide, weights = torch.from_numpy(tokens)[None], torch.from_numpy(mask)[None, :, None].float()
    mean = (wide * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    np.testing.assert_allclose(pooled(tokens, mask), mean[0].numpy(), atol=1e-5)
    largest = wide.masked_fill(weights == 0, -1e9).max(1).values
    np.testing.assert_array_equal(pooled(tokens, mask, "max"), largest[0].numpy())
    used = tokens[mask != 0]
    np.testing.assert_array_equal(pooled(tokens, mask, "cls"), used[0])
    np.testing.assert_array_equal(pooled(tokens, mask, "last"), used[-1])
    np.testing.assert_array_equal(pooled(used), pooled(tokens, mask))


@given(arrays.arrays(np.float32, arrays.array_shapes(max_dims=3), elements=st.floats(-9, 9, width=32)), st.data())
def test_length_equals_torch(vectors: Array, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-vectors.ndim, vectors.ndim - 1))
    found = L2Normalise(axis=axis).run({"value": vectors})["value"]
    wanted = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=axis).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert found.dtype == np.float32


def test_zero_and_half_precision() -> None:
    assert not L2Normalise().run({"value": np.zeros(3, np.float32)})["value"].any()
    found = L2Normalise().run({"value": np.full(4, 300, np.float16)})["value"]  # whose square is over the limit of FP16
    assert found.dtype == np.float16
    assert found.tolist() == [0.5] * 4
    assert pooled(np.full((3, 2), 40_000, np.float16)).tolist() == [40_000] * 2


def test_wrong_values() -> None:
    with pytest.raises(InvalidInput, match="no tokens to pool"):
        pooled(np.ones((2, 3), np.float32), np.zeros(2, np.int64))
    with pytest.raises(InvalidInput, match=r"'mask' has the shape \[3\], but there are 2 tokens"):
        pooled(np.ones((2, 3), np.float32), np.ones(3, np.int64))
    tokens = ValueType(shape=(-1, 5))
    with pytest.raises(InvalidConfig, match=r"needs floating-point numbers \[tokens, width\]"):
        Pool().check({"value": TEXT})
    with pytest.raises(InvalidConfig, match="'mask', but it is text"):
        Pool().check({"value": tokens, "mask": TEXT})
    mask = ValueType(datatype=DataType.INT64, shape=(-1,))
    assert Pool().check({"value": tokens, "mask": mask})["value"].shape == (5,)
    with pytest.raises(InvalidConfig, match="with axis 1"):
        L2Normalise(axis=1).check({"value": ValueType(shape=(3,))})
