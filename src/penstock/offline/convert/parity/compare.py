"""Compares a tensor of the source with the tensor of the ONNX model."""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np

from penstock.offline.convert.parity.means import Systematic, systematic
from penstock.offline.convert.parity.tolerance import MANY_RUNS, UNITS, RoundingModel
from penstock.tensor import Array

_EQUAL = 4.0
"""Differences up to this number of units in the last place need no explanation."""
_ROUGH = 8.0
"""Allowed multiple of the rounding error that the ONNX model shows."""
_SAMPLE = 64.0
"""Largest rounding error, in units in the last place of 1 or of the largest value, that counts without noisy runs. A larger one can
also be an error of the engine's kernel. Kernels may compute small values as differences of larger ones, such as ``exp(x) - 1``."""
_NOISY = 1.5
"""Allowed multiple of the largest change in noisy runs, whose noise is already amplified."""
_FP32 = UNITS[np.dtype(np.float32)]
"""Engines also compute parts of FP64 models in FP32."""
_TINY = float(np.finfo(np.float32).tiny)
"""Smaller numbers may be flushed to zero."""
_MOST_TIES = 0.1
"""Share of values that rounding may decide otherwise. If more differ, the model and the source compute something else."""
_DECIDES = 0.1
"""Tolerance, relative to the output, below which a comparison says something."""


class OutputDifference(msgspec.Struct, frozen=True):
    """The result of comparing one tensor."""

    error: float = 0.0
    """Largest difference relative to the tensor's largest value; infinite if shapes, types or special values differ."""
    tolerance: float = 0.0
    """The difference that rounding explains at the same place, in the same measure."""
    reason: str = ""
    """What differs beyond rounding; empty if nothing does."""
    decides: bool = True
    """False if rounding alone could change the tensor so much that the comparison says nothing."""
    note: str = ""


def compare(  # noqa: PLR0913
    name: str,
    want: Array,
    got: Array,
    rounding: RoundingModel,
    *,
    is_extreme: bool = False,
    is_flat: bool = False,
    is_inner: bool = False,
    has_ties: bool = False,
) -> OutputDifference:
    """Compare ``want``, the tensor ``name`` of the source, with ``got``. With ``is_extreme``, values may exceed the range of FP32.
    With ``is_flat``, the engine's own rounding counts however large it is: a sum of many equal values accumulates it.
    With ``is_inner``, values may overflow too, because masks contain the largest numbers. With ``has_ties``, the inputs have equal
    values on purpose, so that any number of whole numbers may be ties."""
    is_ordinary = not is_extreme and not is_flat
    found = _compare(name, want, got, rounding, inf if is_flat else _SAMPLE, is_ordinary)
    has_many = _MOST_TIES < found.error < inf and found.error * want.size > 1.5
    if (
        _kind(want) != "f"
        and has_many
        and name not in rounding.quantised
        and found.decides
        and not (is_extreme or is_inner or has_ties)
    ):
        found = msgspec.structs.replace(found, reason=_many(want, got), note="")
    if found.reason and (is_extreme or is_inner) and (rounding.exact(name) is None or rounding.overflows):
        return OutputDifference(decides=False)
    return found


def _compare(
    name: str, want: Array, got: Array, rounding: RoundingModel, sample: float, is_ordinary: bool
) -> OutputDifference:
    # The tolerance of a narrower type would explain what the type loses.
    if _kind(want) != _kind(got) or (_is_half(got) and not _is_half(want)):
        return OutputDifference(inf, 0.0, f"is {got.dtype}, but {want.dtype} in the source")
    if want.shape != got.shape:
        if any(np.shape(one) != np.shape(got) for one in rounding.noisy(name)):
            return OutputDifference(decides=False, note="its size depends on rounding")
        return OutputDifference(inf, 0.0, f"has shape {list(got.shape)}, but {list(want.shape)} in the source")
    if _kind(want) != "f" and name not in rounding.quantised:
        return _discrete(name, want, got, rounding)
    given = (name, want.astype(np.float64), got.astype(np.float64), _unit(want, got))
    return _floats(*given, rounding, sample, is_ordinary=is_ordinary)


