"""Replace ``Upsample``, which opset 10 removed, by ``Resize`` with the same coordinates. Some exporters write it with later opsets."""

from __future__ import annotations

import onnx
from onnx import helper

from penstock.offline.convert.repairs.graphs import graphs_of, opset_of, some

_RESIZE = 11


def repair(proto: onnx.ModelProto) -> str:
    if opset_of(proto) < _RESIZE:
        return ""
    replaced = []
    for graph in graphs_of(proto.graph):
        for node in graph.node:
            if node.op_type == "Upsample" and node.domain == "" and len(node.input) == 2:
                node.op_type = "Resize"
                # Opsets 11 and 12 require a region of interest, although nothing reads it here.
                graph.initializer.append(helper.make_tensor(f"{node.output[0]}/roi", onnx.TensorProto.FLOAT, [0], []))
                node.input.insert(1, graph.initializer[-1].name)
                node.attribute.extend(
                    helper.make_attribute(name, value)
                    for name, value in (("coordinate_transformation_mode", "asymmetric"), ("nearest_mode", "floor"))
                )
                replaced.append(node.output[0])
    return f"Upsample was written for an opset without it: {some(replaced)}" if replaced else ""
