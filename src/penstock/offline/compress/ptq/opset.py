"""Convert models of old opsets, whose DequantizeLinear does not accept one scale per channel.

``onnx.version_converter`` changes the results of some operators. This module corrects such operators, or rejects the model.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx.version_converter

from penstock.errors import Unsupported
from penstock.offline.optimize.mapped import array_of
from penstock.tensor import Array

_OPSET = 13
"""The first opset whose DequantizeLinear accepts one scale per channel."""

_CONVERTED_OPSET = 14
"""The opset to which older models are converted: the first whose Reshape can give an axis the length zero."""

_COORDINATES_OPSET = 11
"""The first opset whose Resize has a choice of coordinates."""


def at_opset(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert ``proto`` to an opset that supports INT8, with the same results. Raises Unsupported if this is impossible."""
    version = next((opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), _OPSET)
    if version >= _OPSET:
        return proto
    if any(node.op_type == "Hardmax" for node in _nodes(proto.graph)):
        # Since opset 13, Hardmax works along one axis, but the converter leaves it unchanged.
        raise _too_old(version, "the converter changes the results of Hardmax")
    try:
        converted = onnx.version_converter.convert_version(proto, _CONVERTED_OPSET)
    except Exception as error:  # the converter raises RuntimeError, and other exceptions for some operators
        raise _too_old(version, "cannot be converted") from error
    _allow_empty(converted, proto)
    if version < _COORDINATES_OPSET:
        constants = _constants(converted.graph)
        for node in _nodes(converted.graph):
            if node.op_type == "Resize" and not _keep_coordinates(node, constants.get(node.input[2])):
                raise _too_old(version, "the converter changes the results of a Resize that enlarges and shrinks")
    return converted


def _too_old(version: int, why: str) -> Unsupported:
    return Unsupported(
        f"the model has opset {version}, which is too old for INT8, and {why}",
        f"export it with opset {_OPSET} or later",
    )


def _allow_empty(converted: onnx.ModelProto, proto: onnx.ModelProto) -> None:
    """Let the Reshapes that the converter inserted around a Softmax restore the shapes of empty tensors."""
    known = {name for node in proto.graph.node for name in node.output}
    shapes = {node.output[0] for node in converted.graph.node if node.op_type == "Shape"} - known
    for node in converted.graph.node:
        if node.op_type == "Reshape" and node.input[1] in shapes:
            node.attribute.append(onnx.helper.make_attribute("allowzero", 1))


def _keep_coordinates(node: onnx.NodeProto, scales: Array | None) -> bool:
    """Give a Resize the coordinates of Upsample and of the first version of Resize. The converter omits these coordinates.

    ONNX Runtime rounds these coordinates down along a growing axis, and up along a shrinking axis. Returns False if both occur.
    """
    shrinks = scales is not None and bool((scales < 1).any())
    node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
    node.attribute.append(onnx.helper.make_attribute("nearest_mode", "ceil" if shrinks else "floor"))
    return scales is None or not shrinks or not (scales > 1).any()


def _constants(graph: onnx.GraphProto) -> dict[str, Array]:
    found = {one.name: array_of(one) for one in graph.initializer if len(one.dims) == 1}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value":
                found[node.output[0]] = array_of(attribute.t)
    return found


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of ``graph`` and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
