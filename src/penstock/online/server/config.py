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
"""Groups of settings, each with its first field. A group ends where the next group starts."""


class ServerConfig(msgspec.Struct, frozen=True):
    """Server settings: options of ``penstock serve``, variables ``PENSTOCK_SERVER_*``, or the table ``[server]`` of the file."""

    REMOVED: ClassVar[Mapping[str, str]] = {"grpc_implementation": "gRPC always runs on the server's own HTTP/2 (h2)"}
    """Settings of earlier versions, each with the reason for its removal."""

    host: Flag[Annotated[str, msgspec.Meta(min_length=1)]] = "127.0.0.1"
    """Address on which to listen. ``0.0.0.0`` accepts connections from other machines."""
    grpc_host: str = ""
    """Address of the gRPC port; defaults to ``host``. If the two addresses differ, each port accepts only its own protocol."""
    metrics_host: str = ""
    """Address of the metrics port; defaults to ``host``."""
    http_port: Flag[_Port] = 8000
    """Port for HTTP; it also accepts gRPC. 0 selects a free port."""
    grpc_port: Flag[_Port | None] = None
    """Port for gRPC; it also accepts HTTP. Defaults to 8001, or to a free port if ``http_port`` is 0."""
    metrics_port: Flag[_Port | None] = None
    """Port for Prometheus metrics. Defaults to 8002, or to a free port if ``http_port`` is 0."""
    unix_socket: Flag[str] = ""
    """Path of an additional Unix socket. Only the server's own user can use it."""
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
    """Number of server processes that share the ports. Each process serves every model."""
    event_loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    """Event loop. ``auto`` uses uvloop if it is installed."""

    model_repository: Flag[tuple[str, ...]] = ()
    """Folder of models in Triton's layout, ``<model>/<version>/…``, to serve in addition to models on the command line."""
    model_control_mode: Flag[Literal["none", "poll", "explicit"]] = "none"
    """When models are loaded and unloaded after start-up: never (``none``), when their folders change (``poll``), or when clients
    ask for it (``explicit``)."""
    load_models: Flag[tuple[str, ...]] = ()
    """Model to load at start-up in mode ``explicit``; ``*`` loads all models. The other modes load every model."""
    repository_poll_secs: Flag[Annotated[float, msgspec.Meta(gt=0)]] = 15.0
    """Seconds between two polls in mode ``poll``. A change is applied once two consecutive polls have seen the same files."""
    exit_on_error: Flag[bool] = True
    """Exit if a model fails to load at start-up."""
    strict_readiness: Flag[bool] = True
    """Report ready only while all models that are loaded at start-up are being served."""
    model_config_name: Flag[str] = ""
    """Read a model's ``configs/NAME.pbtxt`` instead of its ``config.pbtxt`` if the file exists."""
    model_namespacing: bool = False
    """Serve models as ``<repository>/<model>``, so that repositories may contain models of the same name."""
    model_load_threads: _Count = 2
    """Number of models that load concurrently while the server runs. Start-up uses one thread per core if that is more. So that a
    load that hangs does not block other loads, a load stops counting after ten seconds, or when its process has used no CPU time
    for a second."""
    warmup_folder: str = ""
    """Folder of recorded requests, ``<model>/….request``. The server uses these requests to warm up models."""
    warmup_record: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """Maximum number of requests per model to record into ``warmup_folder``. Each recorded request has different input shapes. Only
    the server's own user can read the files. 0 records none."""

    max_batch: Flag[_Count | None] = None
    """Maximum rows per batch, for every model. Defaults to the bundle's value, or 64."""
    max_request_rows: _Count = 1024
    """Maximum rows per request. If ``max_batch`` is greater, ``max_batch`` is the maximum. Larger requests are rejected with 400. A
    request with more than ``max_batch`` rows runs alone. A model with ``max_batch_size`` in its configuration rejects requests with
    more rows than ``max_batch_size``."""
    instances: Flag[_Count | None] = None
    """Number of instances of each model. Defaults to the bundle's value, or 1."""
    isolation: Flag[Literal["thread", "process"]] = "thread"
    """Run instances on threads of the server, or each instance in its own process. A crash of a process does not end the server."""
    allow_python: Flag[bool] = False
    """Run the Python code that bundles of pipelines contain. The code has the rights of the server's user."""
    model_timeout_s: _Seconds = 0.0
    """Maximum seconds for one call of a model in its own process. If a call takes longer, the process is killed. For loading, the
    limit is at least 60 s. 0 sets no limit."""
    rate_limit: Flag[Literal["off", "execution_count"]] = "off"
    """With ``execution_count``, an instance runs only while it holds the resources in its ``rate_limiter`` configuration."""
    rate_limit_resource: Flag[tuple[str, ...]] = ()
    """Amount of a rate limiter's resource, as ``name:count``. Defaults to the largest amount that any instance needs."""

    max_queue: Flag[_Count] = 4096
    """Maximum number of requests that one model has accepted and not yet answered. Further requests are rejected with 503."""
    max_request_bytes: Flag[_Count] = 64 << 20
    """Maximum size of a request body. Larger bodies are rejected with 413 before they are read."""
    max_json_bytes: _Count = 16 << 20
    """Maximum size of the JSON in an HTTP inference request, after decompression. Larger JSON is rejected with 413. Binary tensors
    do not count."""
    max_response_bytes: _Bytes = 64 << 20
    """Maximum size of one response, as JSON or as a message, before compression. Larger responses are refused with 413, in gRPC with
    RESOURCE_EXHAUSTED. Outputs in shared memory do not count. 0 sets no limit."""
    max_inflight_bytes: _Bytes = 1 << 30
    """Maximum bytes in memory of all requests, open gRPC calls, decoded tensors and unread responses. Further requests are rejected
    with 503. Must be at least ``max_request_bytes``. 0 sets no limit."""
    max_pipeline_bytes: _Count | None = None
    """Maximum bytes of intermediate results, such as decoded pictures, of each pipeline. At the limit, no step of a further request
    starts until results are freed. Defaults to an eighth of the machine's or container's memory, at least 64 MiB."""
    max_header_bytes: _Count = 64 << 10
    """Maximum bytes of a request's headers, plus 32 bytes per header. Requests with larger headers are rejected with 431."""
    max_connections: _Count = 10_000
    """Maximum number of open connections. It cannot exceed the process's limit on open files minus 256. Further connections serve
    only health and metrics. Other requests on them get 503, and the connection is closed. The metrics port accepts 32 more
    connections."""
    max_pipelined: _Count = 64
    """Maximum requests in flight per connection. At the limit, the server stops reading until a request is answered."""
    max_unsent_bytes: _Count = 8 << 20
    """Maximum bytes of unread responses to one request. Beyond this limit, the request is cancelled, and a gRPC call ends with
    RESOURCE_EXHAUSTED."""
    max_unread_bytes: _Count = 64 << 20
    """Maximum bytes of unread responses, over all connections. Beyond this limit, the server disconnects clients that have read
    nothing for a second, or for a shorter time if the limit is far exceeded. If this does not suffice, a gRPC response that would
    give its connection more than 1 MiB of unread data ends with RESOURCE_EXHAUSTED."""
    max_streams: _Count = 1024
    """Maximum number of open gRPC calls per connection. The server announces it to clients, and refuses further calls."""
    request_timeout_s: _Seconds = 60.0
    """Maximum seconds for a client to send one request."""
    idle_timeout_s: _Seconds = 75.0
    """Maximum seconds that a connection may be idle, or that a client may leave its responses unread."""
    shutdown_grace_s: _Seconds = 0.5
    """Seconds between reporting "not ready" and closing the listener, so that load balancers can react first."""
    drain_timeout_s: Flag[_Seconds] = 30.0
    """Maximum seconds that shutdown waits for requests in flight and for running models."""

    tls_certificate: Flag[str] = ""
    """PEM file with the server's certificate chain. It enables TLS for HTTP and gRPC, not for metrics or the Unix socket."""
    tls_key: Flag[str] = ""
    """PEM file with the certificate's private key, without a password. Defaults to the certificate file."""
    tls_client_ca: Flag[str] = ""
    """PEM file with certificate authorities. The server then requires a client certificate from one of these authorities."""
    http_tls: bool = True
    """Use TLS for HTTP as well as for gRPC. If false, each port accepts only its own protocol."""
    keys_file: Flag[str] = ""
    """TOML file with the clients, their keys and their rights. Without a keys file, every client may do everything that the
    settings below do not forbid."""
    allow_origin: Flag[tuple[str, ...]] = ()
    """Origin of web pages that may use the server, as ``https://app.example``; ``*`` allows every page. Other pages get 403."""
    allow_host: tuple[str, ...] = ()
    """Name that requests may have in ``Host``, in addition to ``host``, the machine's name and loopback names; ``*`` allows every
    name. If this is not set, a server with a ``keys_file`` accepts every name. A server without a ``keys_file`` checks all
    requests if it listens on a loopback address, and otherwise only requests of browsers over plain HTTP."""
    allow_model_upload: Flag[bool] = False
    """Let every client load models from files that it sends, and thereby run code in the server. If false, only clients with
    ``admin`` in the keys file may do this."""
    http_restricted_api: Secret[tuple[str, ...]] = ()
    """Parts of the HTTP API that require a header, as ``api,api:header=value``. Requires that ``dialects`` is empty."""
    grpc_restricted_protocol: Secret[tuple[str, ...]] = ()
    """Parts of the gRPC API that require a header, as ``api,api:header=value``. Clients send ``triton-grpc-protocol-`` before the
    header's name."""
    allow_client_shm: Flag[Literal["auto", "true", "false"]] = "auto"
    """Let clients register shared memory. ``auto`` allows it if ``host`` is a loopback address."""

    cache_bytes: Flag[_Bytes] = 0
    """Memory for cached responses of models with ``response_cache``. 0 disables the cache."""
    cache_redis: Secret[str] = ""
    """URL of a Redis server that also caches responses, possibly for several servers. Pass a password in the environment."""
    cache_ttl_s: _Seconds = 3600.0
    """Seconds for which Redis keeps a response. With 0, Redis decides when to evict it."""

    access_log: Flag[str] = ""
    """Access log file, with one JSON line per request. ``-`` writes to stdout."""
    trace_level: Flag[Literal["OFF", "TIMESTAMPS"]] = "OFF"
    """``TIMESTAMPS`` traces requests. Clients can change level, rate, count, frequency and mode at run time."""
    trace_rate: _Count = 1000
    """Trace one out of this number of requests. Requests whose trace context is sampled are also traced."""
    trace_count: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Maximum number of traced requests. -1 sets no limit."""
    trace_log_frequency: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Traces per file in mode ``triton``, in numbered files. 0 writes all traces to one file."""
    trace_mode: Literal["triton", "opentelemetry"] = "triton"
    """Destination of traces: ``trace_file``, or the OpenTelemetry collector at ``trace_endpoint``."""
    trace_file: Flag[str] = ""
    """JSON file for traces in mode ``triton``. An existing file is overwritten. Without this setting, the mode traces nothing."""
    trace_endpoint: str = ""
    """URL of the OpenTelemetry collector, as ``http://host:4318/v1/traces``. Mode ``opentelemetry`` traces nothing without it."""
    log_file: Flag[str] = ""
    """File to which the server appends its log messages. Defaults to stderr."""
    log_info: bool = True
    """Log informational messages."""
    log_warning: bool = True
    """Log warnings."""
    log_error: bool = True
    """Log errors."""
    log_verbose_level: Flag[Annotated[int, msgspec.Meta(ge=0)]] = 0
    """Verbosity level. Levels above 0 log debug messages."""
    log_format: Literal["default", "ISO8601"] = "default"
    """Timestamp format of log messages."""
    metrics_summaries: bool = False
    """Add latency quantiles of the last minute to the metrics. This costs additional time per request."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"'{name}' must be a finite number")
        if 0 < self.max_inflight_bytes < self.max_request_bytes:
            raise ValueError(
                "'max_inflight_bytes' must be at least 'max_request_bytes', or the largest requests could never be accepted"
            )
        if self.processes > 1 and self.isolation == "process":
            raise ValueError("'processes' must be 1 if 'isolation' is 'process': set 'instances' instead")
        if self.processes > 1 and self.unix_socket:
            raise ValueError("'processes' must be 1 if 'unix_socket' is set")
        if not all(self.model_repository):
            raise ValueError("'model_repository' has an empty path")
        if self.load_models and self.model_control_mode != "explicit":
            raise ValueError("'load_models' requires 'model_control_mode' explicit")
        if self.warmup_record and not self.warmup_folder:
            raise ValueError("'warmup_record' requires a 'warmup_folder'")
        if not (self.allow_http or self.allow_grpc):
            raise ValueError("'allow_http' and 'allow_grpc' are both false: set at least one to true")
        _check_origins(self.allow_origin)
        if self.http_restricted_api and self.dialects:
            raise ValueError("'dialects' would bypass 'http_restricted_api': set 'dialects' to []")

    def port(self, name: Literal["http", "grpc", "metrics"]) -> int:
        """The port on which to listen for ``name``; 0 means any free port."""
        given: int | None = getattr(self, f"{name}_port")
        return given if given is not None else DEFAULT_PORTS[name] if self.http_port else 0

    def host_of(self, name: Literal["http", "grpc", "metrics"]) -> str:
        """The address on which to listen for ``name``."""
        return {"grpc": self.grpc_host, "metrics": self.metrics_host}.get(name) or self.host

    @property
    def is_apart(self) -> bool:
        """True if HTTP and gRPC differ in address or TLS. Each port then accepts only its own protocol."""
        return self.host_of("grpc") != self.host or (bool(self.tls_certificate) and not self.http_tls)

    def warnings(self) -> Iterator[str]:
        """A warning for each setting that gives other machines unprotected access, or exposes keys to the network."""
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
    """True if ``host`` is a loopback address, or a name that always means a loopback address (RFC 6761, section 6.3)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".").rpartition(".")[2] == "localhost"
