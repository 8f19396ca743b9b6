"""``models`` as TensorFlow Lite files: the same traits, written with the schema that LiteRT ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

import models
from penstock.artifact import Artifact, Format
from penstock.tensor import DataType

_OPERATOR = schema.BuiltinOperator
_TYPES = {
    DataType.BOOL: schema.TensorType.BOOL,
    DataType.UINT8: schema.TensorType.UINT8,
    DataType.UINT16: schema.TensorType.UINT16,
    DataType.UINT32: schema.TensorType.UINT32,
    DataType.UINT64: schema.TensorType.UINT64,
    DataType.INT8: schema.TensorType.INT8,
    DataType.INT16: schema.TensorType.INT16,
    DataType.INT32: schema.TensorType.INT32,
    DataType.INT64: schema.TensorType.INT64,
    DataType.FP16: schema.TensorType.FLOAT16,
    DataType.BF16: schema.TensorType.BFLOAT16,
    DataType.FP32: schema.TensorType.FLOAT32,
    DataType.FP64: schema.TensorType.FLOAT64,
    DataType.BYTES: schema.TensorType.STRING,
}

Node = tuple[int | str, Sequence[str], Sequence[str], tuple[int, object] | None]
"""Operator (a text: a custom one), names of its inputs and outputs, and the type of its options with them."""


def artifact(
    nodes: Sequence[Node],
    inputs: Mapping[str, tuple[DataType, tuple[int, ...]]],
    outputs: Mapping[str, tuple[DataType, tuple[int, ...]]],
    weights: Mapping[str, np.ndarray] | None = None,
    signature: bool = True,
    scales: Mapping[str, tuple[float, int]] | None = None,
    rows: int = 1,
) -> Artifact:
    """A model of ``nodes``; ``scales`` holds scale and zero point of quantised tensors. It is planned for ``rows`` where
    that is free."""
    weights, scales = weights or {}, scales or {}
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.description, model.buffers = 3, "test", [schema.BufferT()]
    model.operatorCodes, model.subgraphs = [], [graph]
    graph.tensors, graph.operators, index = [], [], {}
    held = {name: (DataType.from_numpy(array.dtype), array.shape) for name, array in weights.items()}
    for name, (datatype, shape) in {**inputs, **held, **outputs}.items():
        tensor = schema.TensorT()
        tensor.name, tensor.type, tensor.buffer = name, _TYPES[datatype], 0
        tensor.shape = [rows if dim == -1 else dim for dim in shape]
        tensor.shapeSignature = list(shape) if -1 in shape else None
        if name in weights:
            data = schema.BufferT()
            data.data = np.frombuffer(weights[name].tobytes(), np.uint8)
            tensor.buffer = len(model.buffers)
            model.buffers.append(data)
        if name in scales:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [scales[name][0]], [scales[name][1]]
        index[name] = len(graph.tensors)
        graph.tensors.append(tensor)
    graph.inputs, graph.outputs = [index[name] for name in inputs], [index[name] for name in outputs]
    for operator, into, out, options in nodes:
        graph.operators.append(_operator(model, operator, [index[name] for name in into], options))
        graph.operators[-1].outputs = [index[name] for name in out]
    if signature:
        definition = schema.SignatureDefT()
        definition.signatureKey, definition.subgraphIndex = "serving_default", 0
        definition.inputs = [_entry(name, index[name]) for name in inputs]
        definition.outputs = [_entry(name, index[name]) for name in outputs]
        model.signatureDefs = [definition]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return Artifact.from_bytes(bytes(builder.Output()), Format.TFLITE)


def _operator(model: object, operator: int | str, inputs: list[int], options: tuple[int, object] | None) -> object:
    code = schema.OperatorCodeT()
    code.version = 1
    code.builtinCode = operator if isinstance(operator, int) else _OPERATOR.CUSTOM
    code.deprecatedBuiltinCode = min(code.builtinCode, 127)
    if isinstance(operator, str):
        code.customCode = operator
    made = schema.OperatorT()
    made.opcodeIndex, made.inputs = len(model.operatorCodes), inputs
    model.operatorCodes.append(code)
    if options:
        made.builtinOptionsType, made.builtinOptions = options
    return made


def _entry(name: str, index: int) -> object:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = name, index
    return entry


def identity(datatype: DataType, signature: bool = True) -> Artifact:
    value, shape = (datatype, (-1, 2)), {"shape": np.array([-1, 2], np.int32)}
    return artifact([(_OPERATOR.RESHAPE, ["x", "shape"], ["y"], None)], {"x": value}, {"y": value}, shape, signature)


def linear(rows: int = 3, columns: int = 2, seed: int = 0) -> Artifact:
    options = (schema.BuiltinOptions.FullyConnectedOptions, schema.FullyConnectedOptionsT())
    return artifact(
        [(_OPERATOR.FULLY_CONNECTED, ["x", "w"], ["y"], options)],
        {"x": (DataType.FP32, (-1, rows))},
        {"y": (DataType.FP32, (-1, columns))},
        {"w": np.ascontiguousarray(models.linear_weight(rows, columns, seed).T)},
    )


def fixed_batch() -> Artifact:
    value = (DataType.FP32, (1, 3))
    return artifact([(_OPERATOR.NEG, ["x"], ["y"], None)], {"x": value}, {"y": value})


def dynamic_image() -> Artifact:
    options = schema.ReducerOptionsT()
    options.keepDims = True
    return artifact(
        [(_OPERATOR.MEAN, ["x", "axes"], ["y"], (schema.BuiltinOptions.ReducerOptions, options))],
        {"x": (DataType.FP32, (-1, 2, -1, -1))},
        {"y": (DataType.FP32, (-1, 2, 1, 1))},
        {"axes": np.array([2, 3], np.int32)},
    )


def sum_and_difference() -> Artifact:
    value = (DataType.FP32, (-1, 2))
    return artifact(
        [
            (_OPERATOR.ADD, ["a", "b"], ["sum"], (schema.BuiltinOptions.AddOptions, schema.AddOptionsT())),
            (_OPERATOR.SUB, ["a", "b"], ["difference"], (schema.BuiltinOptions.SubOptions, schema.SubOptionsT())),
        ],
        {"a": value, "b": value},
        {"sum": value, "difference": value},
    )


def input_as_output() -> Artifact:
    value = (DataType.FP32, (-1, 2))
    return artifact([(_OPERATOR.RELU, ["x"], ["y"], None)], {"x": value}, {"y": value, "x": value})


def unread_input() -> Artifact:
    value = (DataType.FP32, (-1, 2))
    return artifact([(_OPERATOR.RELU, ["x"], ["y"], None)], {"x": value, "unread": value}, {"y": value})


def fails_on_odd_batch() -> Artifact:
    return artifact(
        [(_OPERATOR.RESHAPE, ["x", "shape"], ["y"], None)],
        {"x": (DataType.FP32, (-1, 2))},
        {"y": (DataType.FP32, (-1, 4))},
        {"shape": np.array([-1, 4], np.int32)},
        rows=2,
    )


def increment(datatype: DataType) -> Artifact:
    value = (datatype, (-1,))
    options = (schema.BuiltinOptions.AddOptions, schema.AddOptionsT())
    one = {"one": np.array([1], datatype.dtype)}
    return artifact([(_OPERATOR.ADD, ["x", "one"], ["y"], options)], {"x": value}, {"y": value}, one)


def unknown_operator() -> Artifact:
    value = (DataType.FP32, (-1, 2))
    return artifact([("Frobnicate", ["x"], ["y"], None)], {"x": value}, {"y": value})


def quantised() -> Artifact:
    """``y = x + x`` of shape (1, 3) in INT8, of scale 0.5 and zero point 3 in and 1.0 and 0 out."""
    options = (schema.BuiltinOptions.AddOptions, schema.AddOptionsT())
    value = (DataType.INT8, (1, 3))
    scales = {"x": (0.5, 3), "y": (1.0, 0)}
    return artifact([(_OPERATOR.ADD, ["x", "x"], ["y"], options)], {"x": value}, {"y": value}, scales=scales)
