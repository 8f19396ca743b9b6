"""Explains why requests to a model are not merged, if its configuration leaves the decision to the server."""

from __future__ import annotations

from penstock.engines.base import RequestModel
from penstock.online.repository.resolved_version import ResolvedVersion
from penstock.online.repository.triton.auto_complete import Model, signature_of
from penstock.rows.proof import HINT, unproven


def unmerged(resolved: ResolvedVersion, model: Model) -> str:
    """The reason, as a sentence, why requests to ``model`` are not merged although its inputs have a batch axis; else empty.

    A configured ``max_batch_size`` is trusted, and so is a configuration in which the batcher creates inputs or states.
    """
    given, signature = resolved.given, signature_of(model, resolved.given)
    is_decided = given.max_batch_size is not None or given.sequence_batching is not None or bool(given.batch_input)
    is_decided |= isinstance(model, RequestModel) or any(one.allow_ragged_batch for one in given.input)
    if is_decided or not signature.batchable or resolved.max_batch == 1:
        return ""
    reason = unproven(resolved.artifact, signature)
    return f"requests to model '{resolved.name}' are not merged: {reason}; {HINT}" if reason else ""
