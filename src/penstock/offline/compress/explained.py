"""Check that a compressed model differs from the original only by what its method should change.

The check needs no evaluation data. It runs models on rows of the method's data, or on generated inputs if the method has no data. Each
free dimension is run at several sizes. The check has four parts:

1. Quantised, pruned, shared and split models: the method's change is undone (``restored/``). The result must equal the method's input
   model, except for differences in the order of summation. Every changed weight must be rounded by at most half a step, set to zero,
   moved to the nearest shared value, or projected, as the method specifies.
2. Corrected biases and reconstructed weights must not make the error of the outputs larger.
3. All models: the outputs with ONNX Runtime's graph optimisations must equal the outputs without them. If activations are rounded, a
   different order of summation can change a value by one step, so the bound is proportional to the rounding error.
4. Models with fewer channels: the error at other sizes must not exceed ``_SIZE_FACTOR`` times the error at the data's sizes, or
   ``_SIZE_FLOOR`` if that is larger. This detects methods that are correct at one size only.

The weights of trained models are not checked, since training may choose any weights. A compressed model must accept every input that
the original accepts. Its outputs must have the same types and shapes, with NaN and infinities at the same positions; if the original's
outputs have NaN or infinity at a size that the data do not have, only types and shapes are compared there. The contract judges the
accuracy on real data; this check does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidModel, PenstockError, WrongResult
from penstock.offline.apart import ENDED, apart, is_light
from penstock.offline.compress.restored.restore import RESTORED, restored, steps
from penstock.offline.compress.restored.unrounded import FIX, with_float_products
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.samples import LabelledInputs, free_sizes, generate, generate_sizes, sizes_of
from penstock.offline.optimize.verify import default_tolerance, dimension_names
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType, Signature

_SAME = 1e-3
"""Largest relative error of models that differ in the order of summation."""
_FACTOR, _FLOOR = 4.0, 5e-3
"""The outputs with and without ONNX Runtime's graph optimisations may differ by ``_FACTOR`` times the rounding error of activations,
plus at least ``_FLOOR``."""
_CORRECTED, _OTHER_ROWS = 1.5, 2.0
"""Maximum ratio of the errors with and without a correction: ``_CORRECTED``, or ``_OTHER_ROWS`` times the ratio that was measured when
the model was corrected, if that is smaller."""
_CORRECTIONS = {"correct-biases": "corrected biases", "reconstruct": "reconstructed weights"}
"""Provenance steps that lower the error of the outputs, and their results."""
_ROUNDING = {"QuantizeLinear", "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "MatMulNBits"}
"""Operators that round activations."""
_RECURRENT = {"LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"}
_SIZE_FACTOR, _SIZE_FLOOR = 10.0, 0.5
_SIZES = "its error at other sizes explains"
_USELESS = 10.0
"""Largest relative error of a model that is not evaluated. Pruned models that are still to be trained may exceed 1."""
_NEGLIGIBLE = 1e-2
"""The magnitude of an output counts as at least this fraction of its usual magnitude."""
_ROWS = 16
_SIZES_OF_DATA = 3
"""Number of sizes, among those of the data's samples, at which models are compared."""
_OWN = "data"
"""Label of the inputs that are rows of the method's data."""
_TRAINED = frozenset(
    {"qat", "distill", "recover", "retrain", "tune-centroids", "prune_iteratively", "shrink", "refresh_norms"}
)
"""Provenance steps that train the model."""
_ADDITIONS = frozenset({"quantize_recurrent", "store_weights"})
"""Provenance steps that may follow the correction of biases, and change other weights."""
_EXACT = frozenset({"embed", "keep_float", "optimize", "equalize", "smooth-quant", "awq", "mixed_precision"})
"""Provenance steps that compare the outputs themselves."""


class Difference(msgspec.Struct, frozen=True):
    """The largest error found for one output, and its bound."""

    output: str
    error: float
    """Norm of the difference over the norm of the original's output. For integers and text: the fraction of differing values."""
    bound: float
    sizes: str
    """The names and shapes of the inputs."""
    reason: str = _SIZES
    """What explains an error up to the bound."""


