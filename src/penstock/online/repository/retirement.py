"""Unloads handles that are no longer served, after they have answered all their requests. Removes the files of unused overrides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.handle import Handle
from penstock.online.repository.loading.memory import give_back
from penstock.online.repository.override import discard
from penstock.online.repository.state import ManagedModel, VersionState

_CALM_S = 1.0
_MOST_S = 2.0


class Retirement:
    """The handles that are being unloaded. Used only on the event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._giving: asyncio.TimerHandle | None = None
        self._due = 0.0

    def retire(self, model: ManagedModel, handle: Handle, version: VersionState | None = None) -> None:
        """Unload ``handle`` once it has answered all its requests, then call ``version.end()``."""

        async def retire() -> None:
            await handle.unload()
            self._give_back_soon()
            if version is not None:
                version.end()

        self._later(retire(), model.leaving)

    def clear_up(self, model: ManagedModel) -> None:
        """Remove the files of overrides that no served version uses. This happens after the replaced versions are unloaded."""
        used = {source.folder for source in model.served.values()}
        used |= {Path(model.override.folder)} if model.override else set()
        unused = [one for one in model.overrides if Path(one.folder) not in used]
        model.overrides = [one for one in model.overrides if one not in unused]

        async def clear(leaving: list[asyncio.Task[None]]) -> None:
            await asyncio.gather(*leaving, return_exceptions=True)
            for override in unused:
                await on_daemon_thread("discard", partial(discard, override.folder))

        if unused:
            self._later(clear([*model.leaving]))

    async def finish(self) -> None:
        """Wait for all tasks."""
        await asyncio.gather(*self._tasks)

    def _later(self, work: Coroutine[Any, Any, None], *known_to: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        for tasks in (self._tasks, *known_to):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _give_back_soon(self) -> None:
        """Return freed memory to the system after one second without an unload, or after two seconds at the latest.

        If the memory were returned immediately, the next load would be slower, and threads that allocate memory would have to wait.
        """

        def begin() -> None:
            self._giving = None
            threading.Thread(target=give_back, name="give-back", daemon=True).start()

        loop = asyncio.get_running_loop()
        if self._giving is None:
            self._due = loop.time() + _MOST_S
        else:
            self._giving.cancel()
        self._giving = loop.call_at(min(loop.time() + _CALM_S, self._due), begin)
