from __future__ import annotations

import asyncio
from collections import Counter

from handles import make_handle
from penstock.testing import FakeModel


class Slow(FakeModel):
    """Its ``unload`` returns when the event loop has done what it had to do."""

    def __init__(self, loop: asyncio.AbstractEventLoop, unloaded: Counter[Slow]) -> None:
        super().__init__()
        self._loop, self._unloaded = loop, unloaded

    def unload(self) -> None:
        self._unloaded[self] += 1
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
        super().unload()


def test_unloading_while_an_instance_leaves_unloads_each_model_once() -> None:
    async def main() -> None:
        unloaded: Counter[Slow] = Counter()
        models = [Slow(asyncio.get_running_loop(), unloaded) for _ in range(4)]
        handle = make_handle(models[0])
        handle.start()
        handle.grow(models[1:])
        handle.shrink(4)
        for instance in tuple(handle._instances):
            instance.join(30)  # so that the event loop is told while the models are unloaded
        await handle.unload()
        assert unloaded == dict.fromkeys(models, 1)

    asyncio.run(main())
