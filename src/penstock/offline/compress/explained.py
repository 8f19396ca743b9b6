"""Check that the outputs of a compressed model differ from the original's by no more than the compression explains.

The check needs no evaluation data. It runs both models at several sizes of each free dimension, on rows of the method's data or, if
there are none, on generated values. The bound of the error of each output is:

1. A quantised model: ``_FACTOR`` times the change of the output when the model's rounded numbers are perturbed by as much as rounding
   has changed them (``perturb.py``). To first order, this change has the distribution of the error, so that a larger error means that
   the model does not compute the original's function. At sizes that the data do not have, this includes the effect of ranges.
2. Another model: ``_SIZE_FACTOR`` times the error at the data's own sizes, at least half, so that a method that is right at one
   size only is found.
3. A model whose weights were trained, pruned or shared has no bound: any weights are possible, and the graph is the same.

All models must run wherever the original runs, with outputs of the same types and shapes, and with NaN and infinities only where the
original has them. The accuracy on real data is the contract's matter, not that of this check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidModel, PenstockError, WrongResult
from penstock.offline.apart import ENDED, apart, is_light
from penstock.offline.compress.perturb import perturbed
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.samples import LabelledInputs, free_sizes, generate, generate_sizes, sizes_of
from penstock.offline.optimize.verify import dimension_names
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType, Signature

_FACTOR = 4.0
"""The error of 317 INT8 versions of random models was 0.6 times the change in the median, 2.1 times at the 95th percentile."""
_SIZE_FACTOR, _SIZE_FLOOR = 10.0, 0.5
_FLOOR = 2e-3
"""The least bound of a relative error: differences in the order of sums, and numbers that are not perturbed."""
_DRAWS, _MOST_DRAWS = 2, 10
"""The number of perturbations, and their number if an error is beyond the bound of the first ones, which can be small by chance."""
_NEGLIGIBLE = 1e-2
"""Outputs below this fraction of the output's usual magnitude count as this large; without perturbation, below all of it."""
_ROWS = 16
_UNBOUNDED = frozenset(
    {"qat", "distill", "recover", "retrain", "tune-centroids", "prune_iteratively", "shrink", "refresh_norms"}
    | {"prune", "prune_n_m", "share"}
)
"""Steps of the provenance that train, or end with training, or change nothing but weights."""


class Difference(msgspec.Struct, frozen=True):
    """The largest error of one output in relation to its bound."""

    output: str
    error: float
    """Norm of the difference divided by the norm of the original's output; for integers and text, the fraction of other values."""
    bound: float
    sizes: str
    """The inputs with their shapes."""


def check_explained(original: Artifact, made: Artifact, data: Dataset | None = None) -> list[Difference]:
    """The largest difference of each output. Raises WrongResult for an error beyond its bound.

    ``data`` are rows on which the method was fitted; without them, values are generated.
    """
    with ExitStack() as stack:
        before, check = _Runner(original, stack, as_written=True), None
        for sample in _samples(before.model.signature, data, dimension_names(read_proto(original))):
            want = _run(before, sample) if is_light(original) or not sample.is_odd else None
            if want is None:
                continue  # the original does not take this size
            if check is None:
                if is_light(original):
                    _check_survives(made, sample)
                check = _Check(original, made, stack)
            check.compare(sample, want)
        return list(check.found.values()) if check else []


def _check_survives(made: Artifact, sample: LabelledInputs) -> None:
    """Raise WrongResult if ``made`` ends its process."""
    try:
        apart.forward(made, sample, as_written=False)
    except PenstockError as error:
        if ENDED in error.message:
            raise WrongResult(f"the compressed model cannot be used: {error.message}", _FIX) from error


class _Check:
    def __init__(self, original: Artifact, made: Artifact, stack: ExitStack) -> None:
        self.found: dict[str, Difference] = {}
        self._original, self._compressed, self._stack = original, made, stack
        self._is_unbounded = any(step.name in _UNBOUNDED for step in made.provenance[len(original.provenance) :])
        try:
            self._made = _Runner(made, stack)
            # Integer kernels take a bias's scale for the product of the other two, so that only the form as written is perturbed.
            self._written = _Runner(made, stack, as_written=True)
            self._widened = self._perturbed([_DRAWS], widened=True)
            self._others = self._perturbed(range(_DRAWS))
        except InvalidModel as error:
            raise WrongResult(f"the compressed model does not load: {error.message}", _FIX) from error
        self._bounds: dict[str, float] = {}
        """The bound of each output, at the sizes for which it was needed."""
        self._magnitudes: dict[str, float] = {}

    def compare(self, sample: LabelledInputs, want: Mapping[str, Array]) -> None:
        """Compare the outputs with those of the original, ``want``."""
        got = _outputs(self._made, sample, want)
        for name, array in want.items():
            self._magnitudes[name] = max(self._magnitudes.get(name, 0.0), _mean_square(array))
        least = _NEGLIGIBLE if self._others else 1.0
        errors = {name: distance(array, got[name], least**2 * self._magnitudes[name]) for name, array in want.items()}
        if not self._covers(errors):
            self._extend_bounds(sample, errors)
        if not self._covers(errors) and len(self._others) == _DRAWS:
            self._others += self._perturbed(range(_DRAWS, _MOST_DRAWS))
            self._extend_bounds(sample, errors)
        for name, error in errors.items():
            found = Difference(name, error, self._bounds[name], sizes_of(sample))
            if not error <= found.bound:
                raise _wrong(found, is_rounded=bool(self._others))
            if name not in self.found or error > self.found[name].error:
                self.found[name] = found

    def _perturbed(self, draws: Iterable[int], *, widened: bool = False) -> list[_Runner]:
        """Perturbed versions of the compressed model; none if it has no rounded numbers, or no bound."""
        if self._is_unbounded:
            return []
        before, after = read_proto(self._original), read_proto(self._compressed)
        found = (perturbed(after, before, draw, widened=widened) for draw in draws)
        models = [Artifact.from_bytes(_bytes(proto)) for proto in found if proto is not None]
        return [_Runner(model, self._stack, as_written=True) for model in models]

    def _covers(self, errors: Mapping[str, float]) -> bool:
        return all(error <= self._bounds.get(name, -1.0) for name, error in errors.items())

    def _extend_bounds(self, sample: LabelledInputs, errors: Mapping[str, float]) -> None:
        """Include ``sample`` in the bounds."""
        got = _outputs(self._written, sample, errors) if self._others else {}
        # Values at other sizes can exceed the ranges that the data gave.
        runners = [*self._others, *(self._widened if sample.is_odd else [])]
        others = [other for other in (_run(runner, sample) for runner in runners) if other is not None]
        for name, error in errors.items():
            least = _NEGLIGIBLE**2 * self._magnitudes[name]
            changes = [distance(got[name], other[name], least) for other in others]
            if self._is_unbounded:
                bound = float("inf") if np.isfinite(error) else 0.0
            elif self._others:
                bound = _FACTOR * max((one for one in changes if np.isfinite(one)), default=0.0) + _FLOOR
            else:
                bound = self._bounds.get(name, _size_bound(error))
            self._bounds[name] = max(self._bounds.get(name, 0.0), bound)


