"""Runs warm-up requests on a loaded model, with the layout, controls and states that its scheduler would use."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from penstock.engines.base import RequestModel
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.scheduling import layout_of, sequencing
from penstock.online.repository.resolved_version import ResolvedVersion
from penstock.online.repository.triton.auto_complete import Model, signature_of
from penstock.online.scheduler.layout import BatchLayout
from penstock.online.scheduler.queue import Pending
from penstock.online.scheduler.sequences.implicit_state import ImplicitStates
from penstock.online.scheduler.sequences.layout import SequenceLayout
from penstock.online.scheduler.sequences.slots import Sequence as StepsOfOne
from penstock.online.scheduler.sequences.slots import SequenceStep
from penstock.request import InferRequest
from penstock.tensor import Array

_MAX_ROWS = 1 << 16
_PATIENCE_S = 300.0
"""Maximum seconds in which a decoupled model must complete its responses to one batch."""


class Runner:
    """Runs requests on ``model`` and on the models of the other instances of ``resolved``. ``config`` is the completed configuration.

    Raises the same errors as ``layout_of`` and ``sequencing``. All methods block, and must be called on the same thread.
    """

    def __init__(self, config: ModelConfig, model: Model, resolved: ResolvedVersion) -> None:
        facts = () if isinstance(model, RequestModel) else (model.optional_inputs, model.unranked)
        self._check = InputCheck(config, max(config.max_rows, _MAX_ROWS), *facts)
        signature = signature_of(model, resolved.given)
        self._made = set(signature.input_names) - {tensor.name for tensor in config.input}
        self._merges = config.batchable and not config.decoupled
        self._layout: BatchLayout = layout_of(config)
        self._is_sequential = config.sequence_batching is not None
        if self._is_sequential:
            merges = not isinstance(model, RequestModel)
            wanted = sequencing(config, signature, resolved.source.folder, 1, merges=merges)
            states = ImplicitStates(wanted.states, config.batchable)
            self._layout = SequenceLayout(self._layout, False, wanted.controls, states, frozenset())

    def run(self, model: Model, request: InferRequest, count: int = 1) -> None:
        """Run ``count`` copies of ``request``, merged if possible. Adds the inputs that the server creates.

        Each copy is the first request of its own sequence. Raises PenstockError if a request does not fit the model, or the model
        rejects it.
        """
        batch = [self._pending(request, number) for number in range(1, count + 1)]
        is_merged = self._merges and not isinstance(model, RequestModel)
        given = [dict(self._layout.gather(part)) for part in ([batch] if is_merged else [[one] for one in batch])]
        if isinstance(model, RequestModel):
            requests = [msgspec.structs.replace(one.request, inputs=i) for one, i in zip(batch, given, strict=True)]
            for part in [[one] for one in requests] if model.decoupled else [requests]:
                _execute(model, part)
            return
        for inputs in given:
            model.forward(inputs)

    def cancel(self, pending: Pending) -> None:
        """Do nothing: no client waits for a response."""

    def _pending(self, like: InferRequest, number: int) -> Pending:
        inputs = {name: array for name, array in like.inputs.items() if name not in self._made}
        request = msgspec.structs.replace(like, inputs=inputs)
        rows, key = self._check(request)
        if self._is_sequential:
            request.sequence_id, request.sequence_start = number, True
            request.step = SequenceStep(
                lambda _: None, StepsOfOne(number), request, key, None, 0, start=True, end=False
            )
        return Pending(self, number, request, rows, key, None, 0)


def _execute(model: RequestModel, requests: Sequence[InferRequest]) -> None:
    """Return when the last response to each of ``requests`` has arrived."""
    ended, errors = threading.Semaphore(0), list[PenstockError]()

    def answer(_: int, outcome: dict[str, Array] | PenstockError | None, final: bool) -> bool:
        if isinstance(outcome, PenstockError):
            errors.append(outcome)
        if final or isinstance(outcome, PenstockError):
            ended.release()
        return True

    model.execute(requests, answer)
    for _ in requests:
        if not ended.acquire(timeout=_PATIENCE_S if model.decoupled else 0):
            raise DeadlineExceeded(
                "the model did not complete its responses" if model.decoupled else "the model returned no response"
            )
    if errors:
        raise errors[0]
