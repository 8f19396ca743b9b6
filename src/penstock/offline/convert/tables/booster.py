"""Boosted models of all frameworks as one kind of source: scores from a forest, a link function, and labels for classifiers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from penstock.errors import InvalidArgument, InvalidInput, InvalidModel
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, Probes, TensorLink
from penstock.offline.convert.tables.forest import Forest, GraphWriter
from penstock.offline.convert.tables.probes import probes_of
from penstock.offline.convert.tree_arrays import MOST_NODES, TreeArrays
from penstock.tensor import Array, DataType, Signature, TensorSpec, as_bytes

_ML_OPSET = 3
_PROBES = 1 << 12
"""Rows of a call."""
_PLACE = re.compile(r"^(\[[\d:]+\] )?[\w./-]+:\d+: ")
"""Time and place in the C++ code of a framework, in front of its messages."""
_LINKS: dict[str, Callable[[GraphWriter, str], str]] = {
    "identity": lambda writer, raw: raw,
    "sigmoid": lambda writer, raw: writer("Sigmoid", raw),
    "softmax": lambda writer, raw: writer("Softmax", raw, axis=1),
    "exponent": lambda writer, raw: writer("Exp", raw),
    "softplus": lambda writer, raw: writer("Softplus", raw),
    "signed_square": lambda writer, raw: writer("Mul", raw, writer("Abs", raw)),
    "step": lambda writer, raw: writer("Cast", writer("Greater", raw, np.zeros((), np.float32)), to=TensorProto.FLOAT),
    "argmax": lambda writer, raw: writer("Cast", writer("ArgMax", raw, axis=1, keepdims=0), to=TensorProto.FLOAT),
}
"""Functions from scores to predictions, by the name that the frameworks' files use."""


class Booster(NamedTuple):
    """A boosted model, as its framework's file describes it."""

    exporter: str
    forest: Forest
    link: str
    raw: Callable[[Array], Array]
    """The framework's scores [N] or [N, targets], before the link function."""
    predict: Callable[[Array], Array]
    """The framework's predictions; the probabilities of a classifier, or of its second class."""
    classes: Array | None = None
    """The labels of a classifier."""
    label: Callable[[Array], Array] | None = None
    """The framework's labels; None: those with the highest probability."""
    scale: float = 1.0
    """Factor of the scores in front of the link function."""
    double: bool = False
    """True if the framework computes in float64, so that inputs of float64 are not rounded."""
    failures: tuple[type[Exception], ...] = (ValueError,)
    """Exceptions of the framework for inputs that it rejects."""
    warnings: tuple[str, ...] = ()

    def write(self, writer: GraphWriter, x: str, datatype: DataType, *, wide: bool = False) -> dict[str, str]:
        """Add the model's nodes for the input ``x``. Returns the names of the scores ``raw`` and of the outputs.

        With ``wide``, scores and probabilities are float64.
        """
        kind = np.float64 if wide else np.float32
        inner = DataType.FP64 if self.double and not _narrow(datatype) else DataType.FP32
        if datatype is not inner:
            x = writer("Cast", x, to=inner.onnx)
        raw = (self.forest.write_wide if wide else self.forest.write)(writer, x, inner)
        scaled = raw if self.scale == 1 else writer("Mul", raw, np.array(self.scale, kind))
        result = _LINKS[self.link](writer, scaled)
        single = len(self.forest.base) == 1
        if self.classes is None:
            flat = single and self.link != "argmax"
            return {"raw": raw, "prediction": writer("Squeeze", result, np.array([1])) if flat else result}
        if single:
            best = writer(
                "Cast",
                writer("Squeeze", writer("Greater", raw, np.zeros((), kind)), np.array([1])),
                to=TensorProto.INT64,
            )
            result = writer("Concat", writer("Sub", np.ones((), kind), result), result, axis=1)
        else:
            best = writer("ArgMax", raw, axis=1, keepdims=0)
        return {"raw": raw, "label": writer("Gather", self.classes, best), "probabilities": result}

    def probes(
        self, spec: TensorSpec, rng: np.random.Generator, *, missing: bool = True, brief: bool = False
    ) -> Probes:
        """Calls of the input ``spec`` that reach all leaves, if there are not too many."""
        kind = np.float64 if self.double and not _narrow(spec.datatype) else np.float32
        is_float = spec.datatype.is_float
        found = probes_of(self.forest, rng, kind, missing=missing and is_float, whole=not is_float, brief=brief)
        limits = np.finfo(np.float32) if is_float else np.iinfo(spec.datatype.dtype)
        rows = found.rows.clip(float(limits.min), float(limits.max)).astype(spec.datatype.dtype)
        calls = [{spec.name: rows[start : start + _PROBES]} for start in range(0, len(rows), _PROBES)]
        return Probes(tuple(calls), tuple(filter(None, [found.note])))

    def outputs(self) -> tuple[TensorSpec, ...]:
        if self.classes is not None:
            label = TensorSpec("label", DataType.from_numpy(self.classes.dtype), (-1,))
            return label, TensorSpec("probabilities", DataType.FP32, (-1, len(self.classes)))
        targets = len(self.forest.base)
        flat = targets == 1 or self.link == "argmax"
        return (TensorSpec("prediction", DataType.FP32, (-1,) if flat else (-1, targets)),)


