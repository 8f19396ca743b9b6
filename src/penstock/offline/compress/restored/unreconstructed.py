"""Undo a reconstruction: put the integers by rounding to nearest back. The result must be the model before the reconstruction."""

from __future__ import annotations

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.errors import WrongResult
from penstock.offline.compress.ptq.qdq_placement import attributes_of
from penstock.offline.compress.restored.unrounded import FIX
from penstock.offline.optimize.mapped import are_equal, array_of
from penstock.offline.optimize.model import read_proto
from penstock.tensor import Array


def unreconstructed(made: onnx.ModelProto, source: Artifact) -> onnx.ModelProto:
    """Put the integer weights of the quantised model ``source`` into ``made``, its reconstructed version.

    Raises WrongResult if an integer differs by more than one step, or is outside the range of the weight's integers in ``source``, in
    which products do not saturate; also if anything else differs.
    """
    unchanged = read_proto(source)
    known = {tensor.name: tensor for tensor in unchanged.graph.initializer}
    tensors = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        is_packed = node.op_type == "MatMulNBits"
        name = node.input[1] if is_packed else node.input[0] if node.op_type == "DequantizeLinear" else ""
        if name not in tensors or name not in known or len(known[name].dims) < 2:
            continue
        halves = is_packed and attributes_of(node)["bits"] == 4
        found, before = (_integers(one, halves) for one in (tensors[name], known[name]))
        if found.shape != before.shape or found.dtype != before.dtype:
            continue
        steps = np.abs(found.astype(np.int64) - before)
        if steps.max(initial=0) > 1 or ((found > before.max(initial=0)) | (found < before.min(initial=0))).any():
            raise WrongResult(f"the integers of weight '{name}' are not those of the weight rounded up or down", FIX)
        tensors[name].CopyFrom(known[name])
    if not are_equal(made, unchanged):
        raise WrongResult("the reconstruction changed more than the integers of weights", FIX)
    return made


def _integers(tensor: onnx.TensorProto, halves: bool) -> Array:
    array = array_of(tensor)
    return np.stack([array & 15, array >> 4], axis=-1) if halves else array
