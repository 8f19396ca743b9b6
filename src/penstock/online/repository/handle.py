"""A handle on one served model version: counted, so that unloading waits for whoever still uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.engines.base import LoadedModel
from penstock.online.repository.input_check import InputCheck
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.instance import Instance
from penstock.tensor import Signature


class Handle:
    """What is needed to use a model version. Belongs to the event loop; owns the instances and loaded models.

    ``Repository.acquire`` and ``release`` come in pairs. ``unload`` returns when the last one has been released and the memory
    been given back.
    """

    def __init__(
        self,
        name: str,
        version: str,
        platform: str,
        check: InputCheck,
        scheduler: DynamicBatcher,
        models: Sequence[LoadedModel],
        instances: Sequence[Instance],
    ) -> None:
        self.name = name
        self.version = version
        self.platform = platform
        """Engine and format as the protocol names them, e.g. ``onnxruntime_onnx``."""
        self.check = check
        self.scheduler = scheduler
        self._models = models
        self._instances = instances
        self.users = 0
        """How many hold it; ``Repository.acquire`` counts up, ``release`` down."""
        self._unused = asyncio.Event()

    @property
    def signature(self) -> Signature:
        return self._models[0].signature

    def start(self) -> None:
        """Start the instances."""
        for instance in self._instances:
            instance.start()

    def release(self) -> None:
        """Let go of it."""
        self.users -= 1
        if not self.users:
            self._unused.set()

    async def unload(self) -> None:
        """Wait for all users, end the instances, give the memory back."""
        while self.users:
            self._unused.clear()
            await self._unused.wait()
        await self.scheduler.drain()
        self.scheduler.stop()
        for instance in self._instances:
            await asyncio.get_running_loop().run_in_executor(None, instance.join)
        for model in self._models:
            model.unload()
