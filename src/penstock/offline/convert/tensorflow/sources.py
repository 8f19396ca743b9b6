"""Sources of TensorFlow as functions of named tensors: SavedModels, frozen graphs, and functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from penstock.errors import InvalidArgument, InvalidModel, Unsupported, shortened
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.declarations import check_inputs
from penstock.tensor import DataType

_HELPERS = {"Const", "NoOp", "Placeholder", "Assert", "PlaceholderWithDefault"}
"""Operators whose results are no outputs of a graph, even if no operator reads them."""
_VARIABLES = {"VarHandleOp", "VariableV2", "Variable"}


class TensorFlowFunction(NamedTuple):
    """A source as a function of tensors by name."""

    call: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    inputs: tuple[Any, ...]
    """A ``tf.TensorSpec`` for each input, with its name."""
    owner: Any
    """Keeps variables and tables alive."""
    is_graph: bool = False
    """True for a graph of TensorFlow 1, whose loops do not bear the control dependencies that ``tf.function`` adds."""


def reason(error: BaseException) -> str:
    """The line of TensorFlow's message that gives the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t[")] or [type(error).__name__]
    told = [line for line in lines if not line.startswith(("[[", "Detected at node", "Stack trace", "File "))]
    return shortened(told[-1] if told and lines[0].startswith("Graph execution error") else lines[0], 400)


def saved_model(folder: Path, wanted: str = "") -> TensorFlowFunction:
    """The signature ``wanted`` of the SavedModel in ``folder``; if empty, ``serving_default``, or the first signature or function."""
    try:
        loaded = tf.saved_model.load(str(folder))
    except Exception as error:
        raise InvalidModel(f"TensorFlow cannot load the SavedModel: {reason(error)}", "save the model again") from error
    signatures = {name: one for name, one in loaded.signatures.items() if not name.startswith("__")}
    if wanted and wanted not in signatures:
        hint = f"its signatures are {', '.join(signatures)}" if signatures else "it has none; leave out --signature"
        raise InvalidArgument(f"the SavedModel has no signature '{wanted}'", hint)
    if signatures:
        chosen = signatures.get(wanted or "serving_default") or next(iter(signatures.values()))
        specs = chosen.structured_input_signature[1]
        return TensorFlowFunction(lambda given: chosen(**given), tuple(specs[name] for name in sorted(specs)), loaded)
    for name in ("serve", "__call__"):
        concrete = getattr(getattr(loaded, name, None), "concrete_functions", ())
        if concrete:
            return of_concrete(concrete[0], loaded)
    raise Unsupported(
        "the SavedModel has no signature and no function",
        "save it with tf.saved_model.save(model, folder, signatures=...)",
    )


def of_concrete(function: Any, owner: Any) -> TensorFlowFunction:
    """A concrete function; its inputs are the tensors of its structured arguments."""
    structure = function.structured_input_signature
    flat = tf.nest.flatten(structure)
    specs = [spec for spec in flat if isinstance(spec, tf.TensorSpec)]
    names = [spec.name or f"input_{index}" for index, spec in enumerate(specs)]

    def call(given: Mapping[str, Any]) -> Mapping[str, Any]:
        tensors = iter([given[name] for name in names])
        filled = [next(tensors) if isinstance(one, tf.TensorSpec) else one for one in flat]
        positional, named = tf.nest.pack_sequence_as(structure, filled)
        return outputs_by_name(function(*positional, **named))

    return TensorFlowFunction(
        call, tuple(tf.TensorSpec(s.shape, s.dtype, n) for s, n in zip(specs, names, strict=True)), owner
    )


def of_callable(function: Any, options: ConvertOptions) -> TensorFlowFunction:
    """A function or module of the user: with its input signature if it has one, otherwise with the declared inputs."""
    if hasattr(function, "structured_input_signature"):
        return of_concrete(function, function)
    is_plain = inspect.isroutine(function) or hasattr(function, "get_concrete_function")
    called = function if is_plain else type(function).__call__.__get__(function)
    if getattr(called, "input_signature", None):
        return of_concrete(called.get_concrete_function(), function)
    python = getattr(called, "python_function", called)
    return by_declaration(called, python, options, "N,...", function)


def by_declaration(
    call: Callable[..., Any], python: Callable[..., Any], options: ConvertOptions, example: str, owner: Any
) -> TensorFlowFunction:
    """A function with the inputs that the user declares. They are arguments of these names, or else one positional argument."""
    parameters = list(inspect.signature(python).parameters)
    if not options.inputs and not options.sample:
        name = next((one for one in parameters if one != "self"), "x")
        raise InvalidArgument(
            "the model does not tell its inputs",
            f'declare each input, as in --inputs "{name}:float32[{example}]", or give --sample',
        )
    specs = [tf.TensorSpec(None, _dtype(one.datatype), one.name) for one in options.inputs] or [
        tf.TensorSpec(None, _dtype(DataType.from_numpy(array.dtype)), name) for name, array in options.sample.items()
    ]
    names = [spec.name for spec in specs]

    def called(given: Mapping[str, Any]) -> Mapping[str, Any]:
        if all(name in parameters for name in names):
            return outputs_by_name(call(**given))
        return outputs_by_name(call(given[names[0]] if len(names) == 1 else dict(given)))

    return TensorFlowFunction(called, tuple(specs), owner)


def _dtype(datatype: DataType | None) -> Any:
    if datatype is DataType.BYTES:
        return tf.string
    return tf.as_dtype((datatype or DataType.FP32).dtype)


