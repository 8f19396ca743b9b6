"""An instance: one thread that runs one copy of the model, or shares a reentrant one."""

from __future__ import annotations

import logging
import threading

from penstock.engines.base import LoadedModel
from penstock.errors import PenstockError
from penstock.online.scheduler.batch import merge, split
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher, Waiting
from penstock.tensor import Array

_log = logging.getLogger(__name__)


class Instance:
    """Takes the next batch whenever it is free. Of a batch that fails, each request runs again alone, so that what is wrong
    with one client's values is told to that client only."""

    def __init__(self, name: str, model: LoadedModel, batcher: DynamicBatcher) -> None:
        self._model = model
        self._batcher = batcher
        # A daemon, so that a model that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end after ``DynamicBatcher.stop``."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (batch := self._batcher.take()) is not None:
            outcome = self._forward(batch)
            if isinstance(outcome, PenstockError) and len(batch) > 1:
                for waiting in batch:
                    self._batcher.finish([waiting], self._forward([waiting]))
            else:
                self._batcher.finish(batch, outcome)

    def _forward(self, batch: list[Waiting]) -> list[dict[str, Array]] | PenstockError:
        try:
            outputs = self._model.forward(merge([waiting.request.inputs for waiting in batch]))
            return split(outputs, [waiting.rows for waiting in batch]) if self._batcher.config.batchable else [outputs]
        except PenstockError as error:
            return error
        except Exception as error:  # noqa: BLE001 - an engine's bug must not end the thread that others wait for
            _log.exception("instance %s failed", self._thread.name)
            return PenstockError(f"the model failed: {type(error).__name__}")
