"""Pooling and lengths against PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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


def sentence_transformers(tokens: Any, mask: Any, how: str) -> Any:
    """The definition of ``sentence_transformers.models.Pooling`` for a batch of texts [texts, tokens, width]."""
    wide = mask[..., None].expand(tokens.shape).float()
    match how:
        case "cls":
            return tokens[:, 0]
        case "max":
            return tokens.masked_fill(wide == 0, -1e9).max(1).values
        case "mean":
            return (tokens * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
        case _:
            return tokens[torch.arange(len(tokens)), mask.shape[1] - 1 - mask.flip(1).argmax(1)]


@pytest.mark.parametrize("how", ["mean", "max", "cls", "last"])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_a_batch_padded_on_the_right_equals_sentence_transformers(how: str, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.normal(size=(len(lengths), max(lengths) + seed % 2, 5)).astype(np.float32)
    mask = (np.arange(tokens.shape[1]) < np.array(lengths)[:, None]).astype(np.int64)
    wanted = sentence_transformers(torch.from_numpy(tokens), torch.from_numpy(mask), how).numpy()
    for text, its, one in zip(tokens, mask, wanted, strict=True):
        np.testing.assert_allclose(pooled(text, its, how), one, atol=0 if how in ("cls", "last", "max") else 1e-6)
        left = np.concatenate([text[its == 0], text[its == 1]])  # padded on the left, a text has the same embedding
        np.testing.assert_array_equal(pooled(left, np.sort(its), how), pooled(text, its, how))


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


@pytest.mark.filterwarnings("error")
@settings(max_examples=300)
@given(st.data(), st.sampled_from([np.float32, np.float64]), st.sampled_from([1e-12, 1e-30, 1.0]))
def test_the_length_of_any_finite_vector(data: st.DataObject, dtype: Any, epsilon: float) -> None:
    most = 38 if dtype is np.float32 else 307
    exponents = data.draw(st.lists(st.integers(-most - 7, most), min_size=1, max_size=5))
    vectors = np.array([[10.0**exponent, -2 * 10.0 ** (exponent - 1), 0] for exponent in exponents], dtype)
    vectors[0] = vectors[0, ::-1]
    found = L2Normalise(epsilon=epsilon).run({"value": vectors})["value"]
    for one, vector in zip(found, vectors, strict=True):
        length = max(math.hypot(*vector.tolist()), epsilon)
        least = np.finfo(dtype).smallest_subnormal
        np.testing.assert_allclose(
            one, vector / dtype(1) if length == 1 else vector.astype(float) / length, rtol=1e-5, atol=2 * least
        )


@pytest.mark.parametrize("row", [[np.inf, 1, -np.inf], [np.nan, 1, 2], [0, 0, 0], [1e-30, 0, 0], [6e4, -6e4, 1]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.filterwarnings("error")
def test_unusual_vectors_equal_torch(row: list[float], dtype: Any) -> None:
    vector = torch.tensor([row, [1, 2, 3]], dtype=torch.float64).to(dtype)
    wanted = torch.nn.functional.normalize(vector.double(), dim=-1).to(dtype).numpy()
    for one, reference in ((vector, wanted), (vector[0], wanted[0])):
        found = L2Normalise().run({"value": one.numpy()})["value"]
        np.testing.assert_allclose(found, reference, rtol=2e-3 if dtype is torch.float16 else 1e-6, atol=1e-30)


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
