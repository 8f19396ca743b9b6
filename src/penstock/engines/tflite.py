"""LiteRT: runs TensorFlow Lite models (``.tflite``), best for small and quantised models. Extra ``penstock[tflite]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import ai_edge_litert
import msgspec
import numpy as np
from ai_edge_litert.interpreter import Interpreter

from penstock.artifact import Artifact, Format
from penstock.engines.base import LoadedModel, Options, OptionsEngine, check_artifact, refuse_errors, typed_options
from penstock.errors import InvalidConfig, InvalidModel, PenstockError, Unavailable, Unsupported
from penstock.resources import usable_cores
from penstock.tensor import Array, DataType, Signature, TensorSpec, as_bytes


class TfLiteOptions(msgspec.Struct, frozen=True):
    """Options of an interpreter."""

    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Threads within an operator; 0: one per core."""
    free_batch: bool = False
    """Treat the first dimension of every input as free, even if the file fixes it. Some converters fix it at 1."""
    signature: str = ""
    """Name of the signature to run. Empty means the first signature. If a file has no signatures, its graph is run, and inputs and
    outputs have the names of the graph's tensors."""


class TfLiteEngine(OptionsEngine):
    """Loads TensorFlow Lite models into interpreters with XNNPACK's kernels."""

    name = "tflite"
    version: str = ai_edge_litert.__version__
    formats = frozenset({Format.TFLITE})
    options = TfLiteOptions
    copies = 3  # the model's bytes, whose weights the interpreter uses, and the weights packed by XNNPACK
    fixed_bytes = 64 << 20

    def load(self, artifact: Artifact, options: Options) -> LoadedModel:
        typed = typed_options(self.name, options, TfLiteOptions)
        refuse_errors(check_artifact(artifact, self.formats))
        try:
            interpreter = Interpreter(model_content=artifact.data, num_threads=typed.threads or usable_cores())
            inputs, outputs = _tensors(interpreter, typed.signature)
            interpreter.allocate_tensors()
        except (InvalidConfig, Unsupported):
            raise
        except Exception as error:
            raise InvalidModel(f"LiteRT refuses the model: {_reason(error)}", "convert the model again") from error
        return TfLiteModel(interpreter, inputs, outputs, typed.free_batch)


class TfLiteModel(LoadedModel):
    """One interpreter. Only one thread may use it at a time. Quantised tensors are passed and returned as integers."""

    def __init__(
        self,
        interpreter: Interpreter,
        inputs: dict[str, dict[str, Any]],
        outputs: dict[str, dict[str, Any]],
        free_batch: bool = False,
    ) -> None:
        """``inputs`` and ``outputs`` map tensor names to the interpreter's tensor details."""
        self.signature = Signature(
            tuple(_spec(name, details, free_batch) for name, details in inputs.items()),
            tuple(_spec(name, details, free_batch) for name, details in outputs.items()),
        )
        self._inputs = {name: details["index"] for name, details in inputs.items()}
        self._outputs = {name: details["index"] for name, details in outputs.items()}
        self._texts = {spec.name for spec in self.signature.inputs if spec.datatype is DataType.BYTES}
        self._shapes = {name: tuple(details["shape"].tolist()) for name, details in inputs.items()}
        """Shapes of the inputs for which the interpreter has allocated memory."""
        self._interpreter: Interpreter | None = interpreter

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        interpreter = self._interpreter
        if interpreter is None:
            raise Unavailable("the model has been unloaded")
        try:
            self._resize(interpreter, inputs)
            for name, index in self._inputs.items():
                array = inputs[name]
                interpreter.set_tensor(
                    index, _text(array) if name in self._texts else np.require(array, None, ["C", "A"])
                )
            interpreter.invoke()
            return {name: interpreter.get_tensor(index) for name, index in self._outputs.items()}
        except Exception as error:
            raise PenstockError(f"the model failed: {_reason(error)}") from error

    def unload(self) -> None:
        self._interpreter = None

    def _resize(self, interpreter: Interpreter, inputs: Mapping[str, Array]) -> None:
        """Allocate memory again if the shape of an input has changed."""
        shapes = {name: inputs[name].shape for name in self._inputs}
        if shapes == self._shapes:
            return
        self._shapes = {}  # if the allocation fails, the next call repeats it
        for name, index in self._inputs.items():
            interpreter.resize_tensor_input(index, shapes[name])
        interpreter.allocate_tensors()
        self._shapes = shapes


def _tensors(interpreter: Interpreter, signature: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Details of the inputs and the outputs by name, in the model's order."""
    known = list(interpreter.get_signature_list())
    if signature and signature not in known:
        raise InvalidConfig(
            f"the model has no signature '{signature}'", f"its signatures: {', '.join(known) or 'none'}"
        )
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    if not known:
        return {details["name"]: details for details in inputs}, {details["name"]: details for details in outputs}
    runner = interpreter.get_signature_runner(signature or known[0])
    return _in_order(runner.get_input_details(), inputs), _in_order(runner.get_output_details(), outputs)


def _in_order(named: dict[str, dict[str, Any]], graph: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The ``named`` tensors of the signature, in the graph's order. The signature itself orders them by name."""
    places = {details["index"]: place for place, details in enumerate(graph)}
    if any(details["index"] not in places for details in named.values()):
        raise Unsupported(
            "the signature does not run the model's first graph",
            "choose another signature, or convert this one to its own file",
        )
    return dict(sorted(named.items(), key=lambda item: places[item[1]["index"]]))


def _spec(name: str, details: Mapping[str, Any], free_batch: bool) -> TensorSpec:
    datatype = DataType.from_numpy(np.dtype(details["dtype"]))
    signature = details["shape_signature"]
    shape = (signature if len(signature) else details["shape"]).tolist()
    if free_batch and shape:
        shape[0] = -1
    return TensorSpec(name, datatype, tuple(shape))


def _text(array: Array) -> Array:
    encoded = np.empty(array.shape, np.object_)
    encoded.reshape(-1)[:] = [as_bytes(element) for element in array.reshape(-1).tolist()]
    return encoded


def _reason(error: Exception) -> str:
    # LiteRT writes its source file before the reason and the node after it.
    line = (str(error).strip() or type(error).__name__).replace("\n", " ")
    return line[:400]
