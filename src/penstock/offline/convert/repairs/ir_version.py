"""Repair the version of the format: exporters with a newer ``onnx`` write one that ONNX Runtime refuses, and some write none."""

from __future__ import annotations

import onnx

_NEWEST = 13
"""The newest version that the supported releases of ONNX Runtime read."""


def repair(proto: onnx.ModelProto) -> str:
    before = proto.ir_version
    if 0 < before <= _NEWEST:
        return ""
    # Versions above 10 added types of tensors and annotations for several devices. ONNX Runtime rejects a model that uses them.
    proto.ir_version = (
        _NEWEST if before else onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    )
    return f"the IR version was {before}; it is now {proto.ir_version}"
