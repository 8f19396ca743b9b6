"""tf2onnx: writes TensorFlow graphs and TensorFlow Lite files as ONNX, and reports everything that it cannot convert at once.

tf2onnx logs its failures and goes on. ``Trouble`` collects these messages, so that no failure remains unnoticed.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import onnx
import tf2onnx
from tf2onnx import optimizer, tfonnx
from tf2onnx.constants import OPSET_TO_IR_VERSION

from penstock.errors import Unsupported, shortened
from penstock.offline.convert.base import Axis, Link, UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.frameworks import tf2onnx_functions as functions
from penstock.offline.convert.frameworks.tf2onnx_functions import nodes
from penstock.tensor import Array, Signature

VERSION: str = tf2onnx.__version__
_WRITTEN_OPSET: int = max(OPSET_TO_IR_VERSION)
_MAX_OPSET = 21
_CHANGED = {"DFT", "GridSample", "GroupNormalization"}
"""Operators that change their meaning or attributes between the opset that tf2onnx writes and ``_MAX_OPSET``."""
_MIN_OPSET = 13
_KNOWN_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}
_WAY_OUT = "replace it in the model, or define it in a file for --ops with tf2onnx's decorator tf_op"
_LAYOUTS: Mapping[int, list[tuple[int, ...]]] = {3: [(0, 2, 1)], 4: [(0, 3, 1, 2)], 5: [(0, 4, 1, 2, 3)]}
"""The permutations with which tf2onnx moves the channels to the second axis, by rank."""


class Request(NamedTuple):
    """What to convert."""

    renamed: Mapping[str, str]
    """New names of the inputs and outputs, by the names in the source, in order."""
    signature: Signature
    axes: Mapping[str, tuple[Axis, ...]]
    arguments: Mapping[str, Any]
    """Arguments of ``process_tf_graph`` that name the source."""


class Trouble(logging.Handler):
    """Collects what tf2onnx logs while it converts: the operators that it cannot convert, and its warnings."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.operators: list[UnsupportedOperator] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Tensorflow op [%s: %s] is not supported"):
            name, op = record.args  # type: ignore[misc]
            self.operators.append(UnsupportedOperator(str(op), layer_of(str(name)), _WAY_OUT))
        elif str(record.msg).startswith("Failed to convert node"):
            name, _, summary = record.args  # type: ignore[misc]
            reason = shortened(str(record.exc_info[1]), 200) if record.exc_info else ""
            op = str(summary).partition("OP=")[2].split("\n")[0] or "an operator"
            self.operators.append(UnsupportedOperator(op, layer_of(str(name)), f"{_WAY_OUT}; tf2onnx says: {reason}"))

    def __enter__(self) -> Self:
        logger = logging.getLogger("tf2onnx")
        self._before = logger.propagate, logger.level
        logger.propagate, logger.level = False, logging.ERROR
        logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("tf2onnx")
        logger.removeHandler(self)
        logger.propagate, logger.level = self._before


def converted(request: Request, opset: int) -> onnx.ModelProto:
    """The ONNX model, with opset ``opset`` or the newest one that is possible. Raises UnsupportedOperators, Unsupported."""
    if opset < _MIN_OPSET:
        raise Unsupported(f"tf2onnx cannot write opset {opset} reliably", f"use --opset {_MIN_OPSET} or newer")
    with Trouble() as trouble, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorFlow's interpreter, which tf2onnx asks for shapes
        try:
            graph = tfonnx.process_tf_graph(
                opset=min(opset, _WRITTEN_OPSET),
                continue_on_error=True,
                tensors_to_rename=dict(request.renamed),
                custom_op_handlers={name: (_call_function, []) for name in functions.OPERATORS},
                extra_opset=[onnx.helper.make_opsetid(functions.DOMAIN, 1)],
                **request.arguments,
            )
            if not trouble.operators:
                graph = optimizer.optimize_graph(graph, catch_errors=True)
                model = graph.make_model("converted by tf2onnx")
        except Exception as error:
            if not trouble.operators:
                raise Unsupported(
                    f"tf2onnx {VERSION} fails on this model: {shortened(str(error) or type(error).__name__, 300)}",
                    "report the model to the maintainers of tf2onnx, or export it with another opset",
                ) from error
    if trouble.operators:
        raise UnsupportedOperators.of(list(dict.fromkeys(trouble.operators)))
    _quantise_rows(model.graph)
    model = functions.inlined(model)
    if left := list(dict.fromkeys(_unknown(model.graph))):
        raise UnsupportedOperators.of(left)
    _describe(model, request)
    _repair(model.graph)
    _raise_opset(model, min(opset, _MAX_OPSET))
    return model