def check_explained(original: Artifact, made: Artifact, data: Dataset | None = None) -> list[Difference]:
    """The largest difference for each output and reason. Raises WrongResult if a difference exceeds its bound.

    A step of ``made`` can only be undone if its source model is in memory (``Artifact.source``). ``data`` is the data that the method
    used. Without data, inputs are generated.
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
                check = _Check(original, made, before, stack)
            check.compare(sample, want)
        return check.found if check else []


def without_evaluation(found: Sequence[Difference]) -> str:
    """A note on the error of the outputs, if there are no evaluation data. Raises WrongResult if the error exceeds the outputs."""
    worst = max((one for one in found if one.reason == _SIZES), key=lambda one: one.error, default=None)
    if worst is None or not worst.error:
        return ""
    text = f"output '{worst.output}' of the compressed model differs by {worst.error:.2%} on inputs {worst.sizes}"
    if worst.error > _USELESS:
        raise WrongResult(
            f"{text}, and there are no evaluation data: at most {_USELESS:.0%} is accepted",
            "compress less; or give --evaluate FILE.npz, which measures the accuracy",
        )
    return f"{text}; its accuracy is unknown without --evaluate"


def _check_survives(made: Artifact, sample: LabelledInputs) -> None:
    """Raise WrongResult if running ``made`` ends the process."""
    try:
        apart.forward(made, sample, as_written=False)
    except PenstockError as error:
        if ENDED in error.message:
            raise WrongResult(f"the compressed model cannot be used: {_culprit(made, sample)} it", FIX) from error


def _culprit(made: Artifact, sample: LabelledInputs) -> str:
    """The cause of a crash, for the error message: running the model, or its optimisation by ONNX Runtime."""
    try:
        apart.forward(made, sample, as_written=True)
    except PenstockError:
        return "ONNX Runtime crashes when running"
    return "it runs without graph optimisation, but ONNX Runtime crashes when optimising"


class _Check:
    def __init__(self, original: Artifact, made: Artifact, before: _Runner, stack: ExitStack) -> None:
        self._found: dict[tuple[str, str], Difference] = {}
        self._runners = {original.digest: before}
        self._before, self._stack = before, stack
        self._sized: dict[str, float] = {}
        """For each output, the bound at other sizes."""
        self._magnitudes: dict[tuple[str, str], float] = {}
        chain = list(steps(original, made))
        names = {step.name for step in made.provenance[len(original.provenance) :]}
        is_known = made.digest == original.digest or any(source.digest == original.digest for *_, source in chain)
        self._is_sized = names.isdisjoint(_TRAINED) and not (is_known and names <= RESTORED | _EXACT)
        try:
            proto = read_proto(made)
            self._made = _Runner(made, stack)
            self._written = self._rounding = self._runner(with_float_products(made))
            if self._written.artifact.digest != made.digest:
                # The kernel rounds activations, whose error reconstructed weights do not lower.
                nearest = next((source for name, _, source in chain if name == "reconstruct"), made)
                self._rounding = self._runner(with_float_products(nearest))
            pairs = [restored(*step) for step in chain if step[0] in RESTORED]
            differing = [pair for pair in pairs if pair.found.digest != pair.wanted.digest]
            self._pairs = [(self._runner(found), self._runner(wanted)) for found, wanted in differing]
            remaining = (step for step in chain if step[0] not in _ADDITIONS)
            corrected = itertools.takewhile(lambda step: step[0] in _CORRECTIONS, remaining)
            self._corrections = [
                _Correction(_CORRECTIONS[name], self._runner(result), self._runner(source), _correction(result))
                for name, result, source in corrected
            ]
        except InvalidModel as error:
            raise WrongResult(f"the compressed model does not load: {error.message}", FIX) from error
        operators = {node.op_type for node in proto.graph.node}
        self._rounds, self._is_recurrent = not _ROUNDING.isdisjoint(operators), not _RECURRENT.isdisjoint(operators)
        self._least = max(_FLOOR, default_tolerance(proto))

    @property
    def found(self) -> list[Difference]:
        return list(self._found.values())

    def compare(self, sample: LabelledInputs, want: Mapping[str, Array]) -> None:
        """Compare the outputs with ``want``, the outputs of the original."""
        got, written = (_outputs(runner, sample, want) for runner in (self._made, self._written))
        is_undefined = self._is_recurrent and any(not array.size for array in sample.values())
        if sample.is_odd and (is_undefined or not all(_is_finite(array) for array in want.values())):
            # At this size, which the data do not have, the original divides by the length 0, for example. ONNX Runtime does not
            # initialise the state of a recurrent layer without time steps.
            _check_forms(sample, want, got)
            return
        errors = self._errors("", want, got)
        for name, error in errors.items():
            # The error at the sizes of the data is not bounded.
            bound = self._sized.get(name, float("inf"))
            self._note(Difference(name, error, bound if np.isfinite(error) else 0.0, sizes_of(sample)))
            if self._is_sized:
                self._sized.setdefault(name, _size_bound(error))
        nearest = written if self._rounding is self._written else _outputs(self._rounding, sample, want)
        rounded = self._errors("", want, nearest) if self._rounds else {}
        ties = self._errors("written", {name: written[name] for name in want}, got)
        bounds = {name: _FACTOR * min(rounded.get(name, 0.0), 1.0) + self._least for name in ties}
        self._note_all(sample, ties, bounds, "between both ways to run it, rounding explains")
        for one in self._corrections if sample.label == _OWN else ():
            before, after = (
                self._errors("", want, _outputs(runner, sample, want)) for runner in (one.source, one.result)
            )
            bounds = {name: one.most * error + _SAME for name, error in before.items()}
            self._note_all(sample, after, bounds, f"the error without {one.what} explains")
        for number, (found, wanted) in enumerate(self._pairs):
            expected = want if wanted is self._before else _run(wanted, sample)
            if expected is not None:
                errors = self._errors(f"{number}", expected, _outputs(found, sample, expected))
                self._note_all(
                    sample, errors, dict.fromkeys(errors, _SAME), "without its own change, summation explains"
                )

    def _runner(self, model: Artifact) -> _Runner:
        if model.digest not in self._runners:
            self._runners[model.digest] = _Runner(model, self._stack, as_written=True)
        return self._runners[model.digest]

    def _errors(self, kind: str, want: Mapping[str, Array], got: Mapping[str, Array]) -> dict[str, float]:
        for name, array in want.items():
            self._magnitudes[kind, name] = max(self._magnitudes.get((kind, name), 0.0), _mean_square(array))
        return {
            name: distance(array, got[name], _NEGLIGIBLE**2 * self._magnitudes[kind, name])
            for name, array in want.items()
        }

    def _note_all(
        self, sample: LabelledInputs, errors: Mapping[str, float], bounds: Mapping[str, float], reason: str
    ) -> None:
        for name, error in errors.items():
            self._note(Difference(name, error, bounds[name], sizes_of(sample), reason))

    def _note(self, found: Difference) -> None:
        if not found.error <= found.bound:
            raise _wrong(found)
        known = self._found.get((found.output, found.reason))
        if known is None or found.error > known.error:
            self._found[found.output, found.reason] = found


class _Correction(NamedTuple):
    """A step that lowers the error of the outputs."""

    what: str
    result: _Runner
    source: _Runner
    most: float
    """The largest error of the result, divided by the error of the source."""


def _correction(made: Artifact) -> float:
    """The largest error of ``made``, the result of a correction, divided by the error without."""
    first, best = made.provenance[-1].facts["error"]
    return min(_CORRECTED, _OTHER_ROWS * best / first) if first else _CORRECTED


def _size_bound(error: float) -> float:
    """The bound at other sizes, from the error at the sizes of the data."""
    return max(_SIZE_FACTOR * error, _SIZE_FLOOR) if np.isfinite(error) else 0.0


def distance(want: Array, got: Array, least: float = 0.0) -> float:
    """Norm of the difference divided by the norm of ``want``. For integers and text: the fraction of values that differ.

    Infinite if types or shapes differ, or if NaN and infinities are at different positions. ``least`` is the minimum of the mean
    square of ``want``. If both are 0, the result is 1 for any difference.
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
    return (difference / (norm or difference)) ** 0.5 if difference else 0.0


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
    rows = signature.smallest_batch if is_fixed else _ROWS
    if data.stacks:
        calls = [data.pick_evenly(rows).inputs]
    else:
        sizes = len(data.mix(rows, _SIZES_OF_DATA))
        calls = [call.inputs for call in data.mix(rows if is_fixed else rows // sizes, sizes)]
    wanted = [LabelledInputs(_OWN, own) for own in calls]
    for batch, free in ((1, None), (3, None), (2, 1), (2, 5), (2, 17), (1, 0), (0, None)):
        resized = {spec.name: _resized(calls[0][spec.name], spec.shape, batch, free) for spec in signature.inputs}
        if all(sizes_of(resized) != sizes_of(one) for one in wanted):
            wanted.append(LabelledInputs("resized", resized, is_odd=True))
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
        self.artifact = artifact
        self.model = stack.enter_context(loaded(artifact, as_written=as_written))

    def forward(self, sample: LabelledInputs) -> dict[str, Array]:
        return apart.forward(self.artifact, sample) if sample.is_odd else self.model.forward(sample)


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
            FIX,
        ) from error
    if missing := want.keys() - got.keys():
        raise WrongResult(f"the compressed model has no output '{min(missing)}'", FIX)
    return got


def _check_forms(sample: LabelledInputs, want: Mapping[str, Array], got: Mapping[str, Array]) -> None:
    """Raise WrongResult if an output has another type or shape than in ``want``."""
    for name, array in want.items():
        if array.shape != got[name].shape or array.dtype != got[name].dtype:
            raise _wrong(Difference(name, float("inf"), 0.0, sizes_of(sample)))


def _is_finite(array: Array) -> bool:
    return not DataType.from_numpy(array.dtype).is_float or bool(np.isfinite(array).all())


def _wrong(found: Difference) -> WrongResult:
    where = f"output '{found.output}' of the compressed model, on inputs {found.sizes},"
    if np.isinf(found.error):
        return WrongResult(f"{where} has another type or shape, or NaN or infinities in other places", FIX)
    return WrongResult(f"{where} is off by {found.error:.2%}; {found.reason} at most {found.bound:.2%}", FIX)


def _mean_square(array: Array) -> float:
    if not DataType.from_numpy(array.dtype).is_float:
        return 0.0
    values = array.astype(np.float64)
    values = values[np.isfinite(values)]
    return float(np.square(values).mean()) if values.size else 0.0
