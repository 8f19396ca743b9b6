"""Find the single application of a pass that changes a model's outputs, and a minimal model that reproduces the change.

The search is a bisection over the number of applications, as in LLVM's ``-opt-bisect-limit``. With no application, the outputs are
right; with all applications, they are wrong. So there is an application that turns right outputs into wrong outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice

import onnx
import onnx_ir as ir
from onnx import helper

from penstock.errors import PenstockError
from penstock.offline.optimize.base import Pass
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import from_proto, infer_shapes, to_proto
from penstock.offline.optimize.verify import Verifier

_GROWN = 3
"""Maximum number of times that a part of the model is extended by neighbouring nodes to reproduce an error."""
_SHOWN_CHARACTERS = 4000
_SHOWN_ELEMENTS = 16


def first_wrong(count: int, is_wrong: Callable[[int], bool]) -> int:
    """A number, at most ``count``: with this number of applications, the outputs are wrong; with one fewer, they are right."""
    right, wrong = 0, count
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_wrong(middle):
            wrong = middle
        else:
            right = middle
    return wrong


def applied(current: Pass, proto: onnx.ModelProto, skipped: Collection[str], limit: int | None = None) -> ir.Model:
    """The model of ``proto`` after the first ``limit`` applications of a pass."""
    model = from_proto(proto)
    for _ in islice(current.applications(model, skipped), limit):
        pass
    return model


def minimal_model(before: onnx.ModelProto, current: Pass) -> str:
    """The smallest part of ``before``, as ONNX text, on which the pass is wrong; empty if none is found.

    ``before`` must be a model whose outputs the pass changes. The first part contains the nodes that the pass changes; each further
    part adds neighbouring nodes.
    """
    after = to_proto(applied(current, before, ()))
    kept = {node.SerializeToString(deterministic=True) for node in after.graph.node}
    chosen = {
        number
        for number, node in enumerate(before.graph.node)
        if node.SerializeToString(deterministic=True) not in kept
    }
    for _ in range(_GROWN):
        part = _part(before, chosen)
        if part is not None and _shows(part, current):
            return _text(part)
        chosen |= _neighbours(before, chosen)
    return ""


def _shows(part: onnx.ModelProto, current: Pass) -> bool:
    try:
        verifier = Verifier(artifact_of(part))
        changed = to_proto(applied(current, to_proto(infer_shapes(part)), ()))
        return not verifier.obstacle and bool(verifier.check(artifact_of(changed)).failure)
    except PenstockError:
        return False
    except Exception:  # noqa: BLE001 - a pass that raises on the part does not reproduce the wrong outputs
        return False


def _part(model: onnx.ModelProto, chosen: Collection[int]) -> onnx.ModelProto | None:
    """The model of the nodes with these numbers; None if the type of one of its inputs is unknown."""
    graph = model.graph
    types = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    nodes = [graph.node[number] for number in sorted(chosen)]
    written = {name for node in nodes for name in node.output if name}
    read = dict.fromkeys(name for node in nodes for name in _reads(node) if name)
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    constant = {tensor.name for tensor in weights}
    inputs = [name for name in read if name not in written | constant]
    others = {name for number, node in enumerate(graph.node) if number not in chosen for name in _reads(node)}
    others.update(value.name for value in graph.output)
    outputs = sorted(written & others)
    if any(name not in types for name in (*inputs, *outputs)):
        return None
    part = helper.make_graph(
        nodes, "part", [types[name] for name in inputs], [types[name] for name in outputs], weights
    )
    made = helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)
    return made if inputs else None


def _neighbours(model: onnx.ModelProto, chosen: Collection[int]) -> set[int]:
    """The numbers of the nodes that produce inputs of the chosen nodes, or consume their outputs."""
    nodes = [model.graph.node[number] for number in chosen]
    read = {name for node in nodes for name in _reads(node) if name}
    written = {name for node in nodes for name in node.output if name}
    return {
        number
        for number, node in enumerate(model.graph.node)
        if not read.isdisjoint(node.output) or not written.isdisjoint(_reads(node))
    }


def _reads(node: onnx.NodeProto) -> set[str]:
    """The tensors that ``node`` reads, including the nodes in its subgraphs."""
    inner = (inside for attribute in node.attribute for inside in attribute.g.node)
    return set(node.input).union(*map(_reads, inner))


def _text(model: onnx.ModelProto) -> str:
    """``model`` as ONNX text. Large weights are replaced by their shapes."""
    for tensor in model.graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= size
        if count > _SHOWN_ELEMENTS:
            stub = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            tensor.CopyFrom(stub)
    return str(onnx.printer.to_text(model))[:_SHOWN_CHARACTERS]