def statistics(array: Array) -> str:
    """Shape, range and mean of ``array``."""
    text = f"{array.dtype}{list(array.shape)}"
    if array.size and _kind(array) in "fi":
        values = array.astype(np.float64)
        finite = values[np.isfinite(values)]
        if finite.size:
            text += f" from {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}"
        if finite.size < values.size:
            text += f", {values.size - finite.size} not finite"
    return text


def _kind(array: Array) -> str:
    """f: floats; i: integers and booleans; O: text."""
    if array.dtype.name == "bfloat16" or array.dtype.kind == "f":
        return "f"
    return "i" if array.dtype.kind in "iub" else "O" if array.dtype.kind in "OSU" else array.dtype.kind


def _is_half(array: Array) -> bool:
    return _kind(array) == "f" and array.dtype.itemsize == 2


def _unit(want: Array, got: Array) -> float:
    return max(UNITS.get(want.dtype, 0.0), UNITS.get(got.dtype, 0.0))


def _discrete(name: str, want: Array, got: Array, rounding: RoundingModel) -> OutputDifference:
    differs = np.asarray(want != got)
    if not differs.any():
        return OutputDifference(decides=bool(want.size))
    share = float(differs.mean())
    for stepped in rounding.kinds:
        runs = rounding.noisy(name, stepped=stepped)
        if any(np.shape(one) != got.shape for one in runs):
            return OutputDifference(decides=False, note="its size depends on rounding")
        exact = rounding.exact(name)
        tied = np.zeros(got.shape, bool)
        for one in runs:
            tied |= np.asarray(one != exact)
        if not (differs & ~tied).any():
            return OutputDifference(
                share,
                float(tied.mean()),
                decides=not tied.all(),
                note="some values are ties, which rounding decides",
            )
    return OutputDifference(share, 0.0, _many(want, got))


def _many(want: Array, got: Array) -> str:
    return f"{int(np.sum(want != got))} of {want.size} values differ"


def _floats(  # noqa: PLR0911
    name: str, want: Array, got: Array, unit: float, rounding: RoundingModel, sample: float, *, is_ordinary: bool
) -> OutputDifference:
    compared, reason = _finite(name, want, got, rounding)
    if reason:
        return OutputDifference(inf, 0.0, reason)
    if not compared.any():
        return OutputDifference(decides=False)
    want, got = np.where(compared, want, 0.0), np.where(compared, got, 0.0)
    scale = float(np.abs(want).max())
    error = np.abs(want - got)
    allowed = _EQUAL * unit * (np.abs(want) + _is_distribution(want)) + _TINY
    # Each value of a coarse tensor may be within its tolerance although all of them have the same error.
    suffices = not (rounding.is_coarse and is_ordinary) or not error.any()
    if suffices and (error <= allowed).all():
        return _summary(error, allowed, scale)
    exact = rounding.exact(name)
    exact = None if exact is None else np.asarray(exact, np.float64)
    if exact is None or exact.shape != got.shape:
        suffices, allowed = True, np.maximum(allowed, _ROUGH * _ROUGH * unit * scale)
    else:
        rough = np.where(compared, np.abs(got - exact), 0.0)
        rough = np.minimum(np.where(np.isfinite(rough), rough, 0.0), sample * max(unit, _FP32) * max(scale, 1.0))
        allowed += _ROUGH * np.maximum(rough, np.sqrt(np.mean(rough**2)))
    if suffices and (error <= allowed).all():
        return _summary(error, allowed, scale)
    worst = OutputDifference()
    for stepped in rounding.kinds:
        runs = [np.asarray(one, np.float64) for one in rounding.noisy(name, stepped=stepped)]
        if any(np.shape(one) != got.shape for one in runs):
            return OutputDifference(decides=False, note="its size depends on rounding")
        spread = _spread(runs, exact, compared) if exact is not None else np.zeros(got.shape)
        allowed = np.maximum(allowed, _NOISY * spread)
        worst, found = _summary(error, allowed, scale), Systematic("", inf)
        if not (error <= allowed).all() and not _is_sparse_noise(error, spread):
            told = f"differs by {worst.error:.2g}, and rounding explains {worst.tolerance:.2g}"
        elif (
            suffices
            or exact is None
            or not (found := _systematic(name, want - got, exact, compared, rounding, stepped=stepped)).reason
        ):
            sparse = _NOISY * spread.max() if (error > allowed).any() else 0.0
            worst = _summary(error, np.maximum(allowed, sparse), scale)
            return msgspec.structs.replace(worst, decides=worst.decides or found.gain <= _DECIDES)
        else:
            told = found.reason
        worst = msgspec.structs.replace(worst, reason=told)
    return worst


