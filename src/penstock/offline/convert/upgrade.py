"""Convert an ONNX model to a newer opset with the same results.

``onnx.version_converter`` changes the results of some operators without a warning, and removes local functions:

1. Upsample, and Resize of opset 10, become a Resize with other coordinates.
2. Hardmax of opset 12 works on a matrix, and that of opset 13 along one axis.
3. Local functions disappear, but their calls remain.

Here, 2 and 3 are rewritten before the conversion, and 1 is completed after it. The converter also renames tensors that are not
outputs, and drops the names of nodes; both keep their names here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from onnx import helper, numpy_helper

from penstock.errors import Unsupported
from penstock.offline.convert.repairs.graphs import attribute_of, graphs_of, opset_of, set_nodes
from penstock.offline.optimize.mapped import array_of, is_mapped, with_inputs
from penstock.tensor import Array

_COORDINATES = 11
"""The first opset whose Resize has a choice of coordinates."""
_AXES = 13
_SHAPE = "/shape of hardmax"
_ZERO_LENGTHS = 14
"""The first opset whose Reshape can give an axis the length zero."""


def upgrade(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """``proto`` with the standard operators of ``opset``, or ``proto`` itself if it needs no change. Raises Unsupported."""
    version = opset_of(proto)
    if version >= opset or not version:
        return proto
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)  # 3
    light = onnx.ModelProto()
    light.CopyFrom(with_inputs(proto))
    if version < _AXES <= opset:
        _replace_hardmax(light)  # 2
    outputs = len(light.graph.output)
    shown = {value.name for value in light.graph.output}
    names = dict.fromkeys(name for node in light.graph.node for name in node.output if name and name not in shown)
    light.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        converted = onnx.version_converter.convert_version(light, opset)
    except Exception as error:  # the converter raises RuntimeError, and other exceptions for some operators
        reason = str(error).strip().partition("\n")[0][:200]
        raise Unsupported(
            f"the model cannot be converted from opset {version} to {opset}: {reason}",
            f"keep its opset with --opset {version}, or export it again",
        ) from error
    del converted.graph.output[outputs:]
    if version < _COORDINATES <= opset:
        _complete_resizes(converted)  # 1
    if opset >= _ZERO_LENGTHS:
        _allow_empty(light, converted)
    _keep_names(light, converted)
    _restore_weights(proto, converted)
    return converted


def _replace_hardmax(proto: onnx.ModelProto) -> None:
    for graph in graphs_of(proto.graph):
        set_nodes(
            graph, [one for node in graph.node for one in (_hardmax(node) if _is_standard(node, "Hardmax") else [node])]
        )


def _allow_empty(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Let the Reshapes around a Softmax or Hardmax, which opset 13 needs, restore the shapes of empty tensors."""
    known = {
        name
        for graph in graphs_of(before.graph)
        for node in graph.node
        for name in node.output
        if not name.endswith(_SHAPE)
    }
    for graph in graphs_of(after.graph):
        shapes = {node.output[0] for node in graph.node if node.op_type == "Shape"} - known
        for node in graph.node:
            if node.op_type == "Reshape" and node.input[1] in shapes and attribute_of(node, "allowzero", 0) == 0:
                node.attribute.append(helper.make_attribute("allowzero", 1))


def _is_standard(node: onnx.NodeProto, op_type: str) -> bool:
    return bool(node.op_type == op_type and node.domain in ("", "ai.onnx"))


def _hardmax(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    x, y = node.input[0], node.output[0]
    return [
        helper.make_node("Shape", [x], [y + _SHAPE]),
        helper.make_node("Flatten", [x], [f"{y}/matrix"], axis=attribute_of(node, "axis", 1)),
        helper.make_node("Hardmax", [f"{y}/matrix"], [f"{y}/rows"], node.name, axis=1),
        helper.make_node("Reshape", [f"{y}/rows", y + _SHAPE], [y]),
    ]


def _complete_resizes(converted: onnx.ModelProto) -> None:
    """Give each Resize the coordinates of Upsample and of the first version of Resize.

    ONNX Runtime rounds these coordinates down along a growing axis, and up along a shrinking axis. For both, there are two nodes.
    """
    for graph in graphs_of(converted.graph):
        constants = dict(_constants(graph))
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            nodes += _resizes(node, constants.get(node.input[2])) if _is_standard(node, "Resize") else [node]
        set_nodes(graph, nodes)


def _resizes(node: onnx.NodeProto, scales: Array | None) -> list[onnx.NodeProto]:
    mode = attribute_of(node, "mode", b"nearest").decode()
    shrinks = scales is not None and bool((scales < 1).any())
    if mode == "nearest" and scales is not None and shrinks and (scales > 1).any():
        between, constants = f"{node.output[0]}/enlarged", [f"{node.output[0]}/scales_{number}" for number in (1, 2)]
        parts = [np.maximum(scales, 1), np.minimum(scales, 1)]
        made = [
            helper.make_node("Constant", [], [name], value=numpy_helper.from_array(part.astype(np.float32)))
            for name, part in zip(constants, parts, strict=True)
        ]
        first = _resize(
            [*node.input[:2], constants[0]], between, mode, "floor", f"{node.name}/enlarge" if node.name else ""
        )
        return [*made, first, _resize([between, node.input[1], constants[1]], node.output[0], mode, "ceil", node.name)]
    return [_resize(node.input, node.output[0], mode, "ceil" if shrinks else "floor", node.name)]


def _resize(inputs: Iterable[str], output: str, mode: str, rounding: str, name: str) -> onnx.NodeProto:
    coordinates = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": rounding}
    return helper.make_node("Resize", list(inputs), [output], name, mode=mode, **coordinates)


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, Array]]:
    for tensor in graph.initializer:
        if len(tensor.dims) == 1 and not is_mapped(tensor):
            yield tensor.name, array_of(tensor)
    for node in graph.node:
        for one in node.attribute if node.op_type == "Constant" else ():
            if one.name == "value":
                yield node.output[0], array_of(one.t)


def _keep_names(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Restore the names of the nodes, which the converter drops where it replaces a node."""
    names = {output: node.name for graph in graphs_of(before.graph) for node in graph.node for output in node.output}
    taken = {node.name for graph in graphs_of(after.graph) for node in graph.node}
    for graph in graphs_of(after.graph):
        for node in graph.node:
            name = next((names[output] for output in node.output if names.get(output)), "")
            if not node.name and name not in taken:
                node.name = name


def _restore_weights(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Undo ``with_inputs``: the mapped tensors are initialisers again."""
    mapped = [tensor for tensor in before.graph.initializer if is_mapped(tensor)]
    given = {value.name for value in before.graph.input}
    names = {tensor.name for tensor in mapped} - given
    inputs = [value for value in after.graph.input if value.name not in names]
    del after.graph.input[:]
    after.graph.input.extend(inputs)
    after.graph.initializer.extend(mapped)
