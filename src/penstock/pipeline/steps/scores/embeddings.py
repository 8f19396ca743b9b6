"""Embeddings: pooling over tokens, and length 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.scores.activations import widened
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array


class Pool(Step, frozen=True, kw_only=True):
    """Pool the embeddings of tokens, [tokens, width], into one of [width], as Sentence Transformers does for one text.

    ``mask`` [tokens] is not 0 for the tokens that count, as a tokeniser's ``attention_mask``. Without it, all count. It must select at
    least one token. If texts are padded on the left, the first token (``cls``) is that of the text: Sentence Transformers would take
    the padding of all but the longest text of a batch.
    """

    inputs: ClassVar[tuple[str, ...]] = ("value", "mask")
    optional: ClassVar[frozenset[str]] = frozenset({"mask"})

    how: Literal["mean", "max", "cls", "last"] = "mean"
    """``mean`` or ``max`` of the tokens, or the first (``cls``) or last of them."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """One embedding. Raises InvalidConfig unless the value is of shape [tokens, width], and the mask of [tokens]."""
        given, mask = inputs["value"], inputs.get("mask")
        if given.many or not given.datatype.is_float or len(given.shape) != 2:
            raise wrong_type("pool", "value", "floating-point numbers [tokens, width]", given)
        if mask is not None:
            fits = len(mask.shape) == 1 and (mask.shape[0] == given.shape[0] or -1 in (*mask.shape, given.shape[0]))
            if mask.many or mask.datatype.dtype.kind not in "biuf" or not fits:
                raise wrong_type("pool", "mask", f"numbers {[given.shape[0]]}", mask)
        return {"value": ValueType(datatype=given.datatype, shape=given.shape[1:])}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The embedding. A mean is computed in FP32, or in FP64 if the tokens are."""
        tokens: Array = inputs["value"]
        if (mask := inputs.get("mask")) is not None:
            if mask.shape != tokens.shape[:1]:
                raise InvalidInput(f"'mask' has the shape {list(mask.shape)}, but there are {len(tokens)} tokens")
            if not mask.all():
                tokens = tokens[mask != 0]
        if not len(tokens):
            raise InvalidInput("there are no tokens to pool", "send text that is not empty")
        match self.how:
            case "mean":
                wide = np.float64 if tokens.dtype == np.float64 else np.float32
                return {"value": tokens.mean(axis=0, dtype=wide).astype(tokens.dtype)}
            case "max":
                return {"value": tokens.max(axis=0)}
            case "cls":
                return {"value": tokens[0]}
            case "last":
                return {"value": tokens[-1]}


_EPSILON = 1e-12
"""The default of PyTorch. The squares of such lengths are far from the least number of FP32."""


class L2Normalise(Step, frozen=True, kw_only=True):
    """Divide vectors by their Euclidean length: ``x / max(length, epsilon)``, as ``torch.nn.functional.normalize`` does.

    Unlike in PyTorch, no finite vector is too long: PyTorch returns 0 for FP32 vectors that are longer than 1.8e19.
    """

    axis: int = -1
    """Axis of the vectors."""
    epsilon: Annotated[float, msgspec.Meta(gt=0)] = _EPSILON
    """Least divisor, so that a zero vector stays zero."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The type of the input. Raises InvalidConfig unless it is an array of floating-point numbers that has the axis."""
        given = inputs["value"]
        rank = len(given.shape)
        if given.many or not given.datatype.is_float or not -rank <= self.axis < rank:
            raise wrong_type("l2_normalise", "value", f"floating-point numbers with axis {self.axis}", given)
        return {"value": given}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The vectors of length 1, in the input's datatype. Lengths are computed in FP32 or FP64."""
        vectors: Array = inputs["value"]
        wide = widened(vectors)
        last = wide if self.axis in (-1, wide.ndim - 1) else np.moveaxis(wide, self.axis, -1)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # infinities give NaN
            squares = np.asarray(np.vecdot(last, last))
            found = last / np.sqrt(squares)[..., None] if self._is_exact(squares) else self._scaled(last)
        found = found if last is wide else np.moveaxis(found, -1, self.axis)
        return {"value": found if wide is vectors else found.astype(vectors.dtype)}

    def _is_exact(self, squares: Array) -> bool:
        """True if all lengths are at least ``epsilon``, and no square was too large or too small for its datatype."""
        if not squares.size:
            return False
        epsilon = self.epsilon if self.epsilon > _EPSILON else _EPSILON
        least, most = float(squares.item(squares.argmin())), float(squares.item(squares.argmax()))
        return epsilon * epsilon <= least and most < math.inf

    def _scaled(self, vectors: Array) -> Array:
        """The vectors of length 1, computed in FP64 from vectors that are multiplied by powers of two."""
        real = vectors.astype(np.float64)
        largest = np.abs(real).max(axis=-1, keepdims=True, initial=0)
        scale = np.where(largest > 1e100, 2.0**-600, np.where(largest < 1e-100, 2.0**400, 1.0))
        real *= scale
        length = np.sqrt(np.vecdot(real, real))[..., None]
        found: Array = real / np.maximum(length, self.epsilon * scale)
        return found.astype(vectors.dtype)