def _systematic(
    name: str, error: Array, exact: Array, compared: Array, rounding: RoundingModel, *, stepped: bool
) -> Systematic:
    """The systematic error of a tensor. A few noisy runs exclude most, and many confirm it."""
    found = systematic(error, exact, _shaped(rounding.noisy(name, stepped=stepped), exact), compared, stepped=stepped)
    if found.reason:
        runs = _shaped(rounding.noisy(name, stepped=stepped, count=MANY_RUNS), exact)
        return systematic(error, exact, runs, compared, stepped=stepped)
    return found


def _shaped(runs: list[Array], exact: Array) -> list[Array]:
    return [np.asarray(one, np.float64) for one in runs if np.shape(one) == exact.shape]


def _is_distribution(want: Array) -> bool:
    """True if the rows of ``want`` are probabilities. One can be 1 minus the others, with the rounding of numbers near 1."""
    return (
        want.ndim > 0 and want.shape[-1] > 1 and bool((want >= 0).all() and np.allclose(want.sum(-1), 1.0, atol=1e-4))
    )


def _spread(runs: list[Array], exact: Array, compared: Array) -> Array:
    """The largest change of each element in ``runs``. A change to or from NaN or infinity counts as infinite."""
    spread = np.zeros(exact.shape)
    for one in runs:
        with np.errstate(all="ignore"):
            change = np.asarray(np.abs(one - exact))
        change[np.isnan(change) & ~(np.isnan(one) & np.isnan(exact))] = inf
        spread = np.maximum(spread, np.where(np.isnan(change), 0.0, change))
    return np.where(compared, spread, 0.0)


def _is_sparse_noise(error: Array, spread: Array) -> bool:
    """True if rounding changes few elements by much, so that a few runs do not show which."""
    return bool(
        np.sqrt(np.mean(error**2)) <= _NOISY * np.sqrt(np.mean(spread**2)) and error.max() <= _NOISY * spread.max()
    )


def _summary(error: Array, allowed: Array, scale: float) -> OutputDifference:
    """The largest error among the elements beyond their tolerance, or among all if there are none, in units of ``scale``."""
    beyond = error > allowed
    at = np.unravel_index(int(np.where(beyond, error, -1.0).argmax() if beyond.any() else error.argmax()), error.shape)
    unit = scale or 1.0
    decides = bool(np.median(allowed) <= _DECIDES * unit)
    return OutputDifference(float(error[at] / unit), float(allowed[at] / unit), decides=decides)


def _finite(name: str, want: Array, got: Array, rounding: RoundingModel) -> tuple[Array, str]:
    """The elements to compare, and why NaN and infinities in other elements differ; empty if they do not."""
    special = ~np.isfinite(want) | ~np.isfinite(got)
    if not special.any():
        return ~special, ""
    same = np.isnan(want) & np.isnan(got) | (want == got)
    # A value beyond the range of FP32 is infinite in FP32.
    same |= (np.abs(want) > np.finfo(np.float32).max) & (np.sign(want) == np.sign(got)) & ~np.isfinite(got)
    wrong = special & ~same
    if wrong.any():
        exact = rounding.exact(name)
        for one in rounding.noisy(name):
            if np.shape(one) == wrong.shape:
                wrong &= ~(np.isfinite(one) != np.isfinite(exact)) if exact is not None else wrong
    return ~special, f"has NaN or infinite values at {int(wrong.sum())} other places" if wrong.any() else ""
