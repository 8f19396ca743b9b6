"""Correct the declared types and shapes of tensors. Tools that edit graphs often leave old ones, which then contradict the nodes."""

from __future__ import annotations

import onnx

from penstock.offline.convert.repairs.graphs import some


def repair(proto: onnx.ModelProto) -> str:
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.ClearField("type")
    try:
        inferred = onnx.shape_inference.infer_shapes(bare).graph
    except Exception:  # noqa: BLE001 - an invalid graph, which the checker explains
        return ""
    types = {value.name: value.type for value in (*inferred.value_info, *inferred.output)}
    stale = [one.name for one in proto.graph.value_info if _differs(one.type, types.get(one.name))]
    kept = [one for one in proto.graph.value_info if one.name not in stale]
    copies = [onnx.ValueInfoProto.FromString(one.SerializeToString()) for one in kept]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(copies)
    for value in proto.graph.output:
        found = types.get(value.name)
        if found is not None and found.WhichOneof("value") and _differs(value.type, found):
            value.type.CopyFrom(found)
            stale.append(value.name)
    return f"declared types or shapes contradicted the nodes: {some(stale)}" if stale else ""


def _differs(declared: onnx.TypeProto, found: onnx.TypeProto | None) -> bool:
    """True if ``declared`` is empty or contradicts ``found``, as far as both are known."""
    if not declared.WhichOneof("value"):
        return True
    if found is None or found.WhichOneof("value") != "tensor_type" or declared.WhichOneof("value") != "tensor_type":
        return False
    one, other = declared.tensor_type, found.tensor_type
    if one.elem_type != other.elem_type:
        return True
    if not one.HasField("shape") or not other.HasField("shape"):
        return other.HasField("shape") and not one.HasField("shape")
    pairs = list(zip(one.shape.dim, other.shape.dim, strict=False))
    fixed = [(a.dim_value, b.dim_value) for a, b in pairs if a.HasField("dim_value") and b.HasField("dim_value")]
    return len(one.shape.dim) != len(other.shape.dim) or any(a != b for a, b in fixed)
