"""The composition root of the server: builds everything, starts it, and takes it down in order.

Starting: listen (so that a port in use is known at once, and health can be asked) → load and warm up → ready.
Stopping: readiness off → a short grace → no new connections → answer what is in flight → unload.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType

import msgspec

from penstock.clock import SystemClock
from penstock.errors import DeadlineExceeded, InvalidArgument, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.repository.input_check import InputCheck
from penstock.online.repository.loader import Loaded, Source, Wishes, find_sources, load
from penstock.online.repository.manager import Repository
from penstock.online.repository.model_config import batching, complete, parse
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.instance import Instance
from penstock.online.server.config import ServerConfig
from penstock.online.server.connections import Connections
from penstock.online.server.control_plane import Alone, ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http_connection import Connection
from penstock.online.server.http_shared import Shared
from penstock.online.server.listener import Endpoint, Listener
from penstock.online.server.recording import Recording
from penstock.online.server.shared_memory import SharedMemory
from penstock.telemetry.statistics import ModelStatistics

VERSION = "1"
"""The version under which a target given by hand is served."""

_SWITCH_INTERVAL_S = 0.0005
_UNLOAD_S = 1.0


class Ready(msgspec.Struct, frozen=True):
    """Where the server listens and what it serves."""

    http: str
    """``host:port``."""
    models: list[str]


def serve(config: ServerConfig, targets: Sequence[str | Path], on_ready: Callable[[Ready], None]) -> None:
    """Serve ``targets`` until SIGTERM or SIGINT; ``on_ready`` is called once all are loaded and warm.

    Raises NotFound, InvalidModel, IntegrityError, AlreadyExists (two targets with one name), Unavailable (port in use, or a host
    that is not here), and DeadlineExceeded if a model was still at work when the time to drain was over.
    """
    if not targets:
        raise InvalidArgument("nothing to serve", "name a bundle or an .onnx file")
    sources = find_sources(targets, _wishes(config))
    loop_factory = _loop_factory(config)
    before = sys.getswitchinterval()
    if loop_factory is asyncio.new_event_loop:
        # The loop and the instances hand the interpreter lock to and fro. uvloop lets go of it between any two callbacks;
        # asyncio keeps it for a whole turn, while an instance with answers to give waits up to this interval.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(Application(config).run(sources, on_ready))
    finally:
        sys.setswitchinterval(before)


class Application:
    """The server's parts, put together."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._repository = Repository()
        self._shared_memory = SharedMemory(config.client_shm)
        self._recording = Recording(config)
        self._dataplane = DataPlane(self._repository, SystemClock(), self._shared_memory, self._recording.tracer)
        self._connections = Connections(config.max_connections)
        self._listener = Listener(self._connections, config, SystemClock())
        self._stopping = asyncio.Event()

    async def run(self, sources: Sequence[Source], on_ready: Callable[[Ready], None]) -> None:
        """See ``serve``."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        address = await self._listen()
        work = asyncio.ensure_future(self._load(sources))
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                self._dataplane.ready = True
                _calm_collector()
                on_ready(Ready(address, self._repository.names()))
                await stop
                await self._drain()
        finally:
            stop.cancel()
            self._listener.stop()

    async def _listen(self) -> str:
        config = self._config
        try:
            control = ControlPlane(
                self._repository, self._shared_memory, self._recording.tracer, self._recording.log, Alone()
            )
            shared = Shared(self._dataplane, control, config, self._connections)
            endpoint = Endpoint(host=config.host, port=config.http_port, http=lambda: Connection(shared))
            host, port = await self._listener.listen(endpoint)
        except (OSError, UnicodeError) as error:  # the latter from a name that cannot be one
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            is_of_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
            raise Unavailable(
                f"cannot listen on {config.host}:{config.http_port}: {reason}",
                "choose another --http-port; 0 picks a free one"
                if is_of_port
                else "--host must be an address of this machine; 0.0.0.0 is all of them",
            ) from None
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _load(self, sources: Sequence[Source]) -> None:
        for source in sources:
            loaded = await asyncio.wrap_future(_on_daemon_thread(load, source))
            handle = self._assemble(loaded)
            handle.start()
            self._repository.add(handle)

    def _assemble(self, loaded: Loaded) -> Handle:
        name, signature, loop = loaded.source.name, loaded.models[0].signature, asyncio.get_running_loop()
        given = parse(name, {})
        config = complete(given, name, loaded.platform, signature, loaded.max_batch, len(loaded.models))
        batcher = DynamicBatcher(
            batching(config, self._config.max_queue),
            loop,
            ModelStatistics(name=name, version=VERSION),
            tracer=self._recording.tracer,
        )
        max_rows = None if loaded.max_batch is None else max(loaded.max_batch, self._config.max_request_rows)
        return Handle(
            VERSION,
            config,
            InputCheck(name, signature, max_rows),
            batcher,
            loaded.models,
            [Instance(f"{name}-{number}", model, batcher) for number, model in enumerate(loaded.models)],
        )

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            # Asked twice: whoever asks does not want to wait for requests in flight.
            self._listener.stop()
            raise SystemExit(1)
        self._dataplane.ready = False
        self._listener.announce_end()
        self._stopping.set()

    async def _drain(self) -> None:
        grace_s, timeout_s = self._config.shutdown_grace_s, self._config.drain_timeout_s
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s + timeout_s
        await self._listener.drain(grace_s, timeout_s)
        try:
            # Clients that took all the time are no reason not to unload models that are free.
            async with asyncio.timeout_at(max(end, loop.time() + _UNLOAD_S)):
                await self._repository.unload_all()
        except TimeoutError:
            raise DeadlineExceeded(
                f"a model was still at work after {timeout_s:g} s and was left behind",
                "if it does not hang, give it longer with 'drain_timeout_s'",
            ) from None


def _on_daemon_thread(load: Callable[[Source], Loaded], source: Source) -> Future[Loaded]:
    """``load(source)``, on a thread that, unlike an executor's, cannot keep the process from ending."""
    future: Future[Loaded] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(load(source))
        except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=f"load-{source.name}", daemon=True).start()
    return future


def _calm_collector() -> None:
    """What start-up made lives as long as the process, and requests free themselves: only closed connections leave cycles.

    With the default of 700 objects the collector would look at the requests in flight several times in every batch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _wishes(config: ServerConfig) -> Wishes:
    return Wishes(config.max_batch, config.instances, config.isolation, config.model_timeout_s)


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
