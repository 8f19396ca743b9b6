"""Convert models of old opsets, whose DequantizeLinear does not accept one scale per channel."""

from __future__ import annotations

import onnx

from penstock.offline.convert.repairs.graphs import opset_of
from penstock.offline.convert.upgrade import upgrade

_OPSET = 13
"""The first opset whose DequantizeLinear accepts one scale per channel."""

_CONVERTED_OPSET = 14
"""The opset to which older models are converted: the first whose Reshape can give an axis the length zero."""


def at_opset(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert ``proto`` to an opset that supports INT8, with the same results. Raises Unsupported if this is impossible."""
    return upgrade(proto, _CONVERTED_OPSET) if opset_of(proto) < _OPSET else proto
