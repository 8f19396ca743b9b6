"""Check that the outputs of a compressed model differ from the original's by no more than the compression can explain.

The check needs no evaluation data. It runs both models on rows of the method's data, or on generated values if there are none, with
several sizes of each free dimension. Each output has a bound on its error:

1. Quantised models: ``_FACTOR`` times the change of the output when the model's rounded numbers are perturbed by the size of a
   rounding error (``perturb.py``). To first order, this change has the same distribution as the error. A larger error means that the
   model computes another function. At sizes that the data do not have, ranges are perturbed more strongly.
2. Other models: ``_SIZE_FACTOR`` times the error at the sizes of the data, but at least 0.5. This detects methods that are correct at
   one size only.
3. Models whose weights were trained, pruned or shared: no bound, since these methods may choose any weights.

A compressed model must accept every input that the original accepts. Its outputs must have the same types and shapes, with NaN and
infinities in the same places. The contract judges the accuracy on real data; this check does not.
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
"""Bound divided by change. For 317 INT8 models, error divided by change had a median of 0.6 and a 95th percentile of 2.1."""
_SIZE_FACTOR, _SIZE_FLOOR = 10.0, 0.5
_FLOOR = 2e-3
"""Minimum bound of a relative error. It allows for another order of summation, and for numbers that are not perturbed."""
_DRAWS, _MOST_DRAWS = 2, 10
"""Number of perturbations. If an error exceeds the bound, the larger number is used, since few perturbations may give too small a
bound."""
_NEGLIGIBLE = 1e-2
"""The magnitude of an output counts as at least this fraction of its usual magnitude or, without perturbation, as at least the usual
magnitude."""
_ROWS = 16
_UNBOUNDED = frozenset(
    {"qat", "distill", "recover", "retrain", "tune-centroids", "prune_iteratively", "shrink", "refresh_norms"}
    | {"prune", "prune_n_m", "share"}
)
"""Provenance steps that train the model or change only its weights."""


class Difference(msgspec.Struct, frozen=True):
    """The largest error of one output in relation to its bound."""

    output: str
    error: float
    """Norm of the difference divided by the norm of the original's output; for integers and text, the fraction of unequal values."""
    bound: float
    sizes: str
    """The names and shapes of the inputs."""


def check_explained(original: Artifact, made: Artifact, data: Dataset | None = None) -> list[Difference]:
    """The largest difference of each output. Raises WrongResult for an error beyond its bound.

    ``data`` has the rows on which the method was fitted. Without it, inputs are generated.
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
    """Raise WrongResult if running ``made`` ends the process."""
    try:
        apart.forward(made, sample, as_written=False)
    except PenstockError as error:
        if ENDED in error.message:
            raise WrongResult(f"the compressed model cannot be used: {_culprit(made, sample)} it", _FIX) from error


def _culprit(made: Artifact, sample: LabelledInputs) -> str:
    """What ends the process of a model: the model itself, or what ONNX Runtime makes of it."""
    try:
        apart.forward(made, sample, as_written=True)
    except PenstockError:
        return "ONNX Runtime ends its process when it runs"
    return "it runs as it is written, but ONNX Runtime ends its process when it optimises"


class _Check:
    def __init__(self, original: Artifact, made: Artifact, stack: ExitStack) -> None:
        self.found: dict[str, Difference] = {}
        self._original, self._compressed, self._stack = original, made, stack
        self._is_unbounded = any(step.name in _UNBOUNDED for step in made.provenance[len(original.provenance) :])
        try:
            self._made = _Runner(made, stack)
            # Integer kernels ignore a bias's own scale, so only the model without graph optimisations can be perturbed.
            self._written = _Runner(made, stack, as_written=True)
            self._widened = self._perturbed([_DRAWS], widened=True)
            self._others = self._perturbed(range(_DRAWS))
        except InvalidModel as error:
            raise WrongResult(f"the compressed model does not load: {error.message}", _FIX) from error
        self._bounds: dict[str, float] = {}
        """The bound of each output so far. Further samples can raise it."""
        self._magnitudes: dict[str, float] = {}

    def compare(self, sample: LabelledInputs, want: Mapping[str, Array]) -> None:
        """Compare the outputs with ``want``, the outputs of the original."""
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
        """Raise each bound to the bound for ``sample``, if that is larger."""
        got = _outputs(self._written, sample, errors) if self._others else {}
        # At other sizes, values can exceed the calibrated ranges.
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
    """The bound at other sizes, from the error at the sizes of the data."""
    return max(_SIZE_FACTOR * error, _SIZE_FLOOR) if np.isfinite(error) else 0.0


def distance(want: Array, got: Array, least: float = 0.0) -> float:
    """Norm of the difference divided by the norm of ``want``; for integers and text, the fraction of values that differ.

    Infinite if types or shapes differ, or if NaN and infinities are in other places. A mean square of ``want`` below ``least`` counts
    as ``least``.
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
    """Inputs at the sizes of the data first, then at other sizes."""
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
    """``array``, repeated or cut to ``batch`` rows and to ``free`` elements along every other free dimension."""
    for axis, dim in enumerate(dims):
        size = batch if axis == 0 else free
        if dim == -1 and size is not None and array.shape[axis]:
            array = np.take(array, np.arange(size) % array.shape[axis], axis)
    return array


class _Runner:
    """A loaded model. Inputs of unusual sizes run in a child process."""

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
