"""Explains why the server decided not to merge requests to a model."""

from __future__ import annotations

from penstock.engines.base import RequestModel
from penstock.online.repository.resolved_version import ResolvedVersion
from penstock.online.repository.triton.auto_complete import Model, signature_of
from penstock.rows.proof import advice, unproven


def unmerged(resolved: ResolvedVersion, model: Model) -> str:
    """The reason why requests to ``model`` are not merged although its inputs have a batch axis. Empty if there is no such reason.

    A first dimension of 1 counts as a batch axis, because it is typical of a model that was exported without a free dimension. The
    result is also empty if the configuration sets ``max_batch_size``, or if the batcher creates inputs or states.
    """
    given, signature = resolved.given, signature_of(model, resolved.given)
    is_decided = given.max_batch_size is not None or given.sequence_batching is not None or bool(given.batch_input)
    is_decided |= isinstance(model, RequestModel) or any(one.allow_ragged_batch for one in given.input)
    has_axes = all(spec.shape[:1] in ((-1,), (1,)) for spec in signature.inputs)
    if is_decided or not has_axes or resolved.max_batch == 1:
        return ""
    reason = unproven(resolved.artifact, signature)
    return f"requests to model '{resolved.name}' are not merged: {reason}; {advice(signature)}" if reason else ""