def write(model: onnx.ModelProto, target: Path) -> None:
    """Write ``model``, with its weights in a second file if it exceeds the size of a protobuf message."""
    large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    onnx.save_model(model, target, save_as_external_data=large, location=f"{target.name}.data" if large else None)


def layer_of(name: str) -> str:
    """The part of a node's name that the user knows: without the calls through which TensorFlow reaches the node."""
    return "/".join(part for part in name.split("/") if part and "PartitionedCall" not in part) or name


def links(
    model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | None]], renamed: Mapping[str, str]
) -> Iterator[Link]:
    """Links of all tensors of the outer graph to the values of the source that have the same name.

    ``shapes`` holds the shapes of the source's values. Where tf2onnx has moved the channels of a tensor, the link's source is the name
    and the permutation, as in ``conv:0@0,3,1,2``; ``relaid`` applies it. A link is left out if the shapes do not tell.
    """
    original = {new: old for old, new in renamed.items()}
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
    found = {info.name: _dims(info) for info in (*inferred.value_info, *inferred.output)}
    fused = dict(_fused(model.graph))
    partial = {*fused.values(), *_partial(model.graph)}
    for node in model.graph.node:
        for tensor in node.output:
            name = original.get(fused.get(tensor, tensor), fused.get(tensor, tensor))
            if tensor in partial or name not in shapes or tensor not in found:
                continue
            layout = _layout(shapes[name], found[tensor])
            if layout is not None:
                source = f"{name}@{','.join(map(str, layout))}" if layout else name
                yield Link(tensor, source, layer_of(name.rpartition(":")[0] or name))


def unlinked(source: str) -> tuple[str, tuple[int, ...]]:
    """The name and the permutation (empty: none) of a link's source."""
    name, _, layout = source.partition("@")
    return name, tuple(map(int, layout.split(","))) if layout else ()


def relaid(value: Array, source: str) -> Array:
    """``value`` with the axes in the order that a link's source states."""
    layout = unlinked(source)[1]
    return np.transpose(value, layout) if len(layout) == value.ndim else value


def _layout(source: Sequence[int | None], tensor: Sequence[int | None]) -> tuple[int, ...] | None:
    """The permutation of the source's axes that gives the tensor's shape; None if it is unclear. Fixed sizes must agree exactly."""
    if len(source) != len(tensor):
        return None
    candidates = [tuple(range(len(source))), *_LAYOUTS.get(len(source), [])]
    fits = [one for one in candidates if all(_agree(source[axis], tensor[at]) for at, axis in enumerate(one))]
    exact = [one for one in fits if all((source[axis] is None) == (tensor[at] is None) for at, axis in enumerate(one))]
    clear = exact or fits
    if len(clear) != 1:
        return None
    return () if clear[0] == candidates[0] else clear[0]


