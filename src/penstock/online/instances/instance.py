"""An instance: one thread that runs a model. Each instance has its own copy of the model, or shares a reentrant model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from penstock.engines.base import LoadedModel, RequestModel
from penstock.errors import PenstockError
from penstock.online.instances.request_runs import run_requests
from penstock.online.scheduler.base import InstanceDied
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.rate_limiter import ResourceGate
from penstock.telemetry.statistics import BatchTimes, Reason
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class Instance:
    """Takes batches from the scheduler and runs them, one at a time.

    If a batch fails, each of its requests is retried alone, so that only the requests that cause the error fail.
    """

    def __init__(
        self, name: str, model: LoadedModel | RequestModel, source: DynamicBatcher, gate: ResourceGate | None = None
    ) -> None:
        self.model = model
        self._source = source
        self._layout = source.layout
        self._gate = gate
        self._ended: Callable[[Instance], None] | None = None
        self._run_here: Callable[[Batch], None] | None = None
        # A daemon thread, because a model that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, ended: Callable[[Instance], None] | None = None) -> None:
        """Start the thread. The thread calls ``ended`` before it exits, after its last use of the model."""
        self._ended = ended
        model = self.model
        if self._gate is not None:
            self._gate.open()
        elif not isinstance(model, RequestModel) and self._is_predictable(model):
            self._run_here = partial(self._compute, model)
            self._source.may_run_here(self._run_here)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end. Call this after the batcher has been stopped or has dismissed the instance."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        model = self.model
        try:
            # isinstance() of a protocol is slow, so it is called once.
            if isinstance(model, RequestModel):
                while (batch := self._source.take(self._gate)) is not None:
                    run_requests(model, batch, self._source, self._explain)
            else:
                while (batch := self._source.take(self._gate)) is not None:
                    self._compute(model, batch)
        finally:
            self._source.leave(self._run_here)
            if self._gate is not None:
                self._gate.close()
            if self._ended is not None:
                self._ended(self)

    def _compute(self, model: LoadedModel, batch: Batch) -> None:
        if not self._forward(model, batch, retries=len(batch.requests) > 1 and not self._source.config.stateful):
            for pending in batch.requests:
                if pending.done is not None:
                    alone = Batch([pending], pending.rows, Reason.ALONE, time.monotonic_ns())
                    self._forward(model, alone, retries=False)

    def _forward(self, model: LoadedModel, batch: Batch, retries: bool) -> bool:
        """Run ``batch`` and finish it. With ``retries``, do not finish a failed batch whose requests may run again, and return
        False.
        """
        times = BatchTimes(batch.taken_ns, batch.taken_ns, batch.taken_ns, batch.taken_ns)
        outcome: list[dict[str, Array]] | PenstockError
        try:
            inputs = self._layout.gather(batch.requests)
            times.merged_ns = time.monotonic_ns()
            outputs = model.forward(inputs)
            times.ran_ns = time.monotonic_ns()
            outcome = self._layout.scatter(batch.requests, outputs)
            times.split_ns = time.monotonic_ns()
        except Exception as error:  # noqa: BLE001 - an engine's bug must not end the thread
            outcome = self._explain(error)
            if retries and not isinstance(outcome, InstanceDied):
                return False
        self._source.finish(batch, outcome, times)
        return True

    def _explain(self, error: Exception) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        _log.error("instance %s failed", self._thread.name, exc_info=error)
        return PenstockError(f"the model failed: {type(error).__name__}")

    def _is_predictable(self, model: LoadedModel) -> bool:
        """True if all requests that may be merged take the same time per row."""
        if not model.predictable or self._layout.is_ragged:
            return False
        # Without batching, requests of different shapes have the same key.
        return self._source.config.batchable or all(
            size != -1 for spec in model.signature.inputs for size in spec.shape
        )
