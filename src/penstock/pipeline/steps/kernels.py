"""Operators of ONNX in FP32, by ONNX Runtime: the compiled loops that every installation has.

A call costs some 3 µs before it computes anything. Every row of a softmax is computed alone, in one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

import numpy as np
import onnxruntime as ort

from penstock.protocol.varint import write_field, write_number
from penstock.tensor import Array, DataType

_OUTPUT = "found"
_OUTPUTS = [_OUTPUT]
_OPSET = 13
_PROBED = 64 + 16 + 4 + 1
"""A row that kernels for vectors of 4, 8 and 16 numbers compute in every way: in an unrolled loop, in single vectors, and a rest."""

_SUBNORMAL = -95
"""Its exponential is below the normal range of FP32, and above 0 after a division by the length of a row."""


def exp(numbers: Array) -> Array:
    """The exponentials of FP32 numbers, in C order."""
    found: Array = _unary("Exp").run(_OUTPUTS, {"x": numbers})[0]
    return found


def softmax(rows: Array) -> Array:
    """The softmax of FP32 numbers along the last axis, in C order."""
    found: Array = _unary("Softmax").run(_OUTPUTS, {"x": rows})[0]
    return found


@cache
def keep_nan() -> bool:
    """True if ``exp`` and ``softmax`` return NaN where they should, which depends on the instructions of the processor."""
    rows = np.zeros((_PROBED + 1, _PROBED), np.float32)
    np.fill_diagonal(rows, np.nan)
    are_kept = np.array_equal(np.isnan(exp(rows)), np.isnan(rows))
    rows[-1] = -np.inf
    return are_kept and bool(np.isnan(softmax(rows)).all())


@cache
def keep_subnormals() -> bool:
    """True if ``softmax`` computes results below the normal range of FP32. They are 0 on processors without AVX-512."""
    rows = np.zeros((_PROBED, _PROBED), np.float32)
    np.fill_diagonal(rows, _SUBNORMAL)
    return bool(softmax(rows).all())


def non_max(boxes: Array, scores: Array, iou: float, most: int) -> Array:
    """The positions of the boxes that no better box of their class overlaps by more than ``iou``, at most ``most`` of a class.

    ``scores`` are FP32 of shape [classes, boxes], above 0 where the box is of the class. The order of equal scores is undefined.
    """
    found: Array = _non_max(iou, most).run(_OUTPUTS, {"boxes": boxes[None], "scores": scores[None]})[0]
    return found[:, 2]


@lru_cache(maxsize=64)
def _non_max(iou: float, most: int) -> ort.InferenceSession:
    """The limits are constants, because ONNX Runtime takes 2 µs to accept three more inputs."""
    # The same FP32 numbers are greater than ``iou`` and than the largest FP32 number up to it, so 0.3 is exact in comparisons.
    limit = np.float32(iou)
    limit = limit if float(limit) <= iou else np.nextafter(limit, np.float32(-1))
    limits = {"most": np.array(most, np.int64), "iou": np.array(limit), "above": np.zeros((), np.float32)}
    return _session("NonMaxSuppression", ("boxes", "scores"), limits)


@cache
def _unary(operator: str) -> ort.InferenceSession:
    return _session(operator, ("x",), {})


def _session(operator: str, inputs: tuple[str, ...], constants: Mapping[str, Array]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    return ort.InferenceSession(_model(operator, inputs, constants), options, providers=["CPUExecutionProvider"])


def _model(operator: str, inputs: tuple[str, ...], constants: Mapping[str, Array]) -> bytes:
    """A ModelProto with one node, written as protobuf, because the package ``onnx`` is not part of an installation for inference."""
    names = b"".join(write_field(1, name.encode()) for name in (*inputs, *constants))
    node = names + write_field(2, _OUTPUT.encode()) + write_field(4, operator.encode())
    tensors = b"".join(write_field(5, _tensor(name, value)) for name, value in constants.items())
    real = write_field(2, write_field(1, write_number(1, DataType.FP32.onnx)))
    values = b"".join(write_field(11, write_field(1, name.encode()), real) for name in inputs)
    graph = write_field(1, node) + write_field(2, operator.encode()) + tensors + values
    graph += write_field(12, write_field(1, _OUTPUT.encode()))
    return write_number(1, 8) + write_field(7, graph) + write_field(8, write_number(2, _OPSET))


def _tensor(name: str, value: Array) -> bytes:
    """A TensorProto of a number."""
    datatype = write_number(2, DataType.from_numpy(value.dtype).onnx)
    return datatype + write_field(8, name.encode()) + write_field(9, value.tobytes())
