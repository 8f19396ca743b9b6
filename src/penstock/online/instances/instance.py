"""An instance: one thread that runs one copy of the model, or shares a reentrant one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from penstock.engines.base import LoadedModel, RequestModel
from penstock.errors import PenstockError
from penstock.online.instances.request_runs import run_requests
from penstock.online.scheduler.base import BatchSource, InstanceDied
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.rate_limiter import Gate
from penstock.telemetry.statistics import BatchTimes, Reason
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class Instance:
    """Takes the next batch whenever it is free. Of a batch that fails, each request runs again alone, so that what is wrong
    with one client's values is told to that client only."""

    def __init__(
        self,
        name: str,
        model: LoadedModel | RequestModel,
        source: BatchSource,
        gate: Gate | None = None,
    ) -> None:
        self.model = model
        self._source = source
        self._layout = source.layout
        self._gate = gate
        self._ended: Callable[[Instance], None] | None = None
        self._run_here: Callable[[Batch], None] | None = None
        # A daemon, so that a model that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, ended: Callable[[Instance], None] | None = None) -> None:
        """``ended`` is called on the instance's thread when it has left and will not use its model again."""
        self._ended = ended
        model = self.model
        if self._gate is not None:
            self._gate.open()
        elif not isinstance(model, RequestModel) and self._is_predictable(model):
            self._run_here = partial(self._compute, model)
            self._source.may_run_here(self._run_here)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end after the source was stopped, or after this one was dismissed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._source.leave(self._run_here)
            if self._gate is not None:
                self._gate.close()
            if self._ended is not None:
                self._ended(self)

    def _work(self) -> None:
        # Asked once: looking through a protocol's members takes longer than all else that is done here for a batch.
        model = self.model
        if isinstance(model, RequestModel):
            while (batch := self._source.take(self._gate)) is not None:
                run_requests(model, batch, self._source, self._explain)
        else:
            while (batch := self._source.take(self._gate)) is not None:
                self._compute(model, batch)

    def _compute(self, model: LoadedModel, batch: Batch) -> None:
        if not self._forward(model, batch, retries=len(batch.requests) > 1 and not self._source.config.stateful):
            for pending in batch.requests:
                if pending.done is not None:
                    alone = Batch([pending], pending.rows, Reason.ALONE, time.monotonic_ns())
                    self._forward(model, alone, retries=False)

    def _forward(self, model: LoadedModel, batch: Batch, retries: bool) -> bool:
        """Run ``batch`` and give it back; with ``retries``, one that failed is kept and False returned, unless the instance died."""
        outcome, times = self._outcome(model, batch)
        if retries and isinstance(outcome, PenstockError) and not isinstance(outcome, InstanceDied):
            return False
        self._source.finish(batch, outcome, times)
        return True

    def _outcome(self, model: LoadedModel, batch: Batch) -> tuple[list[dict[str, Array]] | PenstockError, BatchTimes]:
        """The outputs of each request, or the error of the whole batch."""
        times = BatchTimes(batch.taken_ns, batch.taken_ns, batch.taken_ns, batch.taken_ns)
        requests = batch.requests
        try:
            inputs = self._layout.gather(requests)
            times.merged_ns = time.monotonic_ns()
            outputs = model.forward(inputs)
            times.ran_ns = time.monotonic_ns()
            parts = self._layout.scatter(requests, outputs)
            times.split_ns = time.monotonic_ns()
            return parts, times
        except Exception as error:  # noqa: BLE001 - an engine's bug must not end the thread that others wait for
            return self._explain(error), times

    def _explain(self, error: Exception) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        _log.error("instance %s failed", self._thread.name, exc_info=error)
        return PenstockError(f"the model failed: {type(error).__name__}")

    def _is_predictable(self, model: LoadedModel) -> bool:
        """Whether requests that may be merged take equally long, row by row."""
        if not model.predictable or self._layout.is_ragged:
            return False
        # Requests that are never merged are not told apart by their shapes.
        return self._source.config.batchable or all(
            size != -1 for spec in model.signature.inputs for size in spec.shape
        )