def graph_def(path: Path, options: ConvertOptions) -> TensorFlowFunction:
    """A frozen graph. Its inputs are its placeholders, and its outputs are the tensors that no operator reads."""
    graph = tf.compat.v1.GraphDef()
    try:
        graph.ParseFromString(path.read_bytes())
    except (DecodeError, RuntimeWarning) as error:
        raise InvalidModel(
            f"'{path.name}' is not a TensorFlow graph", "give a GraphDef in binary form (.pb)"
        ) from error
    if not graph.node:
        raise InvalidModel(f"the graph in '{path.name}' has no operators", "save the graph again")
    variables = [node.name for node in graph.node if node.op in _VARIABLES]
    if variables:
        raise InvalidModel(
            f"the graph is not frozen: it has {len(variables)} variables, such as '{variables[0]}'",
            "freeze it with tf.compat.v1.graph_util.convert_variables_to_constants, or give the SavedModel",
        )
    try:
        with tf.Graph().as_default() as loaded:
            tf.import_graph_def(graph, name="")
    except Exception as error:
        raise InvalidModel(f"TensorFlow cannot load the graph: {reason(error)}", "save the graph again") from error
    inputs = [op.outputs[0] for op in loaded.get_operations() if op.type.startswith("Placeholder") and not op.inputs]
    outputs = _fetches(loaded, options.outputs)

    def call(given: Mapping[str, Any]) -> Mapping[str, Any]:
        fed = {f"{name}:0": tensor for name, tensor in given.items()}
        found = tf.import_graph_def(
            graph, input_map=fed, return_elements=[one.name for one in outputs.values()], name=""
        )
        return dict(zip(outputs, found, strict=True))

    return TensorFlowFunction(
        call, tuple(tf.TensorSpec(one.shape, one.dtype, one.op.name) for one in inputs), None, True
    )


def _fetches(graph: Any, wanted: Sequence[str]) -> dict[str, Any]:
    if wanted:
        try:
            return {name: graph.get_tensor_by_name(name if ":" in name else f"{name}:0") for name in wanted}
        except (KeyError, ValueError) as error:
            raise InvalidArgument(
                f"the graph has no tensor of this name: {reason(error)}", "check --outputs"
            ) from error
    read = {tensor.name for op in graph.get_operations() for tensor in op.inputs}
    ends = [
        op for op in graph.get_operations() if op.type not in _HELPERS and graph.is_fetchable(op) and not _is_switch(op)
    ]
    found = {
        op.name if not index else f"{op.name}_{index}": tensor
        for op in ends
        if not any(tensor.name in read for tensor in op.outputs)
        for index, tensor in enumerate(op.outputs)
        if tensor.dtype != tf.resource
    }
    if not found:
        raise InvalidModel("the graph has no output: an operator reads every tensor", "name the outputs with --outputs")
    return found


def _is_switch(op: Any) -> bool:
    """True for a part of the control flow of TensorFlow 1, whose results are no outputs of the graph."""
    return op.type in ("Switch", "Exit") or (op.type == "Identity" and op.inputs[0].op.type == "Switch")


def outputs_by_name(structure: Any) -> dict[str, Any]:
    """The tensors of a result: its keys, or ``output_0`` and so on; the keys of nested results are joined."""
    if isinstance(structure, Mapping):
        items = [(str(key), value) for key, value in structure.items()]
    elif isinstance(structure, list | tuple):
        items = [(f"output_{index}", value) for index, value in enumerate(structure)]
    else:
        return {"output_0": structure}
    found: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, Mapping | list | tuple):
            found |= {f"{name}_{inner}": one for inner, one in outputs_by_name(value).items()}
        else:
            found[name] = value
    return found


def declared(specs: Sequence[Any], options: ConvertOptions) -> tuple[Any, ...]:
    """``specs`` with the types and sizes that the user declares. Raises InvalidArgument if they contradict the source."""
    given = {one.name: one for one in options.inputs}
    check_inputs(options, [spec.name for spec in specs])
    return tuple(_narrowed(spec, given.get(spec.name), options) for spec in specs)


def _narrowed(spec: Any, given: InputSpec | None, options: ConvertOptions) -> Any:
    name, free = spec.name, options.dynamic.get(spec.name, {})
    declared_shape = given.shape if given is not None else None
    if declared_shape is None and spec.shape.rank is None and name in options.sample:
        declared_shape = tuple(free.get(axis, size) for axis, size in enumerate(options.sample[name].shape))
    shape = tf.TensorShape(
        spec.shape if declared_shape is None else [size if isinstance(size, int) else None for size in declared_shape]
    )
    hint = f'give --inputs "{name}:{spec.dtype.name}[...]" with sizes; a name stands for a free dimension'
    if shape.rank is None:
        raise InvalidArgument(f"the rank of the input '{name}' is unknown", hint)
    if not spec.shape.is_compatible_with(shape):
        raise InvalidArgument(
            f"the input '{name}' has the shape {spec.shape} in the model, but {shape} was declared", hint
        )
    shape = shape.merge_with(spec.shape)
    if given is not None and given.datatype not in (None, datatype_of(spec)):
        raise InvalidArgument(
            f"the input '{name}' has the type {spec.dtype.name} in the model, not {given.datatype.value}", hint
        )
    fixed = [axis for axis in free if not -shape.rank <= axis < shape.rank or shape[axis] is not None]
    if fixed:
        raise InvalidArgument(
            f"dimension {fixed[0]} of the input '{name}' cannot be free: its shape is {shape}",
            "leave it out of --dynamic",
        )
    return tf.TensorSpec(shape, spec.dtype, name)


def datatype_of(spec: Any) -> DataType:
    if spec.dtype == tf.string:
        return DataType.BYTES
    return DataType.from_numpy(np.dtype(spec.dtype.as_numpy_dtype))
