"""Makes the calls on which a source and its ONNX model are compared: given samples, plausible values, free sizes, extreme values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.inputs.meaning import Meaning, Role
from penstock.inputs.sizes import Shapes, shapes_to_try, sum_of, terms_of
from penstock.inputs.values import plausible
from penstock.offline.convert.base import Axis
from penstock.tensor import Array, DataType, Signature, TensorSpec

_BATCH = 3
_SIZES = 3
"""Number of further sizes of each free axis that the source should accept."""
_LARGEST = 512
"""Largest size of a free axis, unless the source needs more."""
_MOST_ELEMENTS = 1 << 20
"""Largest size of a call that is not needed otherwise."""
_MANY = 64
"""Rows of a call whose mean errors are compared."""
_MOST_IDS = 1 << 16
"""Largest table of which every id is tried."""
_VALUES = frozenset({Role.IMAGE, Role.AUDIO, Role.SPECTRUM, Role.STATE, Role.FEATURES, Role.SCALAR, Role.TENSOR})
"""The roles of inputs that take any number."""
_HUGE = {DataType.FP16: 1e2, DataType.BF16: 1e3}
_TINY = {DataType.FP16: 1e-2}


class Case(msgspec.Struct, frozen=True):
    """The inputs of one call."""

    label: str
    inputs: dict[str, Array]
    is_extreme: bool = False
    """Values are far from plausible ones, so that FP32 may overflow."""
    is_flat: bool = False
    """Many values are equal, so that variances are 0 and kernels show nothing but their rounding."""
    has_ties: bool = False
    """Values are equal on purpose, so that their order is arbitrary."""
    is_probe: bool = False
    """The source knows that these values are hard to convert."""
    is_empty: bool = False
    """An axis has the size 0. Some kernels of ONNX Runtime end their process."""


class Maker:
    """Makes cases for the inputs of ``signature``. ``axes`` describe the free dimensions as ``FrameworkModel.axes`` does."""

    def __init__(
        self, signature: Signature, axes: Mapping[str, Sequence[Axis]], meanings: Mapping[str, Meaning], seed: int
    ) -> None:
        self._signature, self._meanings, self._seed = signature, meanings, seed
        self._axes = {name: {axis.index: axis for axis in each} for name, each in axes.items()}
        self._made = 0

    def shapes(self) -> Iterator[Shapes]:
        """Shapes to try, until the source accepts one."""
        names = self._names()
        # Small sizes are faster, and show as much, except that an axis of size 1 hides a wrong axis.
        found = [
            self._with(shapes, {})
            for rows in (1, _BATCH)
            for shapes in shapes_to_try(self._signature, self._meanings, names, rows)
        ]
        return iter(sorted(found, key=lambda shapes: (self._hides(shapes), _elements(shapes))))

    def blank(self, shapes: Shapes) -> Iterator[Case]:
        """Calls of usual size with equal numbers, like a blank image: variances are then zero, and rounding can make them negative."""
        usual = next(self._usual(), shapes)
        if usual != shapes and _elements(usual) <= _MOST_ELEMENTS:
            inputs = dict(self.plausible(usual).inputs)
            for spec in self._signature.inputs:
                if spec.datatype.is_float and self._meanings[spec.name].role in _VALUES:
                    inputs[spec.name] = np.full_like(inputs[spec.name], 0.7)
            yield Case(f"equal values of {_shown(usual)}", inputs, is_flat=True)

    def _usual(self) -> Iterator[Shapes]:
        return (self._with(shapes, {}) for shapes in shapes_to_try(self._signature, self._meanings, self._names()))

    def _names(self) -> dict[str, list[str]]:
        return {
            spec.name: [self._name(spec, axis) for axis in range(len(spec.shape))] for spec in self._signature.inputs
        }

    def _hides(self, shapes: Shapes) -> bool:
        free = [spec.shape for spec in self._signature.inputs]
        return any(
            size == 1 and dim == -1 and index
            for dims, sizes in zip(free, shapes.values(), strict=True)
            for index, (dim, size) in enumerate(zip(dims, sizes, strict=True))
        )

    def plausible(self, shapes: Shapes, label: str = "") -> Case:
        rng = self._rng()
        inputs = plausible(self._signature, self._meanings, shapes, rng)
        states = {
            name: rng.standard_normal(shapes[name]) for name, one in self._meanings.items() if one.role is Role.STATE
        }
        for name, state in states.items():
            if inputs[name].dtype.kind == "f":
                inputs[name] = state.astype(inputs[name].dtype)
        return Case(
            f"{label or 'plausible'} values of {_shown(shapes)}",
            inputs,
            is_empty=0 in [size for one in shapes.values() for size in one],
        )

    def sizes(self, shapes: Shapes) -> Iterator[tuple[str, list[Shapes]]]:
        """For each free dimension, its name and ``shapes`` with other sizes. The source may reject some."""
        seen: set[str] = set()
        for spec in self._signature.inputs:
            for index, dim in enumerate(spec.shape):
                name = self._name(spec, index)
                if dim != -1 or name in seen or terms_of(name):
                    continue
                seen.add(name)
                axis = self._axis(spec, index)
                base = shapes[spec.name][index]
                tried = (_BATCH, 1) if index == 0 else ()
                found = dict.fromkeys(
                    (*tried, base + 1, axis.low, base // 2 + 1, 2 * base, base - 1, 3 * base, base + 8, base + 32)
                )
                fitting = [
                    size for size in found if max(1, axis.low) <= size <= self._high(axis, base) and size != base
                ]
                yield name, [self._with(shapes, {name: size}) for size in fitting]

    def wanted_sizes(self) -> int:
        return _SIZES

    def mixed(self, shapes: Shapes) -> Shapes:
        """``shapes`` with another size of every free dimension."""
        rng = self._rng()
        return self._with(
            shapes,
            {name: int(rng.choice([base + 1, base + 2, base + 3])) for name, base in self._bases(shapes).items()},
        )

    def lengths(self, shapes: Shapes, rows: int) -> Iterator[Shapes]:
        """``shapes`` in which one free dimension, or its sum with another one, is about ``rows``: the length of a table."""
        bases = self._bases(shapes)
        first = {self._name(spec, 0) for spec in self._signature.inputs if spec.shape}
        for name in bases:
            others = sorted(size for other, size in bases.items() if other not in first and other != name)
            for size in dict.fromkeys((rows, rows - 1, rows - 2, *(rows - other for other in others))):
                tried = self._with(shapes, {**dict.fromkeys(first, 1), name: size})
                if name not in first and size > bases[name] and _elements(tried) <= _MOST_ELEMENTS:
                    yield tried

    def many(self, shapes: Shapes) -> Iterator[Case]:
        """A call with many rows, over which rounding averages out."""
        free = {self._name(spec, 0) for spec in self._signature.inputs if spec.shape and spec.shape[0] == -1}
        rows = min(_MANY, max(1, _MOST_ELEMENTS // (4 * max(1, _elements(self._with(shapes, dict.fromkeys(free, 1)))))))
        if (tried := self._with(shapes, dict.fromkeys(free, rows))) != shapes:
            yield self.plausible(tried)

    def empty(self, shapes: Shapes) -> Iterator[Case]:
        """Calls with an axis of the size 0."""
        for name in self._bases(shapes):
            low = min(axis.low for axis in self._all_axes() if axis.name == name) if name in self._declared() else 1
            yield from [self.plausible(self._with(shapes, {name: 0}, least=0), "no")] if low == 0 else []

    def enumerated(self, shapes: Shapes) -> Iterator[Case]:
        """Calls that contain every id of a table, and both values of every single truth value."""
        for spec in self._signature.inputs:
            meaning, shape = self._meanings[spec.name], shapes[spec.name]
            if spec.datatype is DataType.BOOL and math.prod(shape) == 1:
                for value in (False, True):
                    base = self.plausible(shapes)
                    yield Case(f"'{spec.name}' {str(value).lower()}", {**base.inputs, spec.name: np.full(shape, value)})
            if meaning.role is not Role.TOKEN_IDS or len(meaning.high) != 1 or not np.isfinite(meaning.high[0]):
                continue
            low, count = int(meaning.low[0]) if meaning.low else 0, int(meaning.high[0]) + 1
            row = math.prod(shape[1:])
            if not shape or not row or count - low > _MOST_IDS:
                continue
            rows = -(-(count - low) // row) if spec.shape[0] == -1 else shape[0]
            case = self.plausible(self._with(shapes, {self._name(spec, 0): rows}), "every id:")
            ids = np.resize(np.arange(low, count), case.inputs[spec.name].shape)
            yield Case(case.label, {**case.inputs, spec.name: ids.astype(spec.datatype.dtype)})

    def extremes(self, shapes: Shapes) -> Iterator[Case]:
        """Calls with extreme values in place of plausible numbers."""
        base = self.plausible(shapes)
        kinds: dict[str, Callable[..., Any]] = {
            "zeros": lambda spec, value, rng: np.zeros_like(value),
            "huge": lambda spec, value, rng: rng.standard_normal(value.shape) * _HUGE.get(spec.datatype, 1e4),
            "large": lambda spec, value, rng: rng.standard_normal(value.shape) * 20.0,
            "small": lambda spec, value, rng: rng.standard_normal(value.shape) * _TINY.get(spec.datatype, 3e-3),
            "tiny": lambda spec, value, rng: rng.standard_normal(value.shape) * _TINY.get(spec.datatype, 1e-6),
            "negative": lambda spec, value, rng: -np.abs(rng.standard_normal(value.shape)),
            "repeated": lambda spec, value, rng: np.full(value.shape, value.flat[0] if value.size else 0),
            "stepped": lambda spec, value, rng: rng.integers(-4, 5, value.shape) / 2.0,
        }
        for label, make in kinds.items():
            rng = self._rng()
            inputs = dict(base.inputs)
            for spec in self._signature.inputs:
                value = inputs[spec.name]
                if spec.datatype.is_float and self._meanings[spec.name].role in _VALUES:
                    inputs[spec.name] = np.asarray(make(spec, value, rng)).astype(value.dtype)
                elif label in ("zeros", "huge", "repeated") and spec.datatype.dtype.kind in "iu":
                    inputs[spec.name] = self._integers(spec, value, label)
            if any(inputs[name] is not base.inputs[name] for name in inputs):
                yield Case(
                    f"{label} values",
                    inputs,
                    is_extreme=label in ("huge", "large", "tiny"),
                    is_flat=label in ("zeros", "repeated"),
                    has_ties=label == "stepped",
                )

    def unusual(self, shapes: Shapes) -> Iterator[Case]:
        """Calls with values for which engines often differ from frameworks: NaN, infinity, and integers beyond 32 bits."""
        for label, kinds, value in (
            ("NaN", "f", math.nan),
            ("infinity", "f", math.inf),
            ("integers beyond 32 bits", "iu", 1 << 40),
        ):
            inputs = dict(self.plausible(shapes).inputs)
            for spec in self._signature.inputs:
                fits = spec.datatype.dtype.kind in kinds and (kinds == "f" or spec.datatype.itemsize == 8)
                if fits and self._meanings[spec.name].role in _VALUES and inputs[spec.name].size:
                    inputs[spec.name] = inputs[spec.name].copy()
                    inputs[spec.name].flat[0] = value
                    yield Case(f"{label} in '{spec.name}'", dict(inputs), is_extreme=True)

    def _integers(self, spec: TensorSpec, value: Array, label: str) -> Array:
        """The least or the largest id everywhere, or the first id."""
        meaning = self._meanings[spec.name]
        if meaning.role not in (Role.TOKEN_IDS, Role.TOKEN_TYPES, Role.FEATURES, Role.TENSOR) or not value.size:
            return value
        if label == "repeated":
            return np.full_like(value, value.flat[0])
        bound = meaning.low if label == "zeros" else meaning.high
        return np.full_like(value, int(bound[0])) if len(bound) == 1 and np.isfinite(bound[0]) else value

    def _with(self, shapes: Shapes, sizes: Mapping[str, int], least: int = 1) -> Shapes:
        """``shapes`` with the ``sizes`` of named dimensions; all sizes are within the limits of their axes."""
        found = {spec.name: list(shapes[spec.name]) for spec in self._signature.inputs}
        known: dict[str, int] = {}
        free = [(spec, index) for spec in self._signature.inputs for index, dim in enumerate(spec.shape) if dim == -1]
        # Sizes that are sums follow from the others.
        for spec, index in sorted(free, key=lambda place: bool(terms_of(self._name(*place)))):
            axis, name = self._axis(spec, index), self._name(spec, index)
            terms = terms_of(name)
            size = sum_of(terms, known) if terms else sizes.get(name, found[spec.name][index])
            size = max(size, axis.low, least)
            known[name] = found[spec.name][index] = min(size, axis.high or size)
        return {name: tuple(dims) for name, dims in found.items()}

    def _bases(self, shapes: Shapes) -> dict[str, int]:
        return {
            self._name(spec, index): shapes[spec.name][index]
            for spec in self._signature.inputs
            for index, dim in enumerate(spec.shape)
            if dim == -1 and not terms_of(self._name(spec, index))
        }

    def _high(self, axis: Axis, base: int) -> int:
        return axis.high or max(_LARGEST, base + 1)

    def _axis(self, spec: TensorSpec, index: int) -> Axis:
        return self._axes.get(spec.name, {}).get(index) or Axis(index, "")

    def _name(self, spec: TensorSpec, index: int) -> str:
        return self._axis(spec, index).name or ("batch" if index == 0 else f"{spec.name}.{index}")

    def _all_axes(self) -> list[Axis]:
        return [axis for each in self._axes.values() for axis in each.values()]

    def _declared(self) -> set[str]:
        return {axis.name for axis in self._all_axes()}

    def _rng(self) -> np.random.Generator:
        self._made += 1
        return np.random.default_rng([self._seed, self._made])


def _shown(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))
