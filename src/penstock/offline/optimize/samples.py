"""Generate inputs for the comparison of two models, from a signature and a seed. They include extreme values and unusual sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.inputs.sizes import Shapes
from penstock.inputs.values import Kind, draw
from penstock.tensor import Array, Signature

_SEED = 20_111
_FREE_SIZES = (8, 32, 64, 224)
_CASES: tuple[tuple[Kind, int], ...] = (("normal", 1), ("normal", 3), ("zeros", 1), ("large", 1), ("negative", 1))
_ODD_SIZES = (1, 5, 17, 0)
_SEPARATE_SIZES = (2, 3, 4, 6, 7, 9, 10, 11)
_LARGEST_DOUBLED = 64
_MAX_ELEMENTS = 1 << 22


class LabelledInputs(dict[str, Array]):
    """Inputs by name, with a ``label`` for messages. ``is_odd`` marks sizes that may crash the process; see ``apart.py``."""

    def __init__(self, label: str, inputs: dict[str, Array], *, is_odd: bool = False) -> None:
        super().__init__(inputs)
        self.label, self.is_odd = label, is_odd


def generate(signature: Signature, free_size: int) -> Iterator[LabelledInputs]:
    """Generate deterministic samples: normally distributed values in batches of 1 and 3, and zeros, large values and negative values
    in batches of 1.

    A free first axis is the batch axis. Every other free dimension has the size ``free_size``. Integers are 0 or 1, so that they are
    valid indices; in the sample ``large``, they are at most 99. The model may reject some samples.
    """
    seen = set()
    for kind, batch in _CASES:
        shapes = _shapes(signature, batch, free_size)
        if (kind, tuple(shapes.values())) in seen:
            continue
        seen.add((kind, tuple(shapes.values())))
        yield make_sample(signature, shapes, kind, [_SEED, batch, len(seen)])


def generate_sizes(
    signature: Signature, free_size: int, names: Mapping[str, Sequence[str]] | None = None
) -> Iterator[LabelledInputs]:
    """Generate samples with normally distributed values, for sizes of free dimensions that ``generate`` does not cover.

    In two samples, all free dimensions have different sizes. In up to five samples with batch size 2, all other free dimensions have
    the same size: twice ``free_size``, 1, 5, 17 or 0. One sample has batch size 0. ``names`` maps inputs to names of dimensions;
    dimensions with the same name get the same size. The model may reject some samples.
    """
    doubled = [2 * free_size] if free_size <= _LARGEST_DOUBLED else []
    found = [_separate_shapes(signature, names or {}, least) for least in (0, free_size)]
    found += [_shapes(signature, 2, size) for size in (*doubled, *_ODD_SIZES)]
    found.append(_shapes(signature, 0, free_size))
    seen = [_shapes(signature, batch, free_size) for _, batch in _CASES]
    for number, shapes in enumerate(found):
        if shapes not in seen:
            seen.append(shapes)
            sample = make_sample(signature, shapes, "normal", [_SEED, 1000, number])
            yield LabelledInputs(sample.label, sample, is_odd=True)


def free_sizes(signature: Signature) -> tuple[int, ...]:
    """Sizes to try for free dimensions after the first axis, smallest first; a single size if there are none.

    A size is left out if an input would have more than four million elements.
    """
    is_free = any(-1 in spec.shape[1:] for spec in signature.inputs)
    larger = _FREE_SIZES[1:] if is_free else ()
    return _FREE_SIZES[:1] + tuple(size for size in larger if _elements(signature, size) <= _MAX_ELEMENTS)


def make_sample(signature: Signature, shapes: Shapes, kind: Kind, seed: Sequence[int]) -> LabelledInputs:
    """Inputs of ``shapes`` with values of ``kind``."""
    rng = np.random.default_rng(list(seed))
    inputs = {spec.name: draw(spec, shapes[spec.name], kind, rng) for spec in signature.inputs}
    return LabelledInputs(f"{kind} values of {sizes_of(inputs)}", inputs)


def sizes_of(inputs: Mapping[str, Array]) -> str:
    """The names and shapes of the inputs, for messages: ``x [3, 4], mask [3]``."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())


def _elements(signature: Signature, free_size: int) -> int:
    """The number of elements of the largest input of one sample."""
    return max(math.prod(shape) for shape in _shapes(signature, 1, free_size).values())


def _shapes(signature: Signature, batch: int, free_size: int) -> Shapes:
    return {
        spec.name: tuple(
            (batch if axis == 0 else free_size) if dim == -1 else dim for axis, dim in enumerate(spec.shape)
        )
        for spec in signature.inputs
    }


def _separate_shapes(signature: Signature, names: Mapping[str, Sequence[str]], least: int) -> Shapes:
    sizes: dict[object, int] = {}
    shapes: Shapes = {}
    for spec in signature.inputs:
        known = names.get(spec.name, ())
        keys = [(known[axis] if axis < len(known) else "") or (spec.name, axis) for axis in range(len(spec.shape))]
        for key, dim in zip(keys, spec.shape, strict=True):
            if dim == -1 and key not in sizes:
                sizes[key] = least + _SEPARATE_SIZES[len(sizes) % len(_SEPARATE_SIZES)]
        shapes[spec.name] = tuple(sizes[key] if dim == -1 else dim for key, dim in zip(keys, spec.shape, strict=True))
    return shapes
