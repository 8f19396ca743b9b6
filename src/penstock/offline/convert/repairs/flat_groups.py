"""Replace GroupNormalization of opset 21. ONNX Runtime computes its variance as a difference of sums, which rounding can make
negative: a blank image then gives NaN. The replacement normalises the groups with LayerNormalization, which has no such difference.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.offline.convert.repairs.graphs import attribute_of, opset_of, replace_nodes, some

_CHANNELS = 21
_ALL = -1


def repair(proto: onnx.ModelProto) -> str:
    if opset_of(proto) < _CHANNELS:
        return ""
    replaced = replace_nodes(proto, "GroupNormalization", 3, _replacement)
    return f"GroupNormalization gives NaN for a blank image in ONNX Runtime: {some(replaced)}" if replaced else ""


def _replacement(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    (x, scale, bias), y = node.input, node.output[0]
    made: list[onnx.NodeProto] = []

    def add(operator: str, inputs: list[str], part: str, **attributes: object) -> str:
        made.append(helper.make_node(operator, inputs, [f"{y}/{part}"], f"{node.name or y}/{part}", **attributes))
        return f"{y}/{part}"

    def constant(part: str, *numbers: int) -> str:
        return add("Constant", [], part, value=numpy_helper.from_array(np.array(numbers, np.int64)))

    groups = constant("groups", 0, attribute_of(node, "num_groups", 1), _ALL)
    grouped = add("Reshape", [x, groups], "grouped")
    size = add("Shape", [grouped], "size", start=2)
    ones = add("ConstantOfShape", [size], "ones", value=numpy_helper.from_array(np.ones(1, np.float32)))
    normal = add(
        "LayerNormalization",
        [grouped, add("CastLike", [ones, x], "weights")],
        "normal",
        axis=-1,
        epsilon=attribute_of(node, "epsilon", 1e-5),
    )
    start, end = constant("copied", 0), constant("spread", _ALL)
    channels = add("Concat", [start, add("Shape", [scale], "channels"), end], "rows", axis=0)
    rows = add("Reshape", [normal, channels], "by_channel")
    last = constant("last", 1)
    scaled = add("Mul", [rows, add("Unsqueeze", [scale, last], "scale")], "scaled")
    shifted = add("Add", [scaled, add("Unsqueeze", [bias, last], "bias")], "shifted")
    made.append(helper.make_node("Reshape", [shifted, add("Shape", [x], "shape")], [y], node.name))
    return made
