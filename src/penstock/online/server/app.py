"""The composition root of the server. It constructs all parts and connects them.

Each process runs one ``Application``; a supervisor starts several processes.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from penstock.artifact import local_path
from penstock.clock import SystemClock
from penstock.errors import InvalidArgument, Unavailable
from penstock.online.cache.response_cache import open_cache
from penstock.online.daemon import on_daemon_thread
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.assembly import Assembler, RequestLimits
from penstock.online.repository.loading.loader import Preloaded, preload
from penstock.online.repository.loading.memory import give_back, share_arenas
from penstock.online.repository.manager import Manager
from penstock.online.repository.override import clear_abandoned
from penstock.online.repository.resolved_version import LoadOptions, define
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.ensemble import Models
from penstock.online.scheduler.rate_limiter import RateLimiter, read_resources
from penstock.online.server.access.admission import Admission, ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.application import Application, Ready, models_at_start
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.endpoints import Endpoints
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.network.connections import Connections
from penstock.online.server.processes.group import ProcessGroup, SocketGroup
from penstock.online.server.processes.supervisor import GroupMember, Supervisor
from penstock.online.server.recording.recording import Recording
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.resources import allow_open_files, core_ids

_SWITCH_INTERVAL_S = 0.0005
_TRIM_S = 3.0
_OTHER_FILES = 256
"""Number of open files reserved for models, logs, the cache and refused clients. Connections may not use them."""

ModelSettings = Mapping[str, Mapping[str, Any]]
"""For each model name, the configuration fields that the user has set."""


def serve(
    config: ServerConfig,
    targets: Sequence[str | Path],
    on_ready: Callable[[Ready], None],
    settings: ModelSettings = MappingProxyType({}),
    folder: Path = Path(),
) -> None:
    """Serve ``targets`` until SIGTERM or SIGINT. Calls ``on_ready`` once all models are loaded and warmed up.

    Paths in ``settings`` are relative to ``folder``.

    Raises NotFound, InvalidModel, InvalidConfig, IntegrityError, AlreadyExists if two targets have the same name, Unavailable if
    the server cannot listen on an address, and DeadlineExceeded if a model was still running after the drain timeout.
    """
    if not targets and not config.model_repository:
        raise InvalidArgument("nothing to serve", "name a bundle or a model file, or set 'model_repository'")
    if config.warmup_folder and Path(config.warmup_folder).exists() and not Path(config.warmup_folder).is_dir():
        raise InvalidArgument(
            f"'warmup_folder' is a file: '{config.warmup_folder}'", "name the folder that contains the models' folders"
        )
    known = {model.name: model for model in define(targets, settings, folder)}
    roots = tuple(map(local_path, config.model_repository))
    layout = Layout(roots, config.model_config_name, config.model_namespacing, known)
    clear_abandoned()
    if config.processes == 1:
        _run(build(config, layout), on_ready)
    else:
        _serve_many(config, layout, on_ready)


def _run(application: Application, on_ready: Callable[[Ready], None]) -> None:
    share_arenas(len(core_ids()))
    loop_factory = _loop_factory(application.config)
    before = sys.getswitchinterval()
    # The event loop, instances and decoding threads share the interpreter lock. Each may have to wait for this interval to get it.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(application.run(on_ready))
    finally:
        sys.setswitchinterval(before)


def _serve_many(config: ServerConfig, layout: Layout, on_ready: Callable[[Ready], None]) -> None:
    with ExitStack() as held:
        config = Endpoints.reserve(config, held)
        # Models are loaded before the fork, so that all processes share the weights. Models with threads are loaded after the
        # fork, because a fork would lose the threads.
        preloaded = preload(layout, models_at_start(config, layout), _load_options(config))

        def be(member: GroupMember, ready: Callable[[dict[str, Any]], None]) -> None:
            _run(build(config, layout, member, preloaded), lambda found: ready(msgspec.to_builtins(found)))

        Supervisor(config.processes, be, lambda found: on_ready(msgspec.convert(found, Ready))).run()


def build(
    config: ServerConfig,
    layout: Layout,
    member: GroupMember | None = None,
    preloaded: Mapping[tuple[str, str], Preloaded] = MappingProxyType({}),
) -> Application:
    """Construct one server process. ``member`` is None if there is only one process. For ``preloaded``, see ``Manager``.

    Raises InvalidConfig, Unavailable.
    """
    clock = SystemClock()
    repository = ServedModels()
    group = SocketGroup(member.folder, member.index) if member else ProcessGroup()
    recording = Recording.open(config, member.index if member else 0)
    tracer = recording.tracer
    cache = open_cache(config.cache_bytes, config.cache_redis, config.cache_ttl_s, clock)
    access = Access(Path(config.keys_file) if config.keys_file else None, clock)
    admission = Admission(access, clock)
    budget = ByteBudget(config.max_inflight_bytes, _Trim())
    shared_memory = SharedMemory(config.client_shm, budget)
    dataplane = DataPlane(
        repository,
        clock,
        shared_memory,
        tracer,
        admission if access.enabled else None,
        name=config.server_name,
        response_limit=ResponseLimit(config.max_response_bytes),
        recorder=recording.requests,
        is_complete=lambda: manager.is_complete or not config.strict_readiness,
    )
    resources = read_resources(config.rate_limit_resource)
    assembler = Assembler(
        RequestLimits(config.max_queue, config.max_request_rows, config.metrics_summaries, config.max_pipeline_bytes),
        tracer,
        cache,
        Models(repository.find, dataplane.call),
        limiter=RateLimiter(resources) if config.rate_limit != "off" else None,
    )
    manager = Manager(
        repository,
        assembler,
        layout,
        _load_options(config),
        preloaded,
        is_explicit=config.model_control_mode == "explicit",
        # With a keys file, the access table allows only clients with ``admin`` to load models.
        takes_files=config.allow_model_upload or access.enabled,
    )
    files = allow_open_files(config.max_connections + _OTHER_FILES)
    connections = Connections(max(1, min(config.max_connections, files - _OTHER_FILES)))
    gauges = connections.by_protocol, lambda: budget.used, lambda: recording.dropped
    metrics = MetricsPage(repository.statistics, *gauges)
    control = ControlPlane(repository, shared_memory, tracer, recording.log, group, metrics, manager)
    endpoints = Endpoints(config, clock, connections, dataplane, control, admission, budget)
    return Application(
        config=config,
        layout=layout,
        member=member,
        repository=repository,
        manager=manager,
        dataplane=dataplane,
        control=control,
        endpoints=endpoints,
        group=group,
        recording=recording,
        metrics=metrics,
        shared_memory=shared_memory,
        cache=cache,
    )


class _Trim:
    """When called, returns freed memory to the system a few seconds later. Further calls within these seconds have no effect."""

    _is_planned = False

    def __call__(self) -> None:
        if not self._is_planned:
            self._is_planned = True
            asyncio.get_running_loop().call_later(_TRIM_S, self._trim)

    def _trim(self) -> None:
        self._is_planned = False
        on_daemon_thread("trim", give_back)


def _load_options(config: ServerConfig) -> LoadOptions:
    return LoadOptions(
        config.max_batch,
        config.instances,
        config.isolation,
        config.model_timeout_s,
        config.processes,
        config.allow_python,
        config.warmup_folder,
    )


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
