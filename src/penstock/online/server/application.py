"""One server process from start to end: listen, load, serve, drain.

Starting: listen → load and warm up → ready. The server listens first, so that a port in use is found immediately and health checks
work. Stopping: not ready → a short wait → no new connections → answer requests in flight → unload.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from penstock.errors import DeadlineExceeded, InvalidModel, PenstockError
from penstock.online.cache.response_cache import ResponseCache
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.layout import Layout, absent
from penstock.online.repository.manager import LoadFailed, Manager
from penstock.online.repository.override import Override
from penstock.online.repository.served import ServedModels
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.endpoints import Addresses, Endpoints
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.loop_errors import LoopErrors
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.processes.supervisor import GroupMember
from penstock.online.server.recording.recording import Recording
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.resources import core_ids

_log = logging.getLogger(__name__)

_UNLOAD_S = 1.0
_DECODERS = 1
"""Number of threads that decode and encode large messages. Such a thread holds the interpreter lock most of the time. A second
thread would hardly speed up the work, and the event loop would have to wait for both."""


class Ready(Addresses, frozen=True):
    """The addresses of a server that is ready, and the models that it serves."""

    models: list[str] = []


def models_at_start(config: ServerConfig, layout: Layout) -> list[str]:
    """The models to load at start-up. Raises NotFound for a missing repository and, with ``exit_on_error``, a missing model."""
    known = layout.models()
    if config.model_control_mode != "explicit" or "*" in config.load_models:
        return list(known)
    for name in config.load_models if config.exit_on_error else ():
        if name not in known:
            raise absent(name, known)
    return [*layout.targets, *config.load_models]


@dataclass(eq=False)
class Application:
    """Runs one server process. Used only on the event loop."""

    config: ServerConfig
    layout: Layout
    member: GroupMember | None
    """The position of this process in its group; None if this is the only process."""
    repository: ServedModels
    manager: Manager
    dataplane: DataPlane
    control: ControlPlane
    endpoints: Endpoints
    group: ProcessGroup
    recording: Recording
    metrics: MetricsPage
    shared_memory: SharedMemory
    cache: ResponseCache | None
    _stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _is_orphan: bool = field(init=False, default=False)

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Serve until a signal arrives; see ``serve``."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        loop.set_default_executor(ThreadPoolExecutor(_DECODERS, "decode"))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self.control.inherit()
        self.recording.start()
        if self.member is None or (self.member.index == 0 and not self.member.is_replacement):
            for warning in self.config.warnings():
                _log.warning("%s", warning)
        self.metrics.lag.start(loop)
        stop = asyncio.ensure_future(self._stopping.wait())
        poll = asyncio.ensure_future(self._poll())
        try:
            # A replacement process listens only once it can answer; until then, the other processes accept all connections.
            is_late = self.member is not None and self.member.is_replacement
            addresses = Addresses() if is_late else await self.endpoints.listen()
            if self.member is not None:
                loop.add_reader(self.member.lifeline, self._on_orphaned)
                await self.group.serve(self.control.answer)
                await self.control.catch_up()
            work = asyncio.ensure_future(self._load())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await self._drain()
                return
            work.result()
            if not self._stopping.is_set():
                self.dataplane.open()
                if is_late:
                    addresses = await self.endpoints.listen()
                self.endpoints.announce_ready()
                _calm_collector()
                on_ready(Ready(**msgspec.structs.asdict(addresses), models=self.repository.names()))
                await stop
            await self._drain()
        finally:
            stop.cancel()
            poll.cancel()
            self.metrics.lag.stop()
            await self._close()

    async def _close(self) -> None:
        self.endpoints.stop()
        self.shared_memory.close()
        await self.group.close(is_orphan=self._is_orphan)
        if self.cache is not None:
            await self.cache.close()
        self.recording.stop()

    async def _load(self) -> None:
        """Load the start-up models. Raises the errors of models that fail if ``exit_on_error`` is set."""
        if self.member is not None and self.member.is_replacement:
            async with self.group.exclusive("models", patient=True):
                wanted = await self.control.wanted_models()
                work = asyncio.ensure_future(self._start(wanted))
                await asyncio.sleep(0)  # queues the loads before changes that this process receives from now on
            await work
        elif (failures := await self._start(None)) and self.config.exit_on_error:
            raise _all_of(failures)

    async def _start(self, wanted: Mapping[str, Override | None] | None) -> dict[str, PenstockError]:
        config = self.config
        if wanted is None:
            names = await on_daemon_thread("list-models", partial(models_at_start, config, self.layout))
            wanted = dict.fromkeys(names)
        at_start = max(1, len(core_ids()) // config.processes)
        return await self.manager.start(wanted, config.model_load_threads, at_start)

    async def _poll(self) -> None:
        """Poll the repositories periodically. Only the first process polls, on behalf of all processes."""
        logged = ""
        while self.config.model_control_mode == "poll" and (self.member is None or self.member.index == 0):
            await asyncio.sleep(self.config.repository_poll_secs)
            try:
                await self.control.poll()
                logged = ""
            except PenstockError as error:
                if logged != str(error):  # log the same error once, not with every poll
                    _log.warning("the repositories cannot be polled: %s", error)
                logged = str(error)
            except Exception:  # noqa: BLE001 - a bug must not end the polling
                _log.exception("the repositories could not be polled")

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            # A second signal: do not wait for requests in flight.
            self.endpoints.stop()
            _end_at_once()
        self._stop()

    def _on_orphaned(self) -> None:
        """End this process, because the supervisor has died."""
        assert self.member is not None
        asyncio.get_running_loop().remove_reader(self.member.lifeline)
        self._is_orphan = True
        self._stop()

    def _stop(self) -> None:
        self.dataplane.close()
        self.endpoints.announce_end()
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s, timeout_s = self.config.shutdown_grace_s, self.config.drain_timeout_s
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s + timeout_s
        self.manager.end_loads()  # otherwise, clients that wait for a load would delay the shutdown
        await self.endpoints.drain(grace_s, timeout_s)
        for name in await self.manager.close(max(end - loop.time(), _UNLOAD_S)):
            _log.warning(
                "model '%s' was still being loaded after the %g s drain timeout; the server exited without waiting for it",
                name,
                timeout_s,
            )
            atexit.register(_end_at_once, 0)
        try:
            # Slow clients may use up the timeout; idle models still get time to unload.
            async with asyncio.timeout_at(max(end, loop.time() + _UNLOAD_S)):
                await self.manager.unload_all()
        except TimeoutError:
            atexit.register(_end_at_once)
            raise DeadlineExceeded(
                f"a model was still running after the {timeout_s:g} s drain timeout; the server exited without waiting for it",
                "increase 'drain_timeout_s' if the model needs longer",
            ) from None


def _all_of(failures: Mapping[str, PenstockError]) -> PenstockError:
    """A single error that names every model that failed to load."""
    first = next(iter(failures.values()))
    if len(failures) == 1:
        return next(iter(first.causes.values())) if isinstance(first, LoadFailed) and len(first.causes) == 1 else first
    reasons = "; ".join(f"'{name}': {error.message}" for name, error in failures.items())
    return InvalidModel(
        f"{len(failures)} models cannot be served: {reasons}", "set 'exit_on_error' to false to serve the other models"
    )


def _end_at_once(code: int = 1) -> None:
    """Exit immediately with ``code``. A regular exit could crash while a model still runs on another thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _calm_collector() -> None:
    """Make the garbage collector run rarely, because only closed connections leave reference cycles behind.

    Objects created at start-up live as long as the process. With the default threshold of 700 objects, the collector would scan
    the requests in flight several times per batch. The first two generations are small, because a pass over them holds the interpreter
    lock, and a client can open thousands of calls that stay.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 2, 200)