def _size_bound(error: float) -> float:
    """The bound at other sizes of an error at the data's own."""
    return max(_SIZE_FACTOR * error, _SIZE_FLOOR) if np.isfinite(error) else 0.0


def distance(want: Array, got: Array, least: float = 0.0) -> float:
    """Norm of the difference divided by the norm of ``want``; for integers and text, the fraction of other values.

    Infinite if types or shapes differ, or if NaN and infinities are in other places. ``least`` is the least mean square of ``want`` to
    divide by.
    """
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf")
    if not want.size:
        return 0.0
    if not DataType.from_numpy(want.dtype).is_float:
        return float(np.mean(want != got))
    wanted, found = want.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], found[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    difference = float(np.square(found[finite] - wanted[finite]).sum())
    norm = max(float(np.square(wanted[finite]).sum()), least * want.size)
    return (difference / norm) ** 0.5 if difference else 0.0


def _bytes(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))


def _samples(
    signature: Signature, data: Dataset | None, names: Mapping[str, Sequence[str]]
) -> Iterator[LabelledInputs]:
    """Inputs at the data's own sizes first, then at others."""
    if data is None:
        for size in free_sizes(signature):
            yield from generate(signature, size)
            yield from generate_sizes(signature, size, names)
        return
    is_fixed = any(spec.shape[:1] != (-1,) for spec in signature.inputs)
    own = data.pick_evenly(signature.smallest_batch if is_fixed else _ROWS)
    wanted = [LabelledInputs("data", dict(own.inputs))]
    for batch, free in ((1, None), (3, None), (2, 1), (2, 5), (2, 17), (1, 0), (0, None)):
        resized = {spec.name: _resized(own.inputs[spec.name], spec.shape, batch, free) for spec in signature.inputs}
        if all(sizes_of(resized) != sizes_of(one) for one in wanted):
            wanted.append(LabelledInputs("data", resized, is_odd=True))
    yield from wanted


def _resized(array: Array, dims: Sequence[int], batch: int, free: int | None) -> Array:
    """``array`` with ``batch`` rows and ``free`` elements along each other free dimension, repeated or cut off."""
    for axis, dim in enumerate(dims):
        size = batch if axis == 0 else free
        if dim == -1 and size is not None and array.shape[axis]:
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return array


class _Runner:
    """A loaded model that runs unusual sizes in a child process."""

    def __init__(self, artifact: Artifact, stack: ExitStack, *, as_written: bool = False) -> None:
        self._artifact = artifact
        self.model = stack.enter_context(loaded(artifact, as_written=as_written))

    def forward(self, sample: LabelledInputs) -> dict[str, Array]:
        return apart.forward(self._artifact, sample) if sample.is_odd else self.model.forward(sample)


def _run(runner: _Runner, sample: LabelledInputs) -> dict[str, Array] | None:
    try:
        return runner.forward(sample)
    except PenstockError:
        return None


def _outputs(runner: _Runner, sample: LabelledInputs, want: Mapping[str, object]) -> dict[str, Array]:
    try:
        got = runner.forward(sample)
    except PenstockError as error:
        raise WrongResult(
            f"the compressed model does not run on inputs {sizes_of(sample)}, but the original does: {error.message}",
            _FIX,
        ) from error
    if missing := want.keys() - got.keys():
        raise WrongResult(f"the compressed model has no output '{min(missing)}'", _FIX)
    return got


_FIX = "use the original or another method, and report the model: this is a defect of the method"


def _wrong(found: Difference, *, is_rounded: bool) -> WrongResult:
    where = f"output '{found.output}' of the compressed model, on inputs {found.sizes},"
    if np.isinf(found.error):
        return WrongResult(f"{where} has another type or shape, or NaN or infinities in other places", _FIX)
    reason = "rounding explains" if is_rounded else "its error at other sizes explains"
    return WrongResult(f"{where} is off by {found.error:.2%}; {reason} at most {found.bound:.2%}", _FIX)


def _mean_square(array: Array) -> float:
    if not DataType.from_numpy(array.dtype).is_float:
        return 0.0
    values = array.astype(np.float64)
    values = values[np.isfinite(values)]
    return float(np.square(values).mean()) if values.size else 0.0
