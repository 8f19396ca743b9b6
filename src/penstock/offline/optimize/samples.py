"""Inputs for comparing two models, generated from a signature with a seed. They include extreme values on purpose."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.tensor import Array, DataType, Signature, TensorSpec

_SEED = 20_111
_FREE_SIZES = (8, 32, 64, 224)
_CASES = (("normal", 1), ("normal", 3), ("zeros", 1), ("large", 1), ("negative", 1))

# The largest FP16 number is 65504, which inputs of 100 can reach after a few layers.
_LARGE = {DataType.FP16: 8.0, DataType.BF16: 32.0}


class LabelledInputs(dict[str, Array]):
    """Inputs by name, with a ``label`` for messages."""

    def __init__(self, label: str, inputs: dict[str, Array]) -> None:
        super().__init__(inputs)
        self.label = label


def generate(signature: Signature, free_size: int) -> Iterator[LabelledInputs]:
    """Generate deterministic samples: normally distributed values for batches of 1 and 3; zeros, large values and negative values for
    a batch of 1.

    A free first axis is the batch, and every other free dimension has size ``free_size``. Integers are 0 or 1, so that they are valid
    indices; in the sample ``large``, they are at most 99. The model may reject some samples.
    """
    seen = set()
    for kind, batch in _CASES:
        shapes = tuple(_shape(spec, batch, free_size) for spec in signature.inputs)
        if (kind, shapes) in seen:
            continue
        seen.add((kind, shapes))
        rng = np.random.default_rng([_SEED, batch, len(seen)])
        inputs = {
            spec.name: _array(spec, shape, kind, rng) for spec, shape in zip(signature.inputs, shapes, strict=True)
        }
        yield LabelledInputs(f"{kind} values at batch {batch}", inputs)


def free_sizes(signature: Signature) -> tuple[int, ...]:
    """Sizes to try for free dimensions after the first axis, smallest first; a single size if there are none."""
    is_free = any(-1 in spec.shape[1:] for spec in signature.inputs)
    return _FREE_SIZES if is_free else _FREE_SIZES[:1]


def _shape(spec: TensorSpec, batch: int, free_size: int) -> tuple[int, ...]:
    return tuple((batch if axis == 0 else free_size) if dim == -1 else dim for axis, dim in enumerate(spec.shape))


def _array(spec: TensorSpec, shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> Array:
    datatype = spec.datatype
    if datatype is DataType.BYTES:
        return np.full(shape, b"a", np.object_)
    if not datatype.is_float:
        top = {"zeros": 1, "large": 2 if datatype is DataType.BOOL else 100}.get(kind, 2)
        return np.asarray(rng.integers(0, top, shape)).astype(datatype.dtype)
    normal = np.asarray(rng.standard_normal(shape))
    match kind:
        case "zeros":
            normal = np.zeros(shape)
        case "large":
            normal = normal * _LARGE.get(datatype, 100.0)
        case "negative":
            normal = -np.abs(normal)
    return normal.astype(datatype.dtype)
