"""How much rounding may change the results of one call.

::

    exact  the graph in double precision
    rough  the graph as written: |rough - exact| is one sample of the rounding error, amplified by the graph's conditioning
    noisy  the graph in double precision, with every inexact value changed by several units in the last place of its type

``rough`` costs one run and suffices for most results. ``noisy`` also finds ties: an ArgMax, a TopK or a comparison that rounding could
decide otherwise gives different results in some of its runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from penstock.errors import PenstockError
from penstock.offline.convert.parity.bodies import How, Values
from penstock.offline.convert.parity.nodes import Nodes
from penstock.tensor import Array, DataType

UNITS = {
    np.dtype(np.float32): 2.0**-24,
    np.dtype(np.float16): 2.0**-11,
    DataType.BF16.dtype: 2.0**-8,
    np.dtype(np.float64): 2.0**-53,
}
"""Largest relative rounding error of each type."""
_AMPLITUDE, _NARROW_AMPLITUDE = 16.0, 2.0
"""Standard deviation of the noise, in ``UNITS``. Frameworks differ by a few units for each operator. They accumulate FP16 and BF16 in
FP32, so that only the result is rounded."""
_COMMON, _SLOPE = 0.25, 0.25
"""Standard deviations of the error that all values of a quantised tensor have in common, and of the error that has the sign of the
distance from their mean, in steps. Integer kernels round in one direction by up to a step. It is 4 deviations, and no errors within a
step have a larger mean or slope."""
_SHARED = 0.25
"""Part of the noise in FP16 and BF16 that is the same relative error of all values of a tensor. Kernels round their constants, such as
the 1/6 of HardSwish, by up to half of a unit in the last place."""
_LEAST = 1e-20
"""Added to the magnitude of a tensor, so that equal zeros do not stay equal."""
_RUNS = 8
"""With 8 runs, a tie within the noise is missed with a probability of 1/256."""
MANY_RUNS = 48
"""They confirm systematic errors. The noise is at least twice that of a framework. So rounding makes a mean beyond 4 deviations
with the probability P(|t| > 8) of Student's distribution with 48 degrees of freedom, 2e-10. A certificate rests on at most 100,000
means, so that it is a false alarm with a probability of at most 2e-5."""


class RoundingModel:
    """The rounding in one call of ``nodes``, from the tensors ``given`` to the tensors ``wanted``. It is computed when needed."""

    def __init__(self, nodes: Nodes, given: Mapping[str, Any], wanted: Collection[str], seed: int = 0) -> None:
        self._nodes, self._given, self._wanted, self._seed = nodes, given, wanted, seed
        self._exact: Values | None = None
        self._noisy: dict[bool, list[Values]] = {}
        self.overflows = False
        """True if a value exceeds the range of its type. Known after ``exact`` was called."""

    def exact(self, name: str) -> Any:
        """The tensor in double precision; None if the graph does not run."""
        if self._exact is None:
            try:
                with np.errstate(all="ignore"):
                    self._exact = self._nodes.run(self._given, self._wanted, precise=True, seen=self._note)
            except PenstockError:
                self._exact = {}
        return self._exact.get(name)

    def noisy(self, name: str, *, stepped: bool = False, count: int = _RUNS) -> list[Array]:
        """The tensor in ``count`` noisy runs; with ``stepped``, quantised values also change. Fewer if the graph does not run."""
        runs = self._noisy.setdefault(stepped, [])
        for number in range(len(runs), count):
            noise = _Noise(self._nodes, np.random.default_rng([self._seed, number]), stepped=stepped)
            runs.append({})
            with np.errstate(all="ignore"), contextlib.suppress(PenstockError):  # the noise can change a size
                runs[-1] = self._nodes.run(self._given, self._wanted, precise=True, noise=noise)
        return [run[name] for run in runs[:count] if run]

    @property
    def is_coarse(self) -> bool:
        """True if values are rounded to FP16, BF16 or steps, so that a tolerance for each value hides errors of several percent."""
        return self._nodes.is_narrow or self.has_steps

    @property
    def has_steps(self) -> bool:
        """True if the graph quantises values."""
        return bool(self.quantised)

    @property
    def quantised(self) -> frozenset[str]:
        """The tensors of quantised values. They are numbers, of which rounding may change many by a step."""
        return self._nodes.quantised

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Values of ``stepped`` for which to ask for noisy runs."""
        return (False, True) if self.has_steps else (False,)

    def _note(self, made: Values) -> None:
        for name, value in made.items():
            if isinstance(value, np.ndarray) and value.dtype == np.float64 and value.size:
                largest = np.abs(value).max()
                limit = _limit(self._nodes.float_types.get(name, np.dtype(np.float32)))
                self.overflows = self.overflows or bool(largest > limit or np.isnan(largest))


def _limit(kind: np.dtype[Any]) -> float:
    return float((np.finfo if kind.kind == "f" else ml_dtypes.finfo)(kind).max)


def _least(kind: np.dtype[Any]) -> float:
    return float((np.finfo if kind.kind == "f" else ml_dtypes.finfo)(kind).smallest_normal)


class _Noise:
    """Changes inexact values. A value that FP32 (or the tensor's narrower type) represents was computed without rounding."""

    def __init__(self, nodes: Nodes, rng: np.random.Generator, *, stepped: bool) -> None:
        self._rng = rng
        self._nodes = nodes
        self._steps = nodes.steps if stepped else {}

    def __call__(self, name: str, value: Array, how: How) -> Array:
        if value.dtype != np.float64 or not value.size:
            return value
        if (step := self._steps.get(name)) is not None:
            finite = value[np.isfinite(value)]
            side = np.sign(value - (finite.mean() if finite.size else 0.0))
            common = _COMMON * self._rng.standard_normal() + _SLOPE * self._rng.standard_normal() * side
            value = value + step * (common + self._rng.uniform(-0.5, 0.5, value.shape))
        kind = self._nodes.float_types.get(name, np.dtype(np.float32))
        if (error := self._nodes.sum_errors.get(name)) is not None:
            return np.asarray(value + UNITS[kind] * self._rng.standard_normal(value.shape) * error)
        amount = (_NARROW_AMPLITUDE if kind.itemsize == 2 else _AMPLITUDE) * UNITS[kind]
        # Below the smallest normal number, the rounding error no longer shrinks with the value.
        size = np.maximum(np.abs(value), _least(kind))
        change = np.asarray(amount * self._rng.standard_normal(value.shape) * size)
        if kind.itemsize == 2 and how == "inexact":
            change += _SHARED * amount * self._rng.standard_normal() * value
        if name in self._nodes.rounded or how == "tied":
            change += (
                amount
                * self._rng.standard_normal(value.shape)
                * (_LEAST + np.sqrt(np.mean(np.where(np.isfinite(value), value, 0.0) ** 2)))
            )
        elif how == "all":
            change[value == np.rint(value)] = 0.0
        elif how != "scaled":
            change[value == value.astype(kind if kind.itemsize < 4 else np.float32)] = 0.0
        return np.asarray(np.where(np.isfinite(change), value + change, value))
