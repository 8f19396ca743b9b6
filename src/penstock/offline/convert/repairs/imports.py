"""Repair the list of operator sets: duplicates, the alias ``ai.onnx`` of the standard domain, and used domains that are missing."""

from __future__ import annotations

import onnx
from onnx import helper

from penstock.offline.convert.repairs.graphs import nodes_of

_DEFAULTS = {"": 21, "ai.onnx.ml": 3}


def repair(proto: onnx.ModelProto) -> str:
    imported: dict[str, int] = {}
    for one in proto.opset_import:
        domain = "" if one.domain == "ai.onnx" else one.domain
        imported[domain] = max(imported.get(domain, 0), one.version)
    aliased = 0
    for node in nodes_of(proto):
        if node.domain == "ai.onnx":
            node.domain = ""
            aliased += 1
        imported.setdefault(node.domain, _DEFAULTS.get(node.domain, 1))
    before = [(one.domain, one.version) for one in proto.opset_import]
    if sorted(before) == sorted(imported.items()) and not aliased:
        return ""
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imported.items())
    return f"the operator sets were {before}; they are now {list(imported.items())}"
