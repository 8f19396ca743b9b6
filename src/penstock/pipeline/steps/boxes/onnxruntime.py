"""ONNX's operator NonMaxSuppression, by ONNX Runtime: the one compiled implementation in FP32 that every installation has."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort

from penstock.protocol.varint import write_field, write_number
from penstock.tensor import Array, DataType

_ABOVE = np.zeros(1, np.float32)
_OUTPUTS = ["kept"]
_INPUTS = dict.fromkeys(("boxes", "scores", "most", "iou", "above"), DataType.FP32) | {"most": DataType.INT64}


def non_max(boxes: Array, scores: Array, iou: float, most: int) -> Array:
    """The positions of the boxes that no better box of their class overlaps by more than ``iou``, at most ``most`` of a class.

    ``scores`` are FP32 of shape [classes, boxes], above 0 where the box is of the class.
    """
    limits = {"most": np.array([most]), "iou": np.array([_rounded_down(iou)], np.float32), "above": _ABOVE}
    found: Array = _session().run(_OUTPUTS, {"boxes": boxes[None], "scores": scores[None], **limits})[0]
    return found[:, 2]


def _rounded_down(iou: float) -> np.float32:
    """The largest FP32 number up to ``iou``: the same FP32 numbers are greater than both, so 0.3 is exact in comparisons."""
    found = np.float32(iou)
    return found if float(found) <= iou else np.nextafter(found, np.float32(-1))


@cache
def _session() -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    return ort.InferenceSession(_model(), options, providers=["CPUExecutionProvider"])


def _model() -> bytes:
    """A ModelProto with one node, written as protobuf, because the package ``onnx`` is not part of an installation for inference."""
    names = [name.encode() for name in _INPUTS]
    node = (
        b"".join(write_field(1, name) for name in names)
        + write_field(2, b"kept")
        + write_field(4, b"NonMaxSuppression")
    )
    types = [write_field(2, write_field(1, write_number(1, datatype.onnx))) for datatype in _INPUTS.values()]
    values = b"".join(write_field(11, write_field(1, name) + type_) for name, type_ in zip(names, types, strict=True))
    graph = write_field(1, node) + write_field(2, b"nms") + values + write_field(12, write_field(1, b"kept"))
    return write_number(1, 8) + write_field(7, graph) + write_field(8, write_number(2, 11))
