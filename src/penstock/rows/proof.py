"""Decides whether requests to a model can be merged, by a proof that each row of its outputs depends on only one row of its inputs.

The proof follows the rows from the first axis of the inputs through every operator. It stops at the first operator that mixes rows,
depends on the number of rows, or has no rule. The proof uses only the graph, so it holds for all values of the inputs.
"""

from __future__ import annotations

import itertools

from penstock.artifact import Artifact, Format
from penstock.rows.facts import Dependent, Fact
from penstock.rows.graph import OnnxModel, OnnxNode, read_graph
from penstock.rows.sizes import BATCH, symbol
from penstock.rows.walk import Walk
from penstock.tensor import Signature

_MAX_OPTIONAL = 4
_MAX_NAME = 80


def unproven(artifact: Artifact, signature: Signature) -> str:
    """Why the rows of a model may depend on each other; empty if the rows are proven to be independent.

    ``signature`` has the inputs that clients send, including inputs with a default value, and the outputs that clients receive.
    """
    if not signature.batchable:
        return _fixed(signature)
    if artifact.format is not Format.ONNX:
        return f"only ONNX models can be examined, not models of format '{artifact.format.value}'"
    try:
        model = read_graph(artifact.data)
    except ValueError as error:
        return f"its graph cannot be read: {error}"
    names = [name for name in signature.input_names if name in model.graph.tensors]
    if len(names) > _MAX_OPTIONAL:
        return f"{len(names)} of its inputs have a default value, but at most {_MAX_OPTIONAL} can be examined"
    choices = (left_out for count in range(len(names) + 1) for left_out in itertools.combinations(names, count))
    return next((reason for left_out in choices if (reason := _reason(model, signature, left_out))), "")


def coupling(artifact: Artifact, signature: Signature) -> str:
    """Why the rows of a call may depend on each other, so that each row needs a call of its own. Empty if they are proven not to,
    or if the batch size is fixed.
    """
    return unproven(artifact, signature) if signature.batchable else ""


def advice(signature: Signature) -> str:
    """Advice to the user of a model whose rows may depend on each other. Batches need a free first dimension."""
    if signature.batchable:
        return "set 'max_batch_size' if its rows are independent"
    return "export the model with a free first dimension to merge its requests"


def _fixed(signature: Signature) -> str:
    for kind, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.shape[:1] != (-1,):
                return f"{kind} {_shown(spec.name)} of the model, {list(spec.shape)}, has no free first dimension"
    return "the model has no inputs"


def _reason(model: OnnxModel, signature: Signature, left_out: tuple[str, ...]) -> str:
    """Like ``unproven``, but for requests that omit the inputs ``left_out``."""
    inputs = {
        spec.name: Fact(
            BATCH if axis == 0 else size if size >= 0 else symbol(f"{spec.name}[{axis}]")
            for axis, size in enumerate(spec.shape)
        )
        for spec in signature.inputs
        if spec.name not in left_out
    }
    try:
        facts = Walk(model).run(inputs, signature.output_names)
    except Dependent as stopped:
        return f"{_place(stopped.node)} {stopped.reason}"
    for name, fact in zip(signature.output_names, facts, strict=True):
        if fact.shape[:1] != (BATCH,):
            return f"output {_shown(name)} does not have one row for each row of the inputs"
    return ""


def _place(node: OnnxNode | None) -> str:
    if node is None:
        return "the graph"
    return f"node {_shown(node.name or next(iter(node.outputs), ''))} ({_shown(node.operator)[1:-1]})"


def _shown(name: str) -> str:
    printable = "".join(each if each.isprintable() else "?" for each in name)
    return f"'{printable if len(printable) <= _MAX_NAME else printable[:_MAX_NAME] + '…'}'"
