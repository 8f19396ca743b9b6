"""What one may change about the server."""

from __future__ import annotations

import ipaddress
import math
from typing import Annotated, Literal

import msgspec

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


Dialect = Literal["tensorflow-serving", "kserve-v1", "torchserve"]
DIALECTS: tuple[Dialect, ...] = ("tensorflow-serving", "kserve-v1", "torchserve")
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


class ServerConfig(msgspec.Struct, frozen=True):
    """Section ``server``: flags of ``penstock serve``, ``PENSTOCK_SERVER_*``, or table ``[server]`` of the file."""

    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` is reachable from elsewhere."""
    grpc_host: str = ""
    """Address of the port for gRPC; empty: ``host``. With another, each of the two ports speaks only its own protocol."""
    metrics_host: str = ""
    """Address of the port for metrics; empty: ``host``."""
    http_port: _Port = 8000
    """Port for HTTP, where gRPC is understood too; 0 picks a free one."""
    grpc_port: _Port | None = None
    """Port for gRPC, where HTTP is understood too; not given: 8001, or a free one where ``http_port`` is 0."""
    metrics_port: _Port | None = None
    """Port for metrics; not given: 8002, or a free one where ``http_port`` is 0."""
    unix_socket: str = ""
    """Path of a Unix socket to listen on as well, for the server's own user; empty: none."""
    allow_http: bool = True
    """Whether HTTP is spoken."""
    allow_grpc: bool = True
    """Whether gRPC is spoken."""
    allow_metrics: bool = True
    """Whether metrics are served."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """How many processes share the ports, for more than one core's worth of requests."""
    tls_certificate: str = ""
    """File with the server's certificate, and those that lead to its authority, in PEM; given, TLS is spoken for HTTP and gRPC,
    but neither for metrics nor on the Unix socket."""
    tls_key: str = ""
    """File with the key of ``tls_certificate``, in PEM and without a password; empty: it is in the same file."""
    tls_client_ca: str = ""
    """File with the authorities, in PEM, one of which must have signed a client's certificate; empty: clients need none."""
    http_tls: bool = True
    """Whether TLS is for HTTP too, if it is spoken; if not, each of the two ports speaks only its own protocol."""
    http_restricted_api: tuple[str, ...] = ()
    """Which parts of the API ask for a header, as ``api,api:header=value``."""
    grpc_restricted_protocol: tuple[str, ...] = ()
    """The same over gRPC, where the header is ``triton-grpc-protocol-`` and the name given."""
    server_name: str = "penstock"
    """What the server calls itself in its metadata."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """Protocols of other servers that are understood over HTTP, beside the Open Inference Protocol; none, if empty."""
    model_repository: tuple[str, ...] = ()
    """Folders that hold models in Triton's layout, ``<model>/<version>/…``; served beside the targets given by hand."""
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """What becomes of models after the start: nothing, what their folders say from time to time, or what clients ask for."""
    load_models: tuple[str, ...] = ()
    """Models that are loaded at the start in mode ``explicit``; ``*`` is all. In other modes all are."""
    repository_poll_secs: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    """How often mode ``poll`` looks at the repositories; a change counts when it has been the same twice."""
    exit_on_error: bool = True
    """Whether the server ends if a model cannot be loaded at the start."""
    strict_readiness: bool = True
    """Whether the server is ready only while every model is served that is to be without being asked for."""
    model_config_name: str = ""
    """Models with a file ``configs/<this>.pbtxt`` are configured by that instead of ``config.pbtxt``."""
    model_load_threads: _Count = 2
    """How many models are loaded at once while the server runs; at the start, one per core if that is more."""
    model_namespacing: bool = False
    """Whether models of one name in several repositories are served, as ``<repository>/<name>``, instead of refused."""
    warmup_folder: str = ""
    """Folder with recorded requests, ``<model>/….request``, that models are warmed up with; empty: there are none."""
    warmup_record: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """How many requests of different shapes are recorded of each model into ``warmup_folder``, readable by the server's user only;
    0: none."""
    max_batch: _Count | None = None
    """Most rows that are merged into one batch, for every model; not given: what its bundle says, or 64."""
    max_request_rows: _Count = 1024
    """Most rows of one request, or ``max_batch`` where that is more; a request of more than ``max_batch`` rows runs alone."""
    instances: _Count | None = None
    """Copies of each model that run side by side; not given: what its bundle says, or 1."""
    isolation: Literal["thread", "process"] = "thread"
    """Where models run: on threads of the server, or each instance in a process of its own, so that it cannot end the server."""
    model_timeout_s: _Seconds = 0.0
    """Longest that one call of a model in a process of its own may take before the process is ended; loading may take as
    long, but 60 s at least; 0: for ever."""
    rate_limit: Literal["off", "execution_count"] = "off"
    """Whether instances run only while they hold the resources that their ``rate_limiter`` names."""
    rate_limit_resource: tuple[str, ...] = ()
    """How much there is of each, as ``name:count``; empty: as much as the neediest instance needs."""
    max_queue: _Count = 4096
    """Most requests that one model has accepted and not yet answered; more are refused with 503."""
    max_request_bytes: _Count = 64 << 20
    """Largest body of a request; larger ones are refused with 413 before they are read."""
    max_inflight_bytes: _Bytes = 1 << 30
    """Most bytes of requests that are held at once, of all clients together; more are refused with 503. 0: no such limit."""
    max_header_bytes: _Count = 64 << 10
    """Most bytes of a request's headers, each header counted with 32 bytes on top; more are refused with 431."""
    max_connections: _Count = 10_000
    """Most connections at once, and no more than the process may have files open less 256; more are answered 503 and closed."""
    max_pipelined: _Count = 64
    """Most requests of one connection that are worked on at once; more wait unread."""
    max_unsent_bytes: _Count = 8 << 20
    """Most bytes of answers to one request that a client leaves unread; with more its request is cancelled."""
    max_streams: _Count = 1024
    """Most gRPC calls of one connection that are open at once; clients are told, and what is beyond is refused."""
    request_timeout_s: _Seconds = 60.0
    """Longest that a client may take to send one request."""
    idle_timeout_s: _Seconds = 75.0
    """Longest that a connection may stay open unused, or that a client may leave its answers unread."""
    shutdown_grace_s: _Seconds = 0.5
    """How long new connections are still taken after readiness went off, so that load balancers notice first."""
    drain_timeout_s: _Seconds = 30.0
    """Longest that shutting down waits for requests in flight and for models at work."""
    allow_client_shm: Literal["auto", "true", "false"] = "auto"
    """Whether clients may register shared memory; ``auto``: where ``host`` is loopback, so that they are on this machine."""
    keys_file: str = ""
    """TOML file that names the clients and says what each may do; empty: everybody may do everything."""
    cache_bytes: _Bytes = 0
    """Memory for answers of models with ``response_cache``; 0: no answer is kept."""
    cache_redis: str = ""
    """URL of a Redis that keeps answers too, for longer and for several servers; empty: none."""
    cache_ttl_s: _Seconds = 3600.0
    """How long an answer stays in Redis; 0: until Redis evicts it."""
    access_log: str = ""
    """File that gets a JSON line for every request, ``-`` for stdout; empty: none is written."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    """Whether requests are traced; this and the four that follow may be changed, also by model, while the server runs."""
    trace_rate: _Count = 1000
    """One in this many requests is traced, besides those whose caller traces them."""
    trace_count: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Most requests that are traced; -1 is no limit."""
    trace_log_frequency: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Traces to a file of mode ``triton``, the files being numbered; 0: one file with all."""
    trace_mode: Literal["triton", "opentelemetry"] = "triton"
    """Where traces go: to ``trace_file``, or to an OpenTelemetry collector."""
    trace_file: str = ""
    """JSON file of mode ``triton``; overwritten. Empty: this mode traces nothing."""
    trace_endpoint: str = ""
    """Collector of mode ``opentelemetry``, as ``http://host:4318/v1/traces``; empty: this mode traces nothing."""
    log_file: str = ""
    """File that the server's own messages are appended to; empty: stderr."""
    log_info: bool = True
    """Whether informative messages are shown."""
    log_warning: bool = True
    """Whether warnings are shown."""
    log_error: bool = True
    """Whether errors are shown."""
    log_verbose_level: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0 shows no debug messages."""
    log_format: Literal["default", "ISO8601"] = "default"
    """How a message's time is written."""
    metrics_summaries: bool = False
    """Whether quantiles of the last minute are kept for the metrics, too; they make every request dearer."""
    grpc_implementation: Literal["h2", "grpcio"] = "h2"
    """What speaks gRPC: the server's own HTTP/2, or the package ``grpcio`` (slower; to compare with)."""
    event_loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    """``auto`` takes uvloop where it is installed."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"'{name}' must be a finite number")
        if 0 < self.max_inflight_bytes < self.max_request_bytes:
            raise ValueError(
                "'max_inflight_bytes' must be at least 'max_request_bytes', or the largest could never be sent"
            )

        if self.processes > 1 and self.isolation == "process":
            raise ValueError("with several 'processes' models cannot have processes of their own: use 'instances'")
        if self.processes > 1 and self.unix_socket:
            raise ValueError("several 'processes' cannot listen on one 'unix_socket'")
        if not all(self.model_repository):
            raise ValueError("'model_repository' has an empty path")
        if self.load_models and self.model_control_mode != "explicit":
            raise ValueError("'load_models' is for 'model_control_mode' explicit")
        if self.warmup_record and not self.warmup_folder:
            raise ValueError("'warmup_record' needs a 'warmup_folder'")
        if not (self.allow_http or self.allow_grpc):
            raise ValueError("either HTTP or gRPC has to be allowed")
        if self.http_restricted_api and self.dialects:
            raise ValueError("'dialects' would be a way around 'http_restricted_api': set them to []")

    def port(self, name: Literal["http", "grpc", "metrics"]) -> int:
        """The port for ``name``; 0 is any."""
        given: int | None = getattr(self, f"{name}_port")
        return given if given is not None else DEFAULT_PORTS[name] if self.http_port else 0

    def host_of(self, name: Literal["http", "grpc", "metrics"]) -> str:
        """The address for ``name``."""
        return {"grpc": self.grpc_host, "metrics": self.metrics_host}.get(name) or self.host

    @property
    def is_apart(self) -> bool:
        """Whether the ports for HTTP and gRPC are open to different clients, so that neither may speak the other's protocol."""
        return self.host_of("grpc") != self.host or (bool(self.tls_certificate) and not self.http_tls)

    @property
    def client_shm(self) -> bool:
        """What ``allow_client_shm`` comes to."""
        if self.allow_client_shm != "auto":
            return self.allow_client_shm == "true"
        try:
            return not self.is_apart and ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return not self.is_apart and self.host == "localhost"
