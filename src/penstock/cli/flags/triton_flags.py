"""The flags of Triton's ``tritonserver``: a table that maps each flag to settings of this server."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin
from urllib.parse import quote

import msgspec

from penstock.config import did_you_mean, plain_type
from penstock.errors import InvalidArgument
from penstock.online.server.config import ServerConfig

Settings = dict[str, Any]

DEFAULTS: Mapping[str, Any] = {
    "host": "0.0.0.0",  # noqa: S104 - Triton's default
    "grpc_host": "0.0.0.0",  # noqa: S104
    "server_name": "triton",
    "allow_client_shm": "false",
    "dialects": [],
    "max_request_bytes": 1 << 30,
    "max_json_bytes": 64 << 20,
}
"""Defaults that differ between Triton and ``ServerConfig``. The size limits are high, since Triton does not limit tensors."""

_WORDS = {"true": "1", "on": "1", "false": "0", "off": "0"}
_PARTS = re.compile(r"(?:([^,=]+),)?([^,=]+)=(.+)", re.DOTALL)
_CACHE_BYTES = 64 << 20


class TritonFlag(NamedTuple):
    """One flag, and its effect on the settings."""

    apply: Callable[[Settings, str], str | None]
    """Applies the flag's text to the settings. Returns a note for the user, or None. Raises ValueError."""
    may_stand_alone: bool = False
    """The flag may be given without a value, which means true."""


def translate(arguments: Sequence[str]) -> tuple[Settings, list[str]]:
    """Convert flags to settings of ``ServerConfig`` by name, and notes on flags without effect. Raises InvalidArgument.

    As in Triton, a value follows ``=`` or is the next argument, and a flag's name may be abbreviated if it stays unambiguous.
    """
    settings: Settings = {}
    notes: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if not argument.startswith("--"):
            raise InvalidArgument(f"expected a flag, got '{argument:.40}'", "flags begin with --")
        given, equals, text = argument[2:].partition("=")
        name = _full_name(given)
        if not equals:
            text = _next(name, rest)
        try:
            if note := FLAGS[name].apply(settings, text):
                notes.append(f"--{name} {note}")
        except (ValueError, msgspec.ValidationError) as error:
            raise InvalidArgument(f"--{name}: {error}") from None
    return settings, [*dict.fromkeys(notes), *_settle(settings)]


def _full_name(given: str) -> str:
    names = [name for name in FLAGS if given and name.startswith(given)]
    if given in FLAGS or len(names) == 1:
        return given if given in FLAGS else names[0]
    raise InvalidArgument(f"unknown flag '--{given:.80}'", did_you_mean(given, names or FLAGS))


def _next(name: str, rest: deque[str]) -> str:
    if rest and not rest[0].startswith("--"):
        return rest.popleft()
    if FLAGS[name].may_stand_alone:
        return "true"
    raise InvalidArgument(f"--{name} requires a value", f"write --{name}=VALUE")


def _parts(text: str) -> tuple[str, str, str]:
    """Split an argument into name (may be empty), setting and value. Errors do not repeat the value, since it may be a password."""
    match = _PARTS.fullmatch(text)
    if match is None:
        raise ValueError("write <name>,<setting>=<value>")
    return match[1] or "", match[2], match[3]


def _sets(setting: str) -> TritonFlag:
    """Set ``setting`` to the text, converted to the setting's type; for a list, append the value."""
    kind, plain = _TYPES[setting], plain_type(_TYPES[setting])

    def apply(settings: Settings, text: str) -> None:
        if not text:
            raise ValueError("the value must not be empty")
        if get_origin(plain) is tuple:
            settings[setting] = (*settings.get(setting, ()), text)
        elif get_origin(plain) is Literal:
            settings[setting] = next((choice for choice in get_args(plain) if choice.lower() == text.lower()), text)
        else:
            word = text if plain is str else _WORDS.get(text.lower(), text)
            settings[setting] = msgspec.convert(word, kind, strict=False)

    return TritonFlag(apply, plain is bool)


def _idle(reason: str) -> TritonFlag:
    return TritonFlag(lambda settings, text: f"has no effect here: {reason}", may_stand_alone=True)


def _refused(reason: str) -> TritonFlag:
    def apply(settings: Settings, text: str) -> None:
        if _WORDS.get(text.lower(), text) not in ("0", ""):
            raise ValueError(f"not supported: {reason}")

    return TritonFlag(apply, may_stand_alone=True)


def _cache(settings: Settings, text: str) -> None:
    name, setting, value = _parts(text)
    if (name, setting) == ("local", "size"):
        _sets("cache_bytes").apply(settings, value)
    elif name == "redis":
        settings.setdefault("redis", {})[setting] = value
    else:
        raise ValueError("write local,size=<bytes> or redis,<setting>=<value>")


def _chooses(names: Mapping[str, str]) -> TritonFlag:
    def apply(settings: Settings, text: str) -> str | None:
        mode, setting, value = _parts(text)
        name = f"{mode.lower()},{setting}" if mode else setting
        if name in names:
            return _sets(names[name]).apply(settings, value)
        return f"has no effect here for '{name:.40}': the server chooses it"

    return TritonFlag(apply)


_TYPES: dict[str, Any] = {
    **{field.name: field.type for field in msgspec.structs.fields(ServerConfig)},
    "repository-poll-secs": float,
    **dict.fromkeys(("allow-client-shm", "grpc-use-ssl", "grpc-use-ssl-mutual"), bool),
    **dict.fromkeys(("grpc-server-cert", "grpc-server-key", "grpc-root-cert"), str),
}
"""The types of the settings, and of the flags that ``_settle`` combines into settings."""

