"""A handle on one served model version: all that is needed to use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.engines.base import LoadedModel, StreamingModel
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.input_check import InputCheck
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.instance import Instance
from penstock.protocol.messages import Message
from penstock.telemetry.statistics import ModelStatistics
from penstock.tensor import Signature

if TYPE_CHECKING:
    from penstock.online.server.cache.response_cache import ModelCache


class Handle:
    """Belongs to the event loop; owns the instances and loaded models. ``config`` is its effective ``ModelConfig``.

    Who found it may submit to its scheduler in the same turn of the loop; ``unload`` waits for what has been submitted.
    """

    def __init__(
        self,
        version: str,
        config: Message,
        check: InputCheck,
        scheduler: DynamicBatcher,
        models: Sequence[LoadedModel | StreamingModel],
        instances: Sequence[Instance],
    ) -> None:
        self.name: str = config.name
        self.version = version
        self.platform: str = config.platform
        """Engine and format as the protocol names them, e.g. ``onnxruntime_onnx``."""
        self.config = config
        self.check = check
        self.scheduler = scheduler
        self.cache: ModelCache | None = None
        """Keeps its answers, where that is switched on."""
        self.labels: Mapping[str, Sequence[str]] = {}
        """What the classes of its outputs are called, by output."""
        self.decoupled = isinstance(models[0], StreamingModel)
        """Whether it gives any number of answers to a request."""
        policies = scheduler.config.policies
        self.overrides_timeout = any(policy.allow_timeout_override for policy in policies)
        """Whether a request's own time-out is the queue's affair, and not a deadline."""
        self._models = models
        self._instances = instances

    @property
    def signature(self) -> Signature:
        return self._models[0].signature

    @property
    def statistics(self) -> ModelStatistics:
        return self.scheduler.statistics

    @property
    def is_healthy(self) -> bool:
        """Whether any instance can run; one that died cannot while it is being started again."""
        return any(getattr(model, "healthy", True) for model in self._models)

    def start(self) -> None:
        """Start the instances."""
        for instance in self._instances:
            instance.start()

    async def unload(self) -> None:
        """Answer what has been submitted, end the instances, give the memory back."""
        if self.cache is not None:
            self.cache.forget()
        await self.scheduler.drain()
        self.scheduler.stop()
        # An instance whose model hangs is never done.
        await on_daemon_thread(f"unload-{self.name}", self._end)

    def _end(self) -> None:
        for instance in self._instances:
            instance.join()
        for model in self._models:
            model.unload()
