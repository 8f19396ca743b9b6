"""Give ``StringNormalizer`` a locale that exists on every Linux. skl2onnx's text features use it, and by default it asks for
``en_US.UTF-8``, without which ONNX Runtime does not load the model.
"""

from __future__ import annotations

import onnx
from onnx import helper

from penstock.offline.convert.repairs.graphs import nodes_of

_LOCALE = "C.UTF-8"
"""Converts the case of all letters, as ``en_US.UTF-8`` does."""


def repair(proto: onnx.ModelProto) -> str:
    count = 0
    for node in nodes_of(proto):
        if node.op_type != "StringNormalizer":
            continue
        kept = [one for one in node.attribute if one.name != "locale" or one.s not in (b"", b"en_US", b"en_US.UTF-8")]
        if any(one.name == "locale" for one in kept):
            continue
        attributes = [*kept, helper.make_attribute("locale", _LOCALE)]
        del node.attribute[:]
        node.attribute.extend(attributes)
        count += 1
    return (
        f"{count} text normaliser(s) needed the locale en_US.UTF-8, which few machines have; now {_LOCALE}"
        if count
        else ""
    )
