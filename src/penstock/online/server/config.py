"""The settings of the server."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from penstock.config import Flag, Secret

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


Dialect = Literal["tensorflow-serving", "kserve-v1", "torchserve"]
DIALECTS: tuple[Dialect, ...] = ("tensorflow-serving", "kserve-v1", "torchserve")
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


PANELS = {
    "host": "Network",
    "model_repository": "Models",
    "max_batch": "Execution",
    "max_queue": "Limits",
    "tls_certificate": "Security",
    "cache_bytes": "Response cache",
    "access_log": "Telemetry",
}
"""Groups of settings, each with its first field; a group ends where the next one starts."""


class ServerConfig(msgspec.Struct, frozen=True):
    """Section ``server``: options of ``penstock serve``, ``PENSTOCK_SERVER_*`` variables, or the table ``[server]`` of the file."""

    REMOVED: ClassVar[Mapping[str, str]] = {"grpc_implementation": "gRPC always runs on the server's own HTTP/2 (h2)"}
    """Settings of earlier versions, each with the reason for its removal."""

    host: Flag[Annotated[str, msgspec.Meta(min_length=1)]] = "127.0.0.1"
    """Address to listen on. ``0.0.0.0`` accepts connections from other machines."""
    grpc_host: str = ""
    """Address of the gRPC port; defaults to ``host``. If it differs, each of the two ports accepts only its own protocol."""
    metrics_host: str = ""
    """Address of the metrics port; defaults to ``host``."""
    http_port: Flag[_Port] = 8000
    """Port for HTTP; it also accepts gRPC. 0 selects a free port."""
    grpc_port: Flag[_Port | None] = None
    """Port for gRPC; it also accepts HTTP. Defaults to 8001, or to a free port if ``http_port`` is 0."""
    metrics_port: Flag[_Port | None] = None
    """Port for Prometheus metrics. Defaults to 8002, or to a free port if ``http_port`` is 0."""
    unix_socket: Flag[str] = ""
    """Path of an additional Unix socket, open to the server's own user only."""
    allow_http: Flag[bool] = True
    """Accept HTTP."""
    allow_grpc: Flag[bool] = True
    """Accept gRPC."""
    allow_metrics: Flag[bool] = True
    """Serve metrics."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """Protocols of other servers that the HTTP port accepts in addition to the Open Inference Protocol."""
    server_name: str = "penstock"
    """Server name in the server metadata."""
    processes: Flag[Annotated[int, msgspec.Meta(ge=1, le=1024)]] = 1
    """Number of server processes that share the ports; each serves every model."""
    event_loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    """Event loop. ``auto`` uses uvloop if it is installed."""

    model_repository: Flag[tuple[str, ...]] = ()
    """Folder of models in Triton's layout, ``<model>/<version>/…``; its models are served in addition to the targets."""
    model_control_mode: Flag[Literal["none", "poll", "explicit"]] = "none"
    """When models change after start-up: never (``none``), when their folders change (``poll``), or on request (``explicit``)."""
    load_models: Flag[tuple[str, ...]] = ()
    """Model to load at start-up in mode ``explicit``; ``*`` loads all. The other modes load every model."""
    repository_poll_secs: Flag[Annotated[float, msgspec.Meta(gt=0)]] = 15.0
    """Seconds between two polls of the repositories in mode ``poll``. A change is applied once two consecutive polls agree on it."""
    exit_on_error: Flag[bool] = True
    """Exit if a model fails to load at start-up."""
    strict_readiness: Flag[bool] = True
    """Report ready only while every model that start-up loads is being served."""
    model_config_name: Flag[str] = ""
    """Read a model's ``configs/NAME.pbtxt`` instead of its ``config.pbtxt`` if the file exists."""
    model_namespacing: bool = False
    """Serve models as ``<repository>/<model>``, so that repositories may contain models of the same name."""
    model_load_threads: _Count = 2
    """Number of models that load concurrently while the server runs. Start-up uses one thread per core if that is more.
    A load no longer counts once its process has used no CPU time for a second, or after ten seconds, so that a hanging load does not
    block others."""
    warmup_folder: str = ""
    """Folder of recorded requests, ``<model>/….request``, which warm up models."""
    warmup_record: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """Number of requests of different shapes to record per model into ``warmup_folder``, readable by the server's user only.
    0 records none."""

    max_batch: Flag[_Count | None] = None
    """Maximum rows per batch, for every model. Defaults to the bundle's value, or 64."""
    max_request_rows: _Count = 1024
    """Maximum rows per request, or ``max_batch`` if that is greater; larger requests are rejected with 400. A request with more than
    ``max_batch`` rows runs alone. A model whose configuration sets ``max_batch_size`` rejects requests with more rows than that."""
    instances: Flag[_Count | None] = None
    """Number of instances of each model. Defaults to the bundle's value, or 1."""
    isolation: Flag[Literal["thread", "process"]] = "thread"
    """Where instances run: on threads of the server, or each in its own process. If that process crashes, the server keeps running."""
    model_timeout_s: _Seconds = 0.0
    """Maximum seconds for one call of a model in its own process; a slower process is killed. For loading, the limit is at least 60 s.
    0 sets no limit."""
    rate_limit: Flag[Literal["off", "execution_count"]] = "off"
    """``execution_count``: an instance runs only while it holds the resources that its ``rate_limiter`` names."""
    rate_limit_resource: Flag[tuple[str, ...]] = ()
    """Amount of a resource, as ``name:count``. Defaults to the largest amount that any instance needs."""

    max_queue: Flag[_Count] = 4096
    """Maximum requests that one model has accepted and not yet answered; further requests are rejected with 503."""
    max_request_bytes: Flag[_Count] = 64 << 20
    """Maximum size of a request body; larger bodies are rejected with 413 before they are read."""
    max_json_bytes: _Count = 16 << 20
    """Maximum size of the JSON in an HTTP inference request, after decompression; larger JSON is rejected with 413. Binary tensors do
    not count."""
    max_inflight_bytes: _Bytes = 1 << 30
    """Maximum bytes in memory of all requests, their decoded tensors and unread responses, at least ``max_request_bytes``; further
    requests are rejected with 503. 0 sets no limit."""
    max_header_bytes: _Count = 64 << 10
    """Maximum bytes of a request's headers, counting 32 bytes of overhead per header; larger ones are rejected with 431."""
    max_connections: _Count = 10_000
    """Maximum open connections, at most the process's limit on open files less 256. On further connections, requests other than
    health and metrics are answered with 503, and the connection is closed. The metrics port has 32 additional connections."""
    max_pipelined: _Count = 64
    """Maximum requests in flight per connection; at the limit, the server stops reading until one is answered."""
    max_unsent_bytes: _Count = 8 << 20
    """Maximum bytes of responses to one request that a client leaves unread. Beyond it, the request is cancelled, and a gRPC call
    ends with RESOURCE_EXHAUSTED."""
    max_unread_bytes: _Count = 64 << 20
    """Maximum bytes of responses, over all connections, that clients leave unread. Beyond it, clients that have read nothing for a
    second are disconnected, sooner if much more is unread, and further gRPC responses of more than 1 MiB per connection end with
    RESOURCE_EXHAUSTED."""
    max_streams: _Count = 1024
    """Maximum open gRPC calls per connection, which the server announces to clients; further calls are refused."""
    request_timeout_s: _Seconds = 60.0
    """Maximum seconds for a client to send one request."""
    idle_timeout_s: _Seconds = 75.0
    """Maximum seconds that a connection stays open unused, or that a client leaves its responses unread."""
    shutdown_grace_s: _Seconds = 0.5
    """Seconds between the end of readiness and the end of listening, so that load balancers can react first."""
    drain_timeout_s: Flag[_Seconds] = 30.0
    """Maximum seconds that shutdown waits for requests in flight and for running models."""

    tls_certificate: Flag[str] = ""
    """PEM file with the server's certificate chain. It enables TLS for HTTP and gRPC, not for metrics or the Unix socket."""
    tls_key: Flag[str] = ""
    """PEM file with the certificate's private key, without a password. Defaults to the certificate file."""
    tls_client_ca: Flag[str] = ""
    """PEM file with certificate authorities. The server then accepts only clients with a certificate that one of them signed."""
    http_tls: bool = True
    """Use TLS for HTTP too. If false, each of the two ports accepts only its own protocol."""
    keys_file: Flag[str] = ""
    """TOML file with the clients, their keys and their rights. Without it, every client may do everything that the settings below
    do not forbid."""
    allow_origin: Flag[tuple[str, ...]] = ()
    """Origin of web pages that may use the server, as ``https://app.example``; ``*`` allows every page. Other pages get 403."""
    allow_host: tuple[str, ...] = ()
    """Name that requests may have in ``Host``, in addition to ``host``, the machine's name and loopback names; ``*`` allows every
    name. Without it, a server with a ``keys_file`` accepts every name. A server without one checks all requests if it listens on a
    loopback address, and otherwise only requests of browsers over plain HTTP."""
    allow_model_upload: Flag[bool] = False
    """Let every client load models from files that it sends, and thereby run code in the server. Otherwise, this requires the key of
    a client with ``admin``."""
    http_restricted_api: Secret[tuple[str, ...]] = ()
    """Parts of the HTTP API that require a header, as ``api,api:header=value``. Requires ``dialects`` to be empty."""
    grpc_restricted_protocol: Secret[tuple[str, ...]] = ()
    """Parts of the gRPC API that require a header, as ``api,api:header=value``. Clients send ``triton-grpc-protocol-`` before the
    header's name."""
    allow_client_shm: Flag[Literal["auto", "true", "false"]] = "auto"
    """Let clients register shared memory. ``auto`` allows it if ``host`` is a loopback address."""

    cache_bytes: Flag[_Bytes] = 0
    """Memory for cached responses of models with ``response_cache``. 0 disables the cache."""
    cache_redis: Secret[str] = ""
    """URL of a Redis that also caches responses, for several servers. Pass it in the environment if it has a password."""
    cache_ttl_s: _Seconds = 3600.0
    """Seconds that Redis keeps a response. 0 leaves eviction to Redis."""

    access_log: Flag[str] = ""
    """File for one JSON line per request; ``-`` writes to stdout."""
    trace_level: Flag[Literal["OFF", "TIMESTAMPS"]] = "OFF"
    """``TIMESTAMPS`` traces requests. Level, rate, count, frequency and mode can be changed at run time, also per model."""
    trace_rate: _Count = 1000
    """Trace one out of this number of requests, in addition to requests that carry a trace."""
    trace_count: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Maximum number of traced requests. -1 sets no limit."""
    trace_log_frequency: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Traces per file in mode ``triton``; the files are numbered. 0 writes one file."""
    trace_mode: Literal["triton", "opentelemetry"] = "triton"
    """Destination of traces: ``trace_file``, or the OpenTelemetry collector at ``trace_endpoint``."""
    trace_file: Flag[str] = ""
    """JSON file for traces in mode ``triton``; it is overwritten. Without it, this mode traces nothing."""
    trace_endpoint: str = ""
    """OpenTelemetry collector, as ``http://host:4318/v1/traces``. Without it, mode ``opentelemetry`` traces nothing."""
    log_file: Flag[str] = ""
    """File that the server's log messages are appended to. Defaults to stderr."""
    log_info: bool = True
    """Log informational messages."""
    log_warning: bool = True
    """Log warnings."""
    log_error: bool = True
    """Log errors."""
    log_verbose_level: Flag[Annotated[int, msgspec.Meta(ge=0)]] = 0
    """Levels above 0 log debug messages."""
    log_format: Literal["default", "ISO8601"] = "default"
    """Timestamp format of log messages."""
    metrics_summaries: bool = False
    """Add latency quantiles of the last minute to the metrics, at an additional cost per request."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"'{name}' must be a finite number")
        if 0 < self.max_inflight_bytes < self.max_request_bytes:
            raise ValueError(
                "'max_inflight_bytes' must be at least 'max_request_bytes', or the largest requests could never be accepted"
            )
        if self.processes > 1 and self.isolation == "process":
            raise ValueError("several 'processes' cannot be combined with 'isolation' process: use 'instances' instead")
        if self.processes > 1 and self.unix_socket:
            raise ValueError("several 'processes' cannot listen on one 'unix_socket'")
        if not all(self.model_repository):
            raise ValueError("'model_repository' has an empty path")
        if self.load_models and self.model_control_mode != "explicit":
            raise ValueError("'load_models' requires 'model_control_mode' explicit")
        if self.warmup_record and not self.warmup_folder:
            raise ValueError("'warmup_record' requires a 'warmup_folder'")
        if not (self.allow_http or self.allow_grpc):
            raise ValueError("'allow_http' and 'allow_grpc' are both false: either HTTP or gRPC has to be allowed")
        _check_origins(self.allow_origin)
        if self.http_restricted_api and self.dialects:
            raise ValueError("'dialects' would bypass 'http_restricted_api': set 'dialects' to []")

    def port(self, name: Literal["http", "grpc", "metrics"]) -> int:
        """The port to listen on for ``name``; 0 means any free port."""
        given: int | None = getattr(self, f"{name}_port")
        return given if given is not None else DEFAULT_PORTS[name] if self.http_port else 0

    def host_of(self, name: Literal["http", "grpc", "metrics"]) -> str:
        """The address to listen on for ``name``."""
        return {"grpc": self.grpc_host, "metrics": self.metrics_host}.get(name) or self.host

    @property
    def is_apart(self) -> bool:
        """True if HTTP and gRPC admit different clients; neither port may then accept the other's protocol."""
        return self.host_of("grpc") != self.host or (bool(self.tls_certificate) and not self.http_tls)

    def warnings(self) -> Iterator[str]:
        """The rights and keys that the settings leave open to clients on other machines, each as a warning."""
        hosts = {"http": self.host_of("http")} if self.allow_http else {}
        hosts |= {"grpc": self.host_of("grpc")} if self.allow_grpc else {}
        remote = {name: host for name, host in hosts.items() if not is_loopback(host)}
        if not (self.keys_file or self.tls_client_ca):
            if remote:
                host = next(iter(remote.values()))
                yield f"every client that reaches '{host}' may do everything: set 'keys_file', or listen on 127.0.0.1"
            return
        clear = [
            host for name, host in remote.items() if not self.tls_certificate or (name == "http" and not self.http_tls)
        ]
        if self.keys_file and clear:
            yield f"keys are sent to '{clear[0]}' in clear text: set 'tls_certificate', or listen on 127.0.0.1 behind a proxy with TLS"
        if self.allow_metrics and not self.metrics_host and not is_loopback(self.host):
            yield f"the metrics port on '{self.host}' requires no key: set 'metrics_host', or 'allow_metrics' to false"

    @property
    def client_shm(self) -> bool:
        """True if clients may register shared memory."""
        if self.allow_client_shm != "auto":
            return self.allow_client_shm == "true"
        return not self.is_apart and is_loopback(self.host)


def _check_origins(origins: Iterable[str]) -> None:
    for origin in origins:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s,@A-Z]+", origin):
            form = "write https://name or http://name:port in lower case, or *"
            if path := re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,@A-Z]+(/.*)", origin):
                form = f"remove the path '{path[1]}'"
            raise ValueError(f"'allow_origin' has '{origin}': {form}")


def is_loopback(host: str) -> bool:
    """True if ``host`` is an address of this machine only, or a name that always means one (RFC 6761, section 6.3)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".").rpartition(".")[2] == "localhost"
