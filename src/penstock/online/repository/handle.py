"""The handle of a served model version: its scheduler, instances, cache and facts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import cast

from penstock.online.cache.response_cache import ModelCache
from penstock.online.daemon import on_daemon_thread
from penstock.online.instances.instance import Instance
from penstock.online.instances.model_calls import MakeCall
from penstock.online.instances.python.process import PythonProcess, add_up
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.triton.auto_complete import Model
from penstock.online.repository.triton.schema import with_instances
from penstock.online.scheduler.base import Scheduler
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.pipeline.function import Function
from penstock.request import InferRequest
from penstock.telemetry.statistics import ModelStatistics
from penstock.tensor import TensorSpec

_log = logging.getLogger(__name__)

_AMPLIFYING = 4
"""Outputs count as large if they have more bytes than this number times the bytes of the inputs."""


class Handle:
    """Owns the instances and loaded models of a version. Used only on the event loop. ``config`` is the completed configuration.

    A caller that has just looked up a handle may submit to its scheduler within the same event-loop iteration. A caller that submits
    later has to ``hold`` the handle. ``unload`` waits for submitted requests, and for callers that hold the handle.
    """

    def __init__(  # noqa: PLR0913 - the parts of one version, from the assembler
        self,
        version: str,
        config: ModelConfig,
        check: InputCheck,
        scheduler: Scheduler,
        models: Sequence[Model] = (),
        instances: Sequence[Instance] = (),
        *,
        labels: Mapping[str, Sequence[str]] = {},
        identity: str = "",
        cache: ModelCache | None = None,
        make_call: MakeCall | None = None,
        function: Function | None = None,
        parts: Mapping[str, Handle] = {},
    ) -> None:
        """``make_call`` lets Python models call other models. ``parts`` are the models of a pipeline, by name."""
        self.name = config.name
        self.version = version
        self.platform = config.platform
        """The protocol's name for engine and format, e.g. ``onnxruntime_onnx``."""
        self.config = config
        self.check = check
        self.signature = config.client_signature
        """The signature that clients see."""
        self._rows_first = config.batchable
        given, made = (_row_bytes(specs, config.batchable) for specs in (self.signature.inputs, self.signature.outputs))
        self.row_bytes = made if made > _AMPLIFYING * given else 0
        """Bytes of the outputs per row, or per request if requests are not merged. 0 if the outputs are not large compared with
        the inputs. Unknown dimensions count as 1."""
        self.scheduler = scheduler
        self.function = function
        """The function of a pipeline; None for other models."""
        self._parts = parts
        self.cache = cache
        """None if the model's responses are not cached."""
        self.identity = identity
        """Identifies the model's content. Versions with the same identity give equal responses."""
        self.labels = labels
        """The class names, by output."""
        self.decoupled = config.decoupled
        """True if a request may have any number of responses."""
        self.overrides_timeout = any(policy.allow_timeout_override for policy in scheduler.config.policies)
        """True if a request's ``timeout`` limits its time in the queue; False if it is a deadline for the response."""
        self._make_call = make_call
        self._models = list(models)
        self._instances = list(instances)
        self._going = 0
        """Number of instances that have been asked to end but are still running."""
        self._holders = 0
        self._released = asyncio.Event()

    @property
    def statistics(self) -> ModelStatistics:
        statistics = self.scheduler.statistics
        if processes := [model for model in self._models if isinstance(model, PythonProcess)]:
            add_up(statistics, processes)
        return statistics

    @property
    def all_statistics(self) -> list[ModelStatistics]:
        """The statistics of the model, and of the models of a pipeline."""
        return [self.statistics, *(one for part in self._parts.values() for one in part.all_statistics)]

    @property
    def is_healthy(self) -> bool:
        """True if at least one instance can run. For an ensemble, True if all its models can run."""
        if not self._models:
            return bool(getattr(self.scheduler, "is_healthy", True))
        return any(getattr(model, "healthy", True) for model in self._models)

    @property
    def instance_count(self) -> int:
        return len(self._instances) - self._going

    @property
    def first_model(self) -> Model:
        return self._models[0]

    def start(self) -> None:
        """Start the instances."""
        for part in self._parts.values():
            part.start()
        self._begin(self._instances)

    def grow(self, models: Sequence[Model]) -> None:
        """Add an instance for each of ``models``."""
        source, before = cast(DynamicBatcher, self.scheduler), len(self._instances)
        added = [Instance(f"{self.name}-{before + number}", model, source) for number, model in enumerate(models)]
        self._models += models
        self._instances += added
        self._begin(added)
        self._update_count()

    def _begin(self, instances: Sequence[Instance]) -> None:
        loop = asyncio.get_running_loop()

        def left(instance: Instance) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._left, instance)

        for instance in instances:
            if isinstance(instance.model, PythonProcess):
                instance.model.connect(self._make_call)
            instance.start(left)

    def shrink(self, count: int) -> None:
        """End ``count`` instances. Each instance first answers its current batch."""
        for _ in range(count):
            cast(DynamicBatcher, self.scheduler).dismiss()
        self._going += count
        self._update_count()

    def _left(self, instance: Instance) -> None:
        """Remove an instance that has ended, and unload its model unless another instance shares the model."""
        if instance in self._instances and self._going:
            self._going -= 1
            self._instances.remove(instance)
            self._models.remove(instance.model)
            if not any(model is instance.model for model in self._models):
                on_daemon_thread(f"unload-{self.name}", partial(self._drop, instance.model))

    def _update_count(self) -> None:
        cast(DynamicBatcher, self.scheduler).expect(self.instance_count)
        self.config = with_instances(self.config, self.instance_count)

    def amplified_bytes(self, request: InferRequest) -> int:
        """Bytes of the outputs for ``request``, according to the signature. 0 if they are not large compared with the inputs."""
        if not (self.row_bytes and request.inputs):
            return 0
        shape = next(iter(request.inputs.values())).shape
        size = self.row_bytes * (shape[0] if self._rows_first and shape else 1)
        return size if size > _AMPLIFYING * sum(array.nbytes for array in request.inputs.values()) else 0

    def hold(self) -> None:
        """Keep the version loaded until ``release``, so that more requests can be submitted later."""
        self._holders += 1

    def release(self) -> None:
        """Undo one call of ``hold``."""
        self._holders -= 1
        if not self._holders:
            self._released.set()

    async def unload(self) -> None:
        """Answer the submitted requests, end the instances, and unload the models."""
        if self.cache is not None:
            self.cache.forget()
        # Wait for holders first, because a holder may be an ensemble whose request waits in the queue.
        self.scheduler.hurry()
        while self._holders:
            self._released.clear()
            await self._released.wait()
        await self.scheduler.drain()
        self.scheduler.stop()
        for part in self._parts.values():
            await part.unload()
        # Also wait for instances that were asked to end earlier.
        self._going = 0
        # Wait on a daemon thread, because an instance whose model hangs never ends.
        await on_daemon_thread(f"unload-{self.name}", self._end)

    def _end(self) -> None:
        for instance in self._instances:
            instance.join()
        for model in self._models:
            self._drop(model)

    def _drop(self, model: Model) -> None:
        try:
            model.unload()
        except Exception:  # noqa: BLE001 - an engine's bug must not keep the other models in memory
            _log.exception("a model of '%s' version %s could not be unloaded", self.name, self.version)


def _row_bytes(specs: Sequence[TensorSpec], has_rows: bool) -> int:
    return sum(spec.datatype.itemsize * prod(max(size, 1) for size in spec.shape[has_rows:]) for spec in specs)