class BoosterModel:
    """The ``FrameworkModel`` of a booster."""

    def __init__(self, booster: Booster, options: ConvertOptions) -> None:
        self.booster = booster
        spec = matrix_spec(options, booster.forest.features)
        self.signature = Signature((spec,), booster.outputs())
        self.axes: Mapping[str, tuple[Axis, ...]] = {spec.name: (Axis(0, "N", low=1),)}

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        x, booster = self._rows(inputs), self.booster
        found = {"prediction": self._called(booster.predict, x)}
        classes = booster.classes
        if classes is not None:
            probabilities = found["prediction"]
            if probabilities.ndim == 1:
                probabilities = np.stack([1 - probabilities, probabilities], axis=1)
            label = self._called(booster.label, x) if booster.label else classes[np.argmax(probabilities, axis=1)]
            found = {"label": label, "probabilities": probabilities}
        return {
            spec.name: as_tensor(found[spec.name], spec.datatype).reshape(len(x), *spec.shape[1:])
            for spec in self.signature.outputs
        }

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        if "scores" not in names:
            return {}
        x = self._rows(inputs)
        return {"scores": self._called(self.booster.raw, x).astype(np.float32).reshape(len(x), -1)}

    def trees(self) -> tuple[TreeArrays, ...]:
        return arrays_of([self.booster.forest])

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        return self.booster.probes(self.signature.inputs[0], np.random.default_rng(seed), brief=brief)

    def export(self, target: Path, opset: int) -> Exported:
        writer = GraphWriter()
        spec = self.signature.inputs[0]
        names = self.booster.write(writer, spec.name, spec.datatype)
        renamed = {names[output.name]: output.name for output in self.signature.outputs}
        for name, output in renamed.items():
            writer.rename(name, output)
        save(writer, self.signature, target, opset)
        raw = renamed.get(names["raw"], names["raw"])
        scores = TensorLink(raw, "scores", is_compared=raw not in self.signature.output_names)
        return Exported(self.booster.exporter, (scores,), warnings=self.booster.warnings)

    def close(self) -> None:
        pass

    def _rows(self, inputs: Mapping[str, Array]) -> Array:
        self.signature.check(inputs)
        return inputs[self.signature.inputs[0].name]

    def _called(self, function: Callable[[Array], Array], x: Array) -> Array:
        try:
            return np.asarray(function(x))
        except self.booster.failures as error:
            raise InvalidInput(f"{self.booster.exporter} rejects the input: {_reason(error)}") from error


