"""Verify that a change keeps a model's outputs: run both models in ONNX Runtime on the same inputs, and compare the outputs.

ONNX Runtime runs without optimisations and on one thread, so that the change is the only cause of a difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.errors import PenstockError
from penstock.offline.apart import apart, is_light
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import subgraphs
from penstock.offline.optimize.samples import LabelledInputs, free_sizes, generate, generate_sizes, sizes_of
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

_MAX_GIVEN = 8
_SIZED_BY_VALUES = {"Compress", "NonMaxSuppression", "NonZero", "Range", "Unique"}
"""Operators whose outputs may be empty even if their inputs are not."""

# Rounding changes outputs by a few units in the last place per layer. A wrong rewrite changes them by orders of magnitude more.
_TOLERANCES = {
    ir.DataType.BFLOAT16: 5e-2,
    ir.DataType.FLOAT16: 1e-2,
    ir.DataType.FLOAT: 1e-4,
    ir.DataType.DOUBLE: 1e-6,
}

# Values below this fraction of an output's largest magnitude over all samples are mostly rounding error.
_NEGLIGIBLE = 1e-3

_NOISE_FACTOR, _MOST_NOISE = 3.0, 10.0
"""The tolerance is raised to ``_NOISE_FACTOR`` times the rounding error of the original, at most to ``_MOST_NOISE`` times itself."""


class Verdict(msgspec.Struct, frozen=True):
    """The result of a comparison. ``failure`` states where and by how much the outputs differ; empty if the outputs agree."""

    max_relative_error: float | None
    failure: str = ""


class Verifier:
    """Stores the original's outputs, and compares changed models with them.

    The inputs are up to 8 of ``samples``, and all generated samples (``samples.py``) that the original accepts. Generated samples
    cover several sizes of each free dimension. Outputs agree under these conditions: shapes and datatypes are the same; NaN and
    infinities are in the same places; integers, booleans and text are equal; for floats, ``max |new - old| / max |old|`` is at most
    ``tolerance``. The default tolerance depends on the narrowest float type among the model's tensors: 1e-4 for FP32, 1e-2 for FP16,
    5e-2 for BF16, 1e-6 for FP64. Deep models can amplify rounding beyond this. So if an error exceeds ``tolerance``, the original also
    runs with ONNX Runtime's graph optimisations, which only round differently. Three times their error is allowed, up to ten times
    ``tolerance``.

    ``obstacle`` is the reason if no comparison is possible, otherwise empty. Raises InvalidArgument if one of ``samples`` does not fit
    the model's signature.
    """

    def __init__(
        self, original: Artifact, samples: Sequence[Mapping[str, Array]] = (), tolerance: float | None = None
    ) -> None:
        self.obstacle = ""
        self.tolerance = default_tolerance(read_proto(original)) if tolerance is None else tolerance
        self._original = original
        self._answers: list[tuple[LabelledInputs, dict[str, Array]]] = []
        self._is_apart = is_light(original) and _may_be_empty(read_proto(original).graph)
        self._magnitudes: dict[str, float] = {}
        """The largest magnitude of each float output over all samples."""
        self._noise: dict[int, dict[str, float]] = {}
        """For some samples, the rounding error of each output."""
        with contextlib.ExitStack() as stack:
            try:
                model = stack.enter_context(loaded(original, as_written=True))
            except PenstockError as error:
                self.obstacle = error.message
                return
            self._answer_all(model, samples)
        self.obstacle = f"the original model fails on every input tried: {self.obstacle}" if not self._answers else ""
        for _, outputs in self._answers:
            for name, array in outputs.items():
                if _is_float(array):
                    largest = _largest(array.astype(np.float64))
                    self._magnitudes[name] = max(self._magnitudes.get(name, 0.0), largest)

    def check(self, changed: Artifact) -> Verdict:
        """Compare ``changed`` with the original on every sample, up to the first difference."""
        if self.obstacle:
            return Verdict(None, f"unverifiable: {self.obstacle}")
        largest = 0.0
        try:
            with loaded(changed, as_written=True) as model:
                for number, (sample, expected) in enumerate(self._answers):
                    outputs = self._run(changed, model, sample)
                    for name, want in expected.items():
                        error, reason = compare(want, outputs.get(name), self._magnitudes.get(name, 0.0))
                        largest = max(largest, error)
                        if error > self.tolerance and error > self._allowed(number, name):
                            return Verdict(largest, self._failure(name, reason, sample, changed))
        except PenstockError as failure:
            return Verdict(None, f"the changed model does not run: {failure.message}")
        return Verdict(largest)

    def _answer_all(self, model: LoadedModel, samples: Sequence[Mapping[str, Array]]) -> None:
        for index, inputs in enumerate(samples[:_MAX_GIVEN]):
            model.signature.check(inputs)
            self._answer(model, LabelledInputs(f"sample {index}, {sizes_of(inputs)}", dict(inputs)))
        names = dimension_names(read_proto(self._original))
        for size in free_sizes(model.signature):
            generated = [self._answer(model, sample) for sample in generate(model.signature, size)]
            if any(generated):
                for sample in generate_sizes(model.signature, size, names) if is_light(self._original) else ():
                    self._answer(model, sample)
                break

    def _answer(self, model: LoadedModel, sample: LabelledInputs) -> bool:
        try:
            self._answers.append((sample, self._run(self._original, model, sample)))
        except PenstockError as error:
            self.obstacle = error.message
            return False
        return True

    def _run(self, artifact: Artifact, model: LoadedModel, sample: LabelledInputs) -> dict[str, Array]:
        return apart.forward(artifact, sample) if self._is_apart or sample.is_odd else model.forward(sample)

    def _allowed(self, number: int, name: str) -> float:
        """The error that rounding explains in the output ``name`` for a sample."""
        if number not in self._noise:
            sample, expected = self._answers[number]
            self._noise[number] = {}
            with contextlib.suppress(PenstockError):
                outputs = apart.forward(self._original, sample, as_written=False)
                for one, want in expected.items():
                    self._noise[number][one] = compare(want, outputs.get(one), self._magnitudes.get(one, 0.0))[0]
        return min(_NOISE_FACTOR * self._noise[number].get(name, 0.0), _MOST_NOISE * self.tolerance)

    def _failure(self, name: str, reason: str, sample: LabelledInputs, changed: Artifact) -> str:
        where = first_divergence(self._original, changed, sample, self.tolerance)
        return f"output '{name}': {reason} on {sample.label}" + (f"; first divergent tensor: {where}" if where else "")


def _may_be_empty(graph: onnx.GraphProto) -> bool:
    """True if a tensor may be empty for some values of the inputs. Empty tensors end the process in some kernels of ONNX Runtime."""
    return any(node.op_type in _SIZED_BY_VALUES or any(map(_may_be_empty, subgraphs(node))) for node in graph.node)


def compare(old: Array, new: Array | None, magnitude: float = 0.0) -> tuple[float, str]:
    """Returns the relative error, and the difference as text. If something other than floats differs, the error is infinite.

    ``magnitude`` is the tensor's largest magnitude on any sample. The error is relative to at least a thousandth of ``magnitude``.
    """
    if reason := _exact_difference(old, new):
        return float("inf"), reason
    if new is None or not _is_float(old):
        return 0.0, ""
    before, after = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(before)
    difference = _largest(after[finite] - before[finite])
    if difference == 0.0:
        return 0.0, ""
    scale = max(_largest(before), _NEGLIGIBLE * magnitude)
    error = difference / scale if scale else float("inf")
    return error, f"relative error {error:.2g}"


def _exact_difference(old: Array, new: Array | None) -> str:
    """The first difference in datatype, shape, values other than floats, or places of NaN and infinities; empty if none."""
    if new is None:
        return "is missing"
    if old.dtype != new.dtype:
        return f"is {new.dtype}, was {old.dtype}"
    if old.shape != new.shape:
        return f"has shape {list(new.shape)}, had {list(old.shape)}"
    if not _is_float(old):
        differing = int((old != new).sum())
        return f"{differing} of {old.size} values differ" if differing else ""
    before, after = old.astype(np.float64), new.astype(np.float64)
    finite = np.isfinite(before)
    same = np.array_equal(before[~finite], after[~finite], equal_nan=True) and np.isfinite(after[finite]).all()
    return "" if same else "NaN or infinite values are in other places"


def first_divergence(original: Artifact, changed: Artifact, sample: LabelledInputs, tolerance: float) -> str:
    """The first tensor that differs between the models, in the changed model's order; empty if none is found.

    The text includes the operator that writes the tensor: ``'h3' (Conv)``.
    """
    old, new = read_proto(original), read_proto(changed)
    known = {name for node in old.graph.node for name in node.output}
    made_by = {name: node.op_type for node in new.graph.node for name in node.output if name and name in known}
    try:
        before, after = (_run_showing(proto, list(made_by), sample) for proto in (old, new))
    except PenstockError:
        return ""
    for name, op_type in made_by.items():
        if compare(before[name], after[name])[0] > tolerance:
            return f"'{name}' ({op_type})"
    return ""


def dimension_names(model: onnx.ModelProto) -> dict[str, list[str]]:
    """The names of the dimensions of each input and output. A dimension without a name has the name ""."""
    values = (*model.graph.input, *model.graph.output)
    return {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in values}


def _run_showing(proto: onnx.ModelProto, names: list[str], sample: LabelledInputs) -> dict[str, Array]:
    outputs = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    with loaded(artifact_of(proto), as_written=True) as model:
        return model.forward(sample)


def _is_float(array: Array) -> bool:
    return DataType.from_numpy(array.dtype).is_float


def _largest(array: Array) -> float:
    """The largest finite magnitude, 0 if there is none."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def default_tolerance(model: onnx.ModelProto) -> float:
    """The tolerance of the narrowest float type among the tensors of ``model``."""
    values = [*model.graph.input, *model.graph.output]
    types = {tensor.data_type for tensor in model.graph.initializer} | {v.type.tensor_type.elem_type for v in values}
    return max((_TOLERANCES[one] for one in types if one in _TOLERANCES), default=_TOLERANCES[ir.DataType.FLOAT])
