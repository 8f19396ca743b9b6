"""The composition root of the server: builds everything, starts it, and takes it down in order.

Starting: listen (so that a port in use is known at once, and health can be asked) → load and warm up → ready.
Stopping: readiness off → a short grace → no new connections → answer what is in flight → unload.
With several processes a supervisor does this in each of them.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from penstock.clock import SystemClock
from penstock.errors import DeadlineExceeded, InvalidArgument, Unavailable
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.assembly import Assembler, Limits
from penstock.online.repository.loader import Loaded, load
from penstock.online.repository.served import ServedModels
from penstock.online.repository.source import Source, Wishes, define, find
from penstock.online.scheduler.ensemble import Models
from penstock.online.scheduler.rate_limiter import RateLimiter, read_resources
from penstock.online.server.admission import Admission, ByteBudget
from penstock.online.server.auth import Access
from penstock.online.server.cache.response_cache import open_cache
from penstock.online.server.config import ServerConfig
from penstock.online.server.connections import Connections
from penstock.online.server.control_plane import Alone, ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.endpoints import Addresses, Endpoints
from penstock.online.server.loop_errors import LoopErrors
from penstock.online.server.metrics_page import LoopLag, MetricsPage
from penstock.online.server.peers import Peers
from penstock.online.server.processes import Place, Supervisor
from penstock.online.server.recording import Recording
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.resources import allow_open_files

_SWITCH_INTERVAL_S = 0.0005
_UNLOAD_S = 1.0
_OTHER_FILES = 256
"""How many files and sockets are left for what is not a connection: models, logs, the cache, clients being refused."""

Settings = Mapping[str, Mapping[str, Any]]
"""By model name the fields of its configuration that a user has set."""


class Ready(msgspec.Struct, frozen=True):
    """Where the server listens, each as ``host:port`` or empty, and what it serves."""

    http: str
    grpc: str
    metrics: str
    models: list[str]


def serve(
    config: ServerConfig,
    targets: Sequence[str | Path],
    on_ready: Callable[[Ready], None],
    settings: Settings = MappingProxyType({}),
    folder: Path = Path(),
) -> None:
    """Serve ``targets`` until SIGTERM or SIGINT; ``on_ready`` is called once all are loaded and warm.

    ``settings`` may name files relative to ``folder``.

    Raises NotFound, InvalidModel, InvalidConfig, IntegrityError, AlreadyExists (two targets with one name), Unavailable (port in
    use, or a host that is not here), and DeadlineExceeded if a model was still at work when the time to drain was over.
    """
    if not targets:
        raise InvalidArgument("nothing to serve", "name a bundle or an .onnx file")
    wishes = _wishes(config)
    sources = [
        find(model, version, wishes) for model in define(targets, settings, folder) for version in model.versions
    ]
    if config.processes == 1:
        _run(Application(config), sources, {}, on_ready)
    else:
        _serve_many(config, sources, on_ready)


def _run(
    application: Application,
    sources: Sequence[Source],
    preloaded: Mapping[str, Loaded],
    on_ready: Callable[[Ready], None],
) -> None:
    loop_factory = _loop_factory(application.config)
    before = sys.getswitchinterval()
    if loop_factory is asyncio.new_event_loop:
        # The loop and the instances hand the interpreter lock to and fro. uvloop lets go of it between any two callbacks;
        # asyncio keeps it for a whole turn, while an instance with answers to give waits up to this interval.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(application.run(sources, preloaded, on_ready))
    finally:
        sys.setswitchinterval(before)


def _serve_many(
    config: ServerConfig,
    sources: Sequence[Source],
    on_ready: Callable[[Ready], None],
) -> None:
    with ExitStack() as held:
        config = Endpoints.reserve(config, held)
        # Weights are in memory once for all processes where a model has no threads, which do not survive a fork.
        preloaded = {source.name: load(source) for source in sources if not source.has_own_threads}

        def be(place: Place, ready: Callable[[dict[str, Any]], None]) -> None:
            application = Application(config, place)
            _run(application, sources, preloaded, lambda found: ready(msgspec.to_builtins(found)))

        Supervisor(config.processes, be, lambda found: on_ready(msgspec.convert(found, Ready))).run()


class Application:
    """The server's parts, put together."""

    def __init__(self, config: ServerConfig, place: Place | None = None) -> None:
        """``place``: None if this is the only process. Raises InvalidConfig, Unavailable."""
        clock = SystemClock()
        self.config = config
        self._place = place
        self._repository = ServedModels()
        self._peers = Peers(place.folder, place.index) if place else None
        self._recording = Recording(config, place.index if place else 0)
        self._cache = open_cache(config, clock)
        access = Access(Path(config.keys_file) if config.keys_file else None, clock)
        admission = Admission(access, clock) if access.enabled else None
        budget = ByteBudget(config.max_inflight_bytes)
        shared_memory = self._shared_memory = SharedMemory(config.client_shm, budget)
        tracer = self._recording.tracer
        limits = Limits(config.max_queue, config.max_request_rows, config.metrics_summaries)
        self._dataplane = DataPlane(self._repository, clock, shared_memory, tracer, admission)
        models = Models(self._repository.find, self._dataplane.call)
        limiter = RateLimiter(read_resources(config.rate_limit_resource)) if config.rate_limit != "off" else None
        self._assembler = Assembler(limits, tracer, self._cache, models, limiter=limiter)
        files = allow_open_files(config.max_connections + _OTHER_FILES)
        connections = Connections(max(1, min(config.max_connections, files - _OTHER_FILES)))
        self._metrics = MetricsPage(
            self._repository.statistics,
            connections.by_protocol,
            lambda: budget.used,
            lambda: self._recording.dropped,
        )
        self._control = ControlPlane(
            self._repository, shared_memory, tracer, self._recording.log, self._peers or Alone(), self._metrics
        )
        self._control.inherit()
        self._endpoints = Endpoints(config, clock, connections, self._dataplane, self._control, access, budget)
        self._stopping = asyncio.Event()
        self._is_orphan = False
        self._loading: asyncio.Future[Loaded] | None = None

    async def run(
        self, sources: Sequence[Source], preloaded: Mapping[str, Loaded], on_ready: Callable[[Ready], None]
    ) -> None:
        """Serve until told to stop; see ``serve``. ``preloaded`` are those of ``sources`` that are in memory already."""
        loop = asyncio.get_running_loop()
        self._watch(loop)
        self._recording.start()
        lag = self._metrics.lag = LoopLag(loop)
        lag.start()
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            # Clients of a process that replaces another have their answers from the others until it can give them.
            is_late = self._place is not None and self._place.is_replacement
            addresses = Addresses() if is_late else await self._endpoints.listen()
            if self._place is not None and self._peers is not None:
                loop.add_reader(self._place.lifeline, self._on_orphaned)
                await self._peers.serve(self._control.answer)
                await self._control.catch_up()
            work = asyncio.ensure_future(self._load(sources, preloaded))
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._leave_loading(work)
                return
            work.result()
            if not self._stopping.is_set():
                self._dataplane.ready = True
                if is_late:
                    addresses = await self._endpoints.listen()
                self._endpoints.announce_ready()
                _calm_collector()
                on_ready(self._ready(addresses))
                await stop
            await self._drain()
        finally:
            stop.cancel()
            lag.stop()
            await self._endpoints.stop()
            self._shared_memory.close()
            if self._peers is not None:
                await self._peers.close(is_orphan=self._is_orphan)
            if self._cache is not None:
                await self._cache.close()
            self._recording.stop()

    def _ready(self, addresses: Addresses) -> Ready:
        return Ready(addresses.http, addresses.grpc, addresses.metrics, self._repository.names())

    async def _load(self, sources: Sequence[Source], preloaded: Mapping[str, Loaded]) -> None:
        for source in sources:
            loaded = preloaded.get(source.name)
            if loaded is None:
                self._loading = on_daemon_thread(f"load-{source.name}", partial(load, source))
                loaded = await asyncio.shield(self._loading)
                self._loading = None
            handle = self._assembler.assemble(loaded)
            handle.start()
            self._repository.add(handle)

    async def _leave_loading(self, work: asyncio.Future[None]) -> None:
        """Wait for the model that is being loaded: ending while a thread is in an engine's native code would abort the process."""
        work.cancel()
        if self._loading is None:
            return
        await asyncio.wait((self._loading,), timeout=self.config.drain_timeout_s)
        if self._loading.done() and self._loading.exception() is None:
            for model in self._loading.result().models:
                model.unload()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_exception_handler(LoopErrors())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            # Asked twice: whoever asks does not want to wait for requests in flight.
            self._endpoints.cut_off()
            _end_at_once()
        self._stop()

    def _on_orphaned(self) -> None:
        """The supervisor is gone."""
        assert self._place is not None
        asyncio.get_running_loop().remove_reader(self._place.lifeline)
        self._is_orphan = True
        self._stop()

    def _stop(self) -> None:
        self._dataplane.ready = False
        self._endpoints.announce_end()
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s, timeout_s = self.config.shutdown_grace_s, self.config.drain_timeout_s
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s + timeout_s
        await self._endpoints.drain(grace_s, timeout_s)
        try:
            # Clients that took all the time are no reason not to unload models that are free.
            async with asyncio.timeout_at(max(end, loop.time() + _UNLOAD_S)):
                await self._repository.unload_all()
        except TimeoutError:
            atexit.register(_end_at_once)
            raise DeadlineExceeded(
                f"a model was still at work after {timeout_s:g} s and was left behind",
                "if it does not hang, give it longer with 'drain_timeout_s'",
            ) from None


def _wishes(config: ServerConfig) -> Wishes:
    return Wishes(config.max_batch, config.instances, config.isolation, config.model_timeout_s, config.processes)


def _end_at_once() -> None:
    """End the process with code 1, without taking the interpreter down: a model at work on another thread turns that into an abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _calm_collector() -> None:
    """What start-up made lives as long as the process, and requests free themselves: only closed connections leave cycles.

    With the default of 700 objects the collector would look at the requests in flight several times in every batch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _loop_factory(config: ServerConfig) -> Callable[[], asyncio.AbstractEventLoop]:
    if config.event_loop != "asyncio":
        try:
            uvloop: ModuleType = importlib.import_module("uvloop")
        except ImportError as error:
            if config.event_loop == "uvloop":
                raise Unavailable(f"event loop 'uvloop' is not available: {error}", "pip install uvloop") from None
        else:
            return uvloop.new_event_loop  # type: ignore[no-any-return]
    return asyncio.new_event_loop
