"""TensorFlow Lite: float and quantised models, through tf2onnx. Quantised tensors keep their integers, between QuantizeLinear and
DequantizeLinear.

LiteRT's interpreter without delegates gives the reference, and keeps every tensor of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ai_edge_litert
import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, Unsupported, shortened
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, FrameworkModel
from penstock.offline.convert.declarations import check_inputs, chosen_outputs, free_axes
from penstock.offline.convert.reading import read_file
from penstock.offline.convert.tensorflow import exporter
from penstock.offline.convert.tensorflow import links as linking
from penstock.tensor import Array, DataType, Signature, TensorSpec, as_bytes

_MAGIC = b"TFL3"


class TfLiteConverter:
    name = "tflite"
    version: str = ai_edge_litert.__version__

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        path = Path(source)
        data = read_file(path)
        if data[4:8] != _MAGIC:
            raise InvalidModel(f"'{path.name}' is not a TensorFlow Lite model", "its bytes 4 to 7 must be TFL3")
        try:
            interpreter = Interpreter(
                model_content=data,
                experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
                experimental_preserve_all_tensors=True,
                num_threads=1,
            )
            interpreter.allocate_tensors()
        except Exception as error:
            raise _refusal(error) from error
        return _TfLiteModel(path, interpreter, options)


CONVERTER = TfLiteConverter()


class _TfLiteModel:
    """One interpreter. The batch is free only if the file says so."""

    def __init__(self, path: Path, interpreter: Any, options: ConvertOptions) -> None:
        self._path = path
        self._interpreter = interpreter
        self._inputs = _named(interpreter, "inputs")
        outputs = _named(interpreter, "outputs")
        self._outputs = {name: outputs[name] for name in chosen_outputs(options, outputs)}
        self.signature = Signature(
            tuple(_spec(name, details) for name, details in self._inputs.items()),
            tuple(_spec(name, details) for name, details in self._outputs.items()),
        )
        _check(self.signature, options)
        self.axes: Mapping[str, tuple[Axis, ...]] = free_axes(self.signature.inputs, options)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self._invoke(inputs)
        return {name: self._interpreter.get_tensor(details["index"]) for name, details in self._outputs.items()}

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        if inputs:
            self._invoke(inputs)
        known = self._tensors()
        found: dict[str, Array] = {}
        for source in names:
            name = linking.unlinked(source)[0]
            if name in known:
                try:
                    value = self._interpreter.get_tensor(known[name]["index"])
                except ValueError:  # the interpreter has no memory for it
                    continue
                found[source] = linking.relaid(value, source)
        return found

    def export(self, target: Path, opset: int) -> Exported:
        inputs = {details["name"]: name for name, details in self._inputs.items()}
        outputs = {details["name"]: name for name, details in self._outputs.items()}
        if inputs.keys() & outputs.keys():
            raise Unsupported("an input of the model is also an output", "leave it out with --outputs")
        arguments = {"tf_graph": None, "tflite_path": str(self._path), "output_names": list(outputs)}
        request = exporter.Request(inputs | outputs, self.signature, self.axes, arguments)
        model = exporter.converted(request, opset)
        exporter.write(model, target)
        shapes = {name: [None if size < 0 else size for size in _shape(one)] for name, one in self._tensors().items()}
        links = tuple(linking.links(model, shapes, request.renamed))
        weights, computes = self._weights()
        return Exported(f"tf2onnx {exporter.VERSION}", links, weights=weights, computed=None if computes else ())

    def close(self) -> None:
        self._interpreter = None

    def _tensors(self) -> dict[str, dict[str, Any]]:
        """Details of the tensors whose names are unique."""
        details = self._interpreter.get_tensor_details()
        names = [one["name"] for one in details]
        return {one["name"]: one for one in details if one["name"] and names.count(one["name"]) == 1}

    def _weights(self) -> tuple[tuple[str, ...], bool]:
        """The names of the float tensors that no operator computes, and whether an operator computes from constants alone."""
        operators = self._interpreter._get_ops_details()  # noqa: SLF001 - the only way to tell the constants
        made = {int(index) for one in operators for index in one["outputs"]}
        made |= {details["index"] for details in self._inputs.values()}
        computes = any(made.isdisjoint(map(int, one["inputs"])) for one in operators)
        known = self._tensors().items()
        return tuple(name for name, one in known if one["index"] not in made and one["dtype"] == np.float32), computes

    def _invoke(self, inputs: Mapping[str, Array]) -> None:
        self.signature.check(inputs)
        interpreter = self._interpreter
        try:
            for name, details in self._inputs.items():
                interpreter.resize_tensor_input(details["index"], inputs[name].shape)
            interpreter.allocate_tensors()
            for name, details in self._inputs.items():
                array = inputs[name]
                interpreter.set_tensor(details["index"], _text(array) if array.dtype == object else array)
        except (ValueError, RuntimeError) as error:
            raise InvalidInput(f"the model rejects the inputs: {_reason(error)}") from error
        try:
            interpreter.invoke()
        except Exception as error:
            raise PenstockError(f"the model failed: {_reason(error)}") from error


def _named(interpreter: Any, side: str) -> dict[str, dict[str, Any]]:
    """Details of the inputs or outputs by name: the signature's names if the file has a signature, in the graph's order."""
    graph = getattr(interpreter, f"get_{side[:-1]}_details")()
    names = {one["index"]: one["name"] for one in graph}
    signatures = list(interpreter.get_signature_list())
    if signatures:
        runner = interpreter.get_signature_runner(signatures[0])
        names |= {one["index"]: name for name, one in getattr(runner, f"get_{side[:-1]}_details")().items()}
    return {names[one["index"]]: one for one in graph}


def _shape(details: Mapping[str, Any]) -> tuple[int, ...]:
    signature = details["shape_signature"]
    return tuple((signature if len(signature) else details["shape"]).tolist())


def _spec(name: str, details: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(name, DataType.from_numpy(np.dtype(details["dtype"])), _shape(details))


def _check(signature: Signature, options: ConvertOptions) -> None:
    """Raise InvalidArgument if ``options`` contradict the file."""
    specs = {spec.name: spec for spec in signature.inputs}
    check_inputs(options, specs)
    for name, free in options.dynamic.items():
        for axis in free:
            if not 0 <= axis < len(specs[name].shape) or specs[name].shape[axis] >= 0:
                raise InvalidArgument(
                    f"dimension {axis} of the input '{name}' cannot be free: its shape is {list(specs[name].shape)}",
                    "convert the original model with a free dimension",
                )


def _refusal(error: Exception) -> PenstockError:
    told = _reason(error)
    if "Flex" in told or "Select TensorFlow op" in told:
        return Unsupported(
            f"the model uses operators of TensorFlow: {told}", "give the SavedModel from which it was made"
        )
    if "unresolved custom op" in told:
        return Unsupported(f"the model uses an operator that LiteRT does not have: {told}", "replace it in the model")
    return InvalidModel(f"LiteRT refuses the model: {told}", "convert the model again")


def _text(array: Array) -> Array:
    encoded = np.empty(array.shape, np.object_)
    encoded.reshape(-1)[:] = [as_bytes(element) for element in array.reshape(-1).tolist()]
    return encoded


def _reason(error: Exception) -> str:
    return shortened((str(error).strip() or type(error).__name__).replace("\n", " "), 400)