_SAME_NAME = """
    log-info log-warning log-error log-format log-file exit-on-error strict-readiness
    model-repository model-control-mode model-config-name model-namespacing
    allow-http http-port http-restricted-api allow-grpc grpc-port grpc-restricted-protocol allow-metrics metrics-port
    allow-model-upload allow-origin
    trace-level trace-file trace-rate trace-count trace-log-frequency rate-limit rate-limit-resource"""
_OTHER_NAME = {
    "id": "server_name",
    "exit-timeout-secs": "drain_timeout_s",
    "log-verbose": "log_verbose_level",
    "model-store": "model_repository",
    "load-model": "load_models",
    "model-load-thread-count": "model_load_threads",
    "http-address": "host",
    "grpc-address": "grpc_host",
    "metrics-address": "metrics_host",
    "response-cache-byte-size": "cache_bytes",
    **{name: name for name in _TYPES if "-" in name},
}
_TRACE = {
    **{name: f"trace_{name}" for name in ("level", "rate", "count", "mode")},
    "triton,file": "trace_file",
    "triton,log-frequency": "trace_log_frequency",
    "opentelemetry,url": "trace_endpoint",
}
_CLOUD = "the server does not implement this front end"
_REFUSED = {
    "only processes of one server can share ports; set PENSTOCK_SERVER_PROCESSES": "reuse-http-port reuse-grpc-port",
    "headers are not forwarded to models": "http-header-forward-pattern grpc-header-forward-pattern",
    _CLOUD: "allow-sagemaker allow-vertex-ai",
}
_IDLE = {
    "a failed load is not retried automatically": "model-load-retry-count",
    "configurations are always completed from the model": "disable-auto-complete-config strict-model-config",
    "one event loop serves all connections; set PENSTOCK_SERVER_PROCESSES for more": "http-thread-count grpc-infer-thread-count",
    "the limit here includes tensors; set PENSTOCK_SERVER_MAX_REQUEST_BYTES": "http-max-input-size",
    "the server sets its own limits": """
        grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-infer-response-compression-level
        grpc-keepalive-time grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
        grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes
        grpc-max-connection-age grpc-max-connection-age-grace""",
    "metrics are collected at each scrape": "metrics-interval-ms allow-cpu-metrics",
    "engines are Python packages": "backend-config backend-directory repoagent-directory cache-directory",
    "models run on the CPU, in memory that the operating system manages": """
        allow-gpu-metrics enable-peer-access pinned-memory-pool-byte-size cuda-memory-pool-byte-size
        cuda-virtual-address-size min-supported-compute-capability model-load-gpu-limit
        host-policy buffer-manager-thread-count""",
    _CLOUD: """
        sagemaker-port sagemaker-safe-port-range sagemaker-thread-count
        vertex-ai-port vertex-ai-thread-count vertex-ai-default-model""",
}

FLAGS: Mapping[str, TritonFlag] = {
    **{name: _sets(name.replace("-", "_")) for name in _SAME_NAME.split()},
    **{name: _sets(setting) for name, setting in _OTHER_NAME.items()},
    **{name: _refused(reason) for reason, names in _REFUSED.items() for name in names.split()},
    **{name: _idle(reason) for reason, names in _IDLE.items() for name in names.split()},
    "metrics-config": _chooses({"summary_latencies": "metrics_summaries"}),
    "trace-config": _chooses(_TRACE),
    "cache-config": TritonFlag(_cache),
}
"""Every flag by name, without the dashes."""


def _settle(settings: Settings) -> list[str]:
    """Derive the settings that depend on several flags. Returns notes for the user. Raises InvalidArgument."""
    poll_secs = settings.pop("repository-poll-secs", None)
    if poll_secs is not None and settings.get("model_control_mode") == "poll":
        settings["repository_poll_secs"] = poll_secs
    if "://" not in settings.get("trace_endpoint", "://"):
        settings["trace_endpoint"] = f"http://{settings['trace_endpoint']}"
    if "allow-client-shm" in settings:
        settings["allow_client_shm"] = str(settings.pop("allow-client-shm")).lower()
    flags = ("use-ssl", "use-ssl-mutual", "server-cert", "server-key", "root-cert")
    is_used, is_mutual, certificate, key, root = (settings.pop(f"grpc-{flag}", "") for flag in flags)
    if is_used or is_mutual:
        if not certificate or (is_mutual and not root):
            raise InvalidArgument(
                "TLS requires a certificate file", "add --grpc-server-cert, and --grpc-root-cert for mutual TLS"
            )
        settings |= {"tls_certificate": certificate, "tls_key": key, "http_tls": False}
        settings["tls_client_ca"] = root if is_mutual else ""
    redis = settings.pop("redis", {})
    if redis:
        settings |= {"cache_bytes": settings.get("cache_bytes", _CACHE_BYTES), "cache_redis": _redis_url(redis)}
    return [f"--cache-config has no effect here for '{setting:.40}': the server chooses it" for setting in redis]


def _redis_url(given: dict[str, str]) -> str:
    """Build the URL of Redis from entries of ``given``, and remove these entries."""
    user, password, tls = (given.pop(name, "") for name in ("user", "password", "tls_enabled"))
    host, port, db = given.pop("host", "localhost"), given.pop("port", "6379"), given.pop("db", "0")
    who = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    scheme = "rediss" if _WORDS.get(tls.lower(), tls) == "1" else "redis"
    return f"{scheme}://{who}{f'[{host}]' if ':' in host else host}:{port}/{quote(db)}"
