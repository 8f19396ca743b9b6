"""Replace GroupNormalization of opset 18, which has one scale for each group. ``onnx.checker`` rejects it, and the converter of
versions leaves it as it is, although that of opset 21 has one scale for each channel.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.offline.convert.repairs.graphs import attribute_of, opset_of, replace_nodes, some

_CHANNELS = 21


def repair(proto: onnx.ModelProto) -> str:
    if opset_of(proto) >= _CHANNELS:
        return ""
    replaced = replace_nodes(proto, "GroupNormalization", 3, _replacement)
    return f"GroupNormalization of opset 18 is deprecated: {some(replaced)}" if replaced else ""


def _replacement(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    (x, scale, bias), y = node.input, node.output[0]
    shape = numpy_helper.from_array(np.array([0, attribute_of(node, "num_groups", 1), -1], np.int64))
    epsilon = attribute_of(node, "epsilon", 1e-5)
    return [
        helper.make_node("Shape", [x], [f"{y}/shape"]),
        helper.make_node("Constant", [], [f"{y}/groups"], value=shape),
        helper.make_node("Reshape", [x, f"{y}/groups"], [f"{y}/grouped"]),
        helper.make_node(
            "InstanceNormalization", [f"{y}/grouped", scale, bias], [f"{y}/rows"], node.name, epsilon=epsilon
        ),
        helper.make_node("Reshape", [f"{y}/rows", f"{y}/shape"], [y]),
    ]