def _fused(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """The activations that tf2onnx has split from an operator of TensorFlow Lite: their tensors, and the operator's before it."""
    for node in graph.node:
        if node.op_type in ("Relu", "Clip", "Tanh") and re.fullmatch(r"(Relu6?|Tanh)__\d+:0", node.output[0]):
            yield node.output[0], node.input[0]


def _partial(graph: onnx.GraphProto) -> Iterator[str]:
    """Tensors that have the name of a result, but are only part of its computation: of ``Rsqrt`` and ``SquaredDifference``."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        reads = readers.get(node.output[0], [])
        if len(reads) == 1 and node.op_type in ("Sqrt", "Sub"):
            is_square = reads[0].op_type == "Mul" and reads[0].input[0] == reads[0].input[1]
            if is_square if node.op_type == "Sub" else reads[0].op_type == "Reciprocal":
                yield node.output[0]


def _agree(left: int | None, right: int | None) -> bool:
    return left is None or right is None or left == right


def _dims(info: onnx.ValueInfoProto) -> list[int | None]:
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in info.type.tensor_type.shape.dim]


def _unknown(graph: onnx.GraphProto) -> Iterator[UnsupportedOperator]:
    """The nodes of ``graph`` and its subgraphs that are no ONNX operators."""
    for node in _nodes(graph):
        if node.domain not in _KNOWN_DOMAINS or (not node.domain and not onnx.defs.has(node.op_type)):
            yield UnsupportedOperator(node.op_type, layer_of(node.name), _WAY_OUT)


def _describe(model: onnx.ModelProto, request: Request) -> None:
    """Put inputs and outputs into the signature's order, and name their free dimensions."""
    for kept, specs in ((model.graph.input, request.signature.inputs), (model.graph.output, request.signature.outputs)):
        by_name = {info.name: info for info in kept}
        infos = [by_name[spec.name] if spec.name in by_name else _absent(spec.name) for spec in specs]
        del kept[:]
        kept.extend(infos)
        for spec, info in zip(specs, kept, strict=True):
            names = {axis.index: axis.name for axis in request.axes.get(spec.name, ())}
            tensor = info.type.tensor_type
            tensor.elem_type = tensor.elem_type or spec.datatype.onnx
            del tensor.shape.dim[:]
            for axis, size in enumerate(spec.shape):
                free = names.get(axis, f"{spec.name}_{axis}")
                tensor.shape.dim.add(**({"dim_param": free} if size < 0 else {"dim_value": size}))


def _call_function(graph: Any, node: Any, name: str, arguments: Any) -> Any:
    """Handler of tf2onnx that turns an operator of TensorFlow into a call of a function."""
    node.domain, node.type = functions.DOMAIN, functions.function_of(node.type, node.attr)
    for one in list(node.attr):
        del node.attr[one]
    return node


def _quantise_rows(graph: onnx.GraphProto) -> None:
    """Quantise the activations of layers with integer weights row by row, as LiteRT does.

    tf2onnx quantises all rows together, quantises even the bias, and leaves out convolutions.
    """
    constants = {one.name for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        quantise = makers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if quantise is not None and quantise.op_type == "DynamicQuantizeLinear":
            name = quantise.input[0]
            del node.input[:]
            node.input.append(name)
            is_bias = name in constants
            node.op_type, node.domain = ("Identity", "") if is_bias else ("QuantisedRows", functions.DOMAIN)
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        is_hybrid = (
            node.op_type == "Conv"
            and _is_dequantised(node.input[1], makers)
            and not _is_dequantised(node.input[0], makers)
        )
        if is_hybrid:
            made = f"{node.output[0]}_quantised"
            kept.append(onnx.helper.make_node("QuantisedImages", [node.input[0]], [made], domain=functions.DOMAIN))
            node.input[0] = made
        if node.op_type != "DynamicQuantizeLinear":
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _is_dequantised(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """True if the tensor comes from integers, except for changes of its layout."""
    while name in makers and makers[name].op_type in ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Pad"):
        name = makers[name].input[0]
    return name in makers and makers[name].op_type == "DequantizeLinear"


def _repair(graph: onnx.GraphProto) -> None:
    """Correct what tf2onnx writes and ONNX Runtime rejects."""
    _fold_wide_integers(graph)
    for node in nodes(graph):
        for attribute in node.attribute:
            if node.op_type == "Loop" and attribute.name == "body":
                for info in attribute.g.input[
                    :2
                ]:  # the number of the iteration and the condition, whose shapes must be known
                    info.type.tensor_type.shape.SetInParent()
    read = {name for node in nodes(graph) for name in node.input} | {one.name for one in graph.output}
    kept = [one for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _fold_wide_integers(graph: onnx.GraphProto) -> None:
    """Replace dequantised constants of 64 bits, the biases of 16-bit models, by floats: DequantizeLinear takes 32 bits at most."""
    constants = {one.name: one for one in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        if node.input[0] not in constants or constants[node.input[0]].data_type != onnx.TensorProto.INT64:
            continue
        values, scale = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[:2])
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        shape = [-1 if one == axis % values.ndim else 1 for one in range(values.ndim)] if scale.ndim else []
        floats = (values.astype(np.float64) * scale.reshape(shape)).astype(np.float32)
        graph.initializer.append(onnx.numpy_helper.from_array(floats, node.output[0]))
        graph.node.remove(node)


def _raise_opset(model: onnx.ModelProto, opset: int) -> None:
    """Declare ``opset`` if all operators keep their meaning in it. Models with 16-bit quantisation are valid only then."""
    if not _CHANGED & {node.op_type for node in _nodes(model.graph)}:
        for one in model.opset_import:
            if one.domain == "":
                one.version = max(one.version, opset)
        model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of ``graph`` and its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _absent(name: str) -> onnx.ValueInfoProto:
    """Declares an input that no node of the model reads; tf2onnx leaves such inputs out."""
    info = onnx.ValueInfoProto(name=name)
    info.type.tensor_type.shape.SetInParent()
    return info
