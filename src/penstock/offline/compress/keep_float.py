"""Mark the operators that the user wants to keep in float. ``FloatModel`` and the choice of products do not quantise marked nodes.

The user names operators and tensors of the original model. If the optimiser merged an operator into another, the other is marked.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import onnx

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.qdq_placement import KEPT_FLOAT, LINEAR_OPS
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto


def keep_float(model: Artifact, original: Artifact, patterns: Sequence[str]) -> Artifact:
    """Mark in ``model``, a version of ``original``, the operators whose name or tensors match one of ``patterns`` in ``original``.

    A tensor stands for the operator that computes it or, if it is an input or a constant, for the operators that read it. ``*`` stands
    for any text, ``?`` for one character. Raises InvalidArgument if nothing matches a pattern.
    """
    if not patterns:
        return model
    given, proto = read_proto(original).graph, read_proto(model)
    makers = {name: node for node in proto.graph.node for name in node.output if name}
    names = [_names(node, given) for node in given.node]
    for pattern in patterns:
        found = [
            node for node, own in zip(given.node, names, strict=True) if any(fnmatchcase(name, pattern) for name in own)
        ]
        if not found:
            raise InvalidArgument(
                f"no operator and no tensor of the model matches '{pattern}'",
                _near(pattern, chain.from_iterable(names)),
            )
        for node in found:
            for name in _survivors(node, given, makers):
                maker = makers[name]
                # The outputs of a model that was converted to FP32 are Casts.
                if maker.op_type == "Cast" != node.op_type and maker.input[0] in makers:
                    maker = makers[maker.input[0]]
                maker.doc_string = KEPT_FLOAT
    return model.derive(artifact_of(proto), "keep_float", {"patterns": list(patterns)}, {})


def _names(node: onnx.NodeProto, graph: onnx.GraphProto) -> list[str]:
    """The names that stand for ``node``: its own, those of its outputs, and those of the inputs of the model that it reads."""
    computed = {name for each in graph.node if each.op_type != "Constant" for name in each.output}
    return [name for name in (node.name, *node.output, *(set(node.input) - computed)) if name]


def _survivors(node: onnx.NodeProto, graph: onnx.GraphProto, known: Collection[str]) -> list[str]:
    """The outputs of ``node`` that are ``known``. For an operator that was merged into those after it, their outputs."""
    found, waiting = list[str](), [node]
    while waiting:
        names = [name for name in waiting.pop().output if name]
        found += [name for name in names if name in known]
        lost = {name for name in names if name not in known}
        # A product is never merged into another.
        waiting += [each for each in graph.node if lost.intersection(each.input) and each.op_type not in LINEAR_OPS]
    return found


def _near(pattern: str, names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(pattern.strip("*"), known, n=3) or known[:3]
    return f"names are, for example, {', '.join(near)}; * stands for any text"
