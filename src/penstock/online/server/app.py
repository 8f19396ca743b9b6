"""The composition root of the server: builds all parts, starts them, and stops them in order.

Starting: listen (a port in use fails at once, and health can be asked) → load and warm up → ready.
Stopping: readiness off → a short grace → no new connections → answer requests in flight → unload.
With several processes a supervisor does this in each of them.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import logging
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

from penstock.artifact import local_path
from penstock.clock import SystemClock
from penstock.errors import DeadlineExceeded, InvalidArgument, InvalidModel, PenstockError, Unavailable
from penstock.online.cache.response_cache import open_cache
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.layout import Layout, absent
from penstock.online.repository.loading.assembly import Assembler, RequestLimits
from penstock.online.repository.loading.loader import Preloaded, preload
from penstock.online.repository.loading.memory import share_arenas
from penstock.online.repository.manager import LoadFailed, Manager
from penstock.online.repository.override import Override, clear_abandoned
from penstock.online.repository.resolved_version import LoadOptions, define
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.ensemble import Models
from penstock.online.scheduler.rate_limiter import RateLimiter, read_resources
from penstock.online.server.access.admission import Admission, ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.endpoints import Addresses, Endpoints
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.loop_errors import LoopErrors
from penstock.online.server.processes.group import ProcessGroup, SocketGroup
from penstock.online.server.processes.supervisor import GroupMember, Supervisor
from penstock.online.server.recording.recording import Recording
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.resources import allow_open_files, core_ids

_log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
_UNLOAD_S = 1.0
_OTHER_FILES = 256
"""Open files reserved for other purposes than connections: models, logs, the cache, clients being refused."""

ModelSettings = Mapping[str, Mapping[str, Any]]
"""By model name: the fields of its configuration that the user has set."""


class Ready(msgspec.Struct, frozen=True):
    """The addresses of the server, each ``host:port`` or empty, and the models that it serves."""

    http: str
    grpc: str
    metrics: str
    models: list[str]


def serve(
    config: ServerConfig,
    targets: Sequence[str | Path],
    on_ready: Callable[[Ready], None],
    settings: ModelSettings = MappingProxyType({}),
    folder: Path = Path(),
) -> None:
    """Serve ``targets`` until SIGTERM or SIGINT; calls ``on_ready`` once all models are loaded and warm.

    Files that ``settings`` names are relative to ``folder``.

    Raises NotFound, InvalidModel, InvalidConfig, IntegrityError, AlreadyExists (two targets with one name), Unavailable (port in
    use, or an address of another machine), and DeadlineExceeded if a model was still running after the drain timeout.
    """
    if not targets and not config.model_repository:
        raise InvalidArgument("nothing to serve", "name a bundle or a model file, or set 'model_repository'")
    if config.warmup_folder and Path(config.warmup_folder).exists() and not Path(config.warmup_folder).is_dir():
        raise InvalidArgument(
            f"'warmup_folder' is a file: '{config.warmup_folder}'", "name the folder that contains the models' folders"
        )
    by_hand = {model.name: model for model in define(targets, settings, folder)}
    roots = tuple(map(local_path, config.model_repository))
    layout = Layout(roots, config.model_config_name, config.model_namespacing, by_hand)
    clear_abandoned()
    if config.processes == 1:
        _run(Application(config, layout), on_ready)
    else:
        _serve_many(config, layout, on_ready)


def _run(application: Application, on_ready: Callable[[Ready], None]) -> None:
    share_arenas(len(core_ids()))
    loop_factory = _loop_factory(application.config)
    before = sys.getswitchinterval()
    if loop_factory is asyncio.new_event_loop:
        # The loop and the instances pass the interpreter lock to each other. uvloop releases it between any two callbacks;
        # asyncio holds it for a whole iteration, and an instance with answers waits up to this interval.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(application.run(on_ready))
    finally:
        sys.setswitchinterval(before)


def _serve_many(config: ServerConfig, layout: Layout, on_ready: Callable[[Ready], None]) -> None:
    with ExitStack() as held:
        config = Endpoints.reserve(config, held)
        # All processes share the weights of models without threads; threads do not survive a fork.
        preloaded = preload(layout, _at_start(config, layout), _load_options(config))

        def be(member: GroupMember, ready: Callable[[dict[str, Any]], None]) -> None:
            application = Application(config, layout, member, preloaded)
            _run(application, lambda found: ready(msgspec.to_builtins(found)))

        Supervisor(config.processes, be, lambda found: on_ready(msgspec.convert(found, Ready))).run()


def _at_start(config: ServerConfig, layout: Layout) -> list[str]:
    """The models to load at start-up. Raises NotFound if a repository is missing, or, with ``exit_on_error``, a model."""
    known = layout.models()
    if config.model_control_mode != "explicit" or "*" in config.load_models:
        return list(known)
    for name in config.load_models if config.exit_on_error else ():
        if name not in known:
            raise absent(name, known)
    return [*layout.by_hand, *config.load_models]


class Application:
    """The parts of the server in one process."""

    def __init__(
        self,
        config: ServerConfig,
        layout: Layout,
        member: GroupMember | None = None,
        preloaded: Mapping[tuple[str, str], Preloaded] = MappingProxyType({}),
    ) -> None:
        """``member`` is None if this is the only process. ``preloaded``: as for Manager. Raises InvalidConfig, Unavailable."""
        clock = SystemClock()
        self.config = config
        self._member = member
        self._layout = layout
        self._stopping = asyncio.Event()
        self._is_orphan = False
        self._repository = ServedModels()
        self._group = SocketGroup(member.folder, member.index) if member else ProcessGroup()
        self._recording = Recording.open(config, member.index if member else 0)
        self._cache = open_cache(config.cache_bytes, config.cache_redis, config.cache_ttl_s, clock)
        access = Access(Path(config.keys_file) if config.keys_file else None, clock)
        admission = Admission(access, clock) if access.enabled else None
        budget = ByteBudget(config.max_inflight_bytes)
        shared_memory = self._shared_memory = SharedMemory(config.client_shm, budget)
        tracer = self._recording.tracer
        limits = RequestLimits(config.max_queue, config.max_request_rows, config.metrics_summaries)
        self._dataplane = DataPlane(
            self._repository,
            clock,
            shared_memory,
            tracer,
            admission,
            name=config.server_name,
            recorder=self._recording.requests,
            is_complete=lambda: self._manager.is_complete or not config.strict_readiness,
        )
        models = Models(self._repository.find, self._dataplane.call)
        resources = read_resources(config.rate_limit_resource)
        limiter = RateLimiter(resources) if config.rate_limit != "off" else None
        assembler = Assembler(limits, tracer, self._cache, models, limiter=limiter)
        is_explicit = config.model_control_mode == "explicit"
        self._manager = Manager(
            self._repository, assembler, layout, _load_options(config), preloaded, is_explicit=is_explicit
        )
        files = allow_open_files(config.max_connections + _OTHER_FILES)
        connections = Connections(max(1, min(config.max_connections, files - _OTHER_FILES)))
        self._metrics = MetricsPage(
            self._repository.statistics,
            connections.by_protocol,
            lambda: budget.used,
            lambda: self._recording.dropped,
        )
        self._control = ControlPlane(
            self._repository,
            shared_memory,
            tracer,
            self._recording.log,
            self._group,
            self._metrics,
            self._manager,
        )
        self._endpoints = Endpoints(config, clock, connections, self._dataplane, self._control, access, budget)

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Serve until a signal arrives; see ``serve``."""
        loop = asyncio.get_running_loop()
        self._watch(loop)
        self._control.inherit()
        self._recording.start()
        self._metrics.lag.start(loop)
        stop = asyncio.ensure_future(self._stopping.wait())
        poll = asyncio.ensure_future(self._poll())
        try:
            # A replacement process listens late: until it can answer, the other processes answer its clients.
            is_late = self._member is not None and self._member.is_replacement
            addresses = Addresses() if is_late else await self._endpoints.listen()
            if self._member is not None:
                loop.add_reader(self._member.lifeline, self._on_orphaned)
                await self._group.serve(self._control.answer)
                await self._control.catch_up()
            work = asyncio.ensure_future(self._load())
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await self._drain()
                return
            work.result()
            if not self._stopping.is_set():
                self._dataplane.open()
                if is_late:
                    addresses = await self._endpoints.listen()
                self._endpoints.announce_ready()
                _calm_collector()
                on_ready(Ready(addresses.http, addresses.grpc, addresses.metrics, self._repository.names()))
                await stop
            await self._drain()
        finally:
            stop.cancel()
            poll.cancel()
            self._metrics.lag.stop()
            await self._close()

    async def _close(self) -> None:
        await self._endpoints.stop()
        self._shared_memory.close()
        await self._group.close(is_orphan=self._is_orphan)
        if self._cache is not None:
            await self._cache.close()
        self._recording.stop()

    async def _load(self) -> None:
        """Load the models of start-up. With ``exit_on_error`` it raises the errors of those that fail."""
        if self._member is not None and self._member.is_replacement:
            async with self._group.exclusive("models", patient=True):
                wanted = await self._control.wanted_models()
                work = asyncio.ensure_future(self._start(wanted))
                await asyncio.sleep(0)  # queues the loads before any change that this process receives from here on
            await work
        elif (failures := await self._start(None)) and self.config.exit_on_error:
            raise _all_of(failures)

    async def _start(self, wanted: Mapping[str, Override | None] | None) -> dict[str, PenstockError]:
        config = self.config
        if wanted is None:
            names = await on_daemon_thread("list-models", partial(_at_start, config, self._layout))
            wanted = dict.fromkeys(names)
        at_start = max(1, len(core_ids()) // config.processes)
        return await self._manager.start(wanted, config.model_load_threads, at_start)

    async def _poll(self) -> None:
        """Poll the repositories periodically; the first process does so for all."""
        logged = ""
        while self.config.model_control_mode == "poll" and (self._member is None or self._member.index == 0):
            await asyncio.sleep(self.config.repository_poll_secs)
            try:
                await self._control.poll()
                logged = ""
            except PenstockError as error:
                if logged != str(error):  # once, not with every poll
                    _log.warning("the repositories cannot be polled: %s", error)
                logged = str(error)
            except Exception:  # noqa: BLE001 - a bug of ours must not end the polling
                _log.exception("the repositories could not be polled")

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_exception_handler(LoopErrors())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            # A second signal: do not wait for requests in flight.
            self._endpoints.cut_off()
            _end_at_once()
        self._stop()

    def _on_orphaned(self) -> None:
        """End this process, since the supervisor has died."""
        assert self._member is not None
        asyncio.get_running_loop().remove_reader(self._member.lifeline)
        self._is_orphan = True
        self._stop()

    def _stop(self) -> None:
        self._dataplane.close()
        self._endpoints.announce_end()
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s, timeout_s = self.config.shutdown_grace_s, self.config.drain_timeout_s
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s + timeout_s
        self._manager.end_loads()  # clients that wait for a load would delay the shutdown
        await self._endpoints.drain(grace_s, timeout_s)
        try:
            # Slow clients may use up the timeout; idle models are unloaded all the same.
            async with asyncio.timeout_at(max(end, loop.time() + _UNLOAD_S)):
                await self._manager.close(timeout_s)
                await self._manager.unload_all()
        except TimeoutError:
            atexit.register(_end_at_once)
            raise DeadlineExceeded(
                f"a model was still running after the {timeout_s:g} s drain timeout; the server exited without waiting for it",
                "increase 'drain_timeout_s' if the model needs longer",
            ) from None


def _load_options(config: ServerConfig) -> LoadOptions:
    return LoadOptions(
        config.max_batch,
        config.instances,
        config.isolation,
        config.model_timeout_s,
        config.processes,
        config.warmup_folder,
    )


def _all_of(failures: Mapping[str, PenstockError]) -> PenstockError:
    """One error that names every model that failed to load."""
    first = next(iter(failures.values()))
    if len(failures) == 1:
        return next(iter(first.causes.values())) if isinstance(first, LoadFailed) and len(first.causes) == 1 else first
    reasons = "; ".join(f"'{name}': {error.message}" for name, error in failures.items())
    return InvalidModel(
        f"{len(failures)} models cannot be served: {reasons}", "set 'exit_on_error' to false to serve the other models"
    )


def _end_at_once() -> None:
    """Exit with code 1 at once. A regular exit would abort while a model still runs on another thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _calm_collector() -> None:
    """Make the garbage collector run rarely: only closed connections leave cycles behind.

    Objects made at start-up live as long as the process. With the default threshold of 700 objects the collector would scan the
    requests in flight several times per batch.
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