class BoosterConverter(NamedTuple):
    """The ``Converter`` of a library, whose models ``read`` finds in its sources."""

    name: str
    version: str
    title: str
    read: Callable[[Any], Booster]

    def open(self, source: Any, options: ConvertOptions) -> BoosterModel:
        try:
            booster = self.read(source)
            booster.forest.check()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidModel(
                f"the model of {self.title} is damaged: {_reason(error)}", "save it again with save_model"
            ) from error
        return BoosterModel(booster, options)


def arrays_of(forests: Sequence[Forest]) -> tuple[TreeArrays, ...]:
    """The trees of ``forests``; empty if they are too many."""
    nodes = sum(len(tree.yes) for forest in forests for tree in forest.trees)
    return tuple(forest.arrays() for forest in forests if forest.trees) if nodes <= MOST_NODES else ()


def loaded(name: str, source: Any, read: Callable[[str], Any], failures: tuple[type[Exception], ...]) -> Any:
    """The model of the framework ``name`` in the file ``source``. Raises InvalidModel, InvalidArgument."""
    if not isinstance(source, (str, Path)):
        raise InvalidArgument(f"{type(source).__name__} is not a model of {name}", "give a trained model, or its file")
    try:
        return read(str(source))
    except failures as error:
        raise InvalidModel(
            f"'{Path(source).name}' is not a model of {name}: {_reason(error)}", "save it again with save_model"
        ) from error


def _reason(error: Exception) -> str:
    return _PLACE.sub("", str(error).strip()).partition("\n")[0]


def as_tensor(value: Array, datatype: DataType) -> Array:
    """``value`` as an array of ``datatype``; texts as UTF-8."""
    if datatype is not DataType.BYTES:
        return np.ascontiguousarray(value, datatype.dtype)
    found = np.empty(value.shape, np.object_)
    found.reshape(-1)[:] = [as_bytes(one if isinstance(one, bytes) else str(one)) for one in value.reshape(-1).tolist()]
    return found


def matrix_spec(options: ConvertOptions, features: int) -> TensorSpec:
    """The input of a model that takes rows of ``features`` numbers. Raises InvalidArgument if ``options`` declare another."""
    declared = [(one.name, one.datatype, one.shape) for one in options.inputs] or [
        (name, DataType.from_numpy(array.dtype), array.shape) for name, array in options.sample.items()
    ]
    if not declared:
        return TensorSpec("features", DataType.FP32, (-1, features))
    hint = f'use --inputs "{declared[0][0]}:float32[N,{features}]"'
    if len(declared) > 1:
        names = ", ".join(name for name, _, _ in declared)
        raise InvalidArgument(f"the model has one input, but {len(declared)} are declared: {names}", hint)
    name, datatype, shape = declared[0]
    if shape is not None and (len(shape) != 2 or (isinstance(shape[1], int) and shape[1] not in (features, -1))):
        raise InvalidArgument(
            f"input '{name}' has shape {list(shape)}, but the model takes rows of {features} features", hint
        )
    if datatype in (DataType.BYTES, DataType.BOOL):
        raise InvalidArgument(f"input '{name}' has type {datatype.value}, but the model takes numbers", hint)
    return TensorSpec(name, datatype or DataType.FP32, (-1, features))


def save(writer: GraphWriter, signature: Signature, target: Path, opset: int) -> None:
    """Write the nodes of ``writer`` to ``target`` as an ONNX model with the inputs and outputs of ``signature``."""
    inputs, outputs = (
        [helper.make_tensor_value_info(one.name, one.datatype.onnx, ["N", *one.shape[1:]]) for one in specs]
        for specs in (signature.inputs, signature.outputs)
    )
    graph = helper.make_graph(writer.nodes, "model", inputs, outputs, writer.constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", _ML_OPSET)]
    onnx.save(helper.make_model_gen_version(graph, opset_imports=opsets), target)


def _narrow(datatype: DataType) -> bool:
    """True if float32 has all numbers of ``datatype``."""
    return datatype is DataType.FP32 or datatype.itemsize <= 2
