"""The access table: what each endpoint asks of its caller, over HTTP and gRPC alike. An endpoint that is not in it is closed."""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, PenstockError, PermissionDenied, Unavailable
from penstock.online.server.access.auth import Access


class Needs(enum.Enum):
    """What a caller must be allowed, where the server knows its clients."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    """A key, and the right to the model if the request names one."""
    ADMIN = enum.auto()
    """The key of a client that may control the server."""


class AccessRule(NamedTuple):
    """One row of the table: endpoints that ask the same of their callers."""

    needs: Needs
    http: tuple[str, ...] = ()
    """Paths, as ``Resource`` writes them; a versioned path is covered by the one without a version."""
    grpc: tuple[str, ...] = ()
    """Names of methods."""
    group: str = ""
    """The part of the API that one restriction protects, by Triton's name; empty if none does."""


def _regions(kind: str) -> tuple[str, ...]:
    base = f"/v2/{kind}sharedmemory"
    region = f"{base}/region/{{name}}"
    return f"{base}/status", f"{base}/unregister", f"{region}/status", f"{region}/register", f"{region}/unregister"


RULES = (
    AccessRule(
        Needs.NOTHING,
        ("/v2/health/live", "/v2/health/ready"),
        ("ServerLive", "ServerReady", "Check", "Watch"),
        "health",
    ),
    AccessRule(Needs.MODEL, ("/v2/models/{model}/ready",), ("ModelReady",), "health"),
    AccessRule(Needs.MODEL, ("/v2", "/v2/models/{model}"), ("ServerMetadata", "ModelMetadata"), "metadata"),
    AccessRule(
        Needs.MODEL,
        ("/v2/models/{model}/infer", "/v2/models/{model}/generate", "/v2/models/{model}/generate_stream"),
        ("ModelInfer", "ModelStreamInfer"),
        "inference",
    ),
    # A client that registers regions makes the server read and write what the server's own user may.
    AccessRule(
        Needs.ADMIN,
        (*_regions("system"), *_regions("cuda")),
        (
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
        ),
        "shared-memory",
    ),
    AccessRule(Needs.MODEL, ("/v2/models/{model}/config",), ("ModelConfig",), "model-config"),
    AccessRule(
        Needs.MODEL, ("/v2/repository/index", "/v2/repository/{name}/index"), ("RepositoryIndex",), "model-repository"
    ),
    AccessRule(
        Needs.ADMIN,
        (
            "/v2/repository/models/{model}/load",
            "/v2/repository/models/{model}/unload",
            "/v2/repository/{name}/models/{model}/load",
            "/v2/repository/{name}/models/{model}/unload",
        ),
        ("RepositoryModelLoad", "RepositoryModelUnload"),
        "model-repository",
    ),
    AccessRule(Needs.MODEL, ("/v2/models/stats", "/v2/models/{model}/stats"), ("ModelStatistics",), "statistics"),
    AccessRule(Needs.ADMIN, ("/v2/trace/setting", "/v2/models/{model}/trace/setting"), ("TraceSetting",), "trace"),
    AccessRule(Needs.ADMIN, ("/v2/logging",), ("LogSettings",), "logging"),
    AccessRule(Needs.NOTHING, ("/openapi.json", "/metrics"), ("ServerReflectionInfo",)),
    # The dialects of other servers.
    AccessRule(Needs.NOTHING, ("/", "/ping")),
    AccessRule(
        Needs.MODEL,
        (
            "/v1/models",
            "/v1/models/{model}",
            "/v1/models/{model}/labels/{name}",
            "/v1/models/{model}/metadata",
            "/v1/models/{model}/labels/{name}/metadata",
            "/v1/models/{model}:predict",
            "/v1/models/{model}/labels/{name}:predict",
            "/v1/models/{model}:classify",
            "/v1/models/{model}/labels/{name}:classify",
            "/v1/models/{model}:regress",
            "/v1/models/{model}/labels/{name}:regress",
            "/v1/models/{model}:explain",
            "/predictions/{model}",
            "/predictions/{model}/{version}",
            "/explanations/{model}",
            "/explanations/{model}/{version}",
        ),
    ),
    AccessRule(Needs.ADMIN, ("/monitoring/prometheus/metrics",)),
)

GROUPS = tuple(dict.fromkeys(rule.group for rule in RULES if rule.group))

Restrictions = Mapping[str, tuple[str, bytes]]
"""By group, the header that opens it, in lower case, and the header's value."""


def read_restrictions(texts: Iterable[str], prefix: str = "") -> Restrictions:
    """``group,group:header=value`` each. Raises InvalidConfig, which does not repeat the value."""
    restrictions: dict[str, tuple[str, bytes]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:]+):([^=]+)=(.+)", text)
        if match is None:
            raise InvalidConfig("a restriction names no API, header or value", "write api,api:header=value")
        for api in match[1].split(","):
            if api not in GROUPS:
                raise InvalidConfig(f"unknown restricted API '{api:.40}'", did_you_mean(api, GROUPS))
            if api in restrictions:
                raise InvalidConfig(f"restricted API '{api}' can not be specified in multiple config groups")
            restrictions[api] = (f"{prefix}{match[2]}".lower(), match[3].encode())
    return restrictions


class Guard:
    """Admits callers to one endpoint."""

    __slots__ = ("_access", "_header", "_needs", "_refusal", "_value")

    def __init__(
        self,
        needs: Needs,
        access: Access,
        restriction: tuple[str, bytes] | None,
        refusal: Callable[[], PenstockError],
    ) -> None:
        """``refusal`` makes the error for callers without the header and value of ``restriction``."""
        self._needs = needs
        self._access = access
        self._header, self._value = restriction or ("", b"")
        self._refusal = refusal

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        """The name of the client with this ``credential``; empty where the endpoint or the server does not ask for keys.

        Raises Unauthenticated, PermissionDenied, and the refusal.
        """
        if self._header:
            given = headers.get(self._header, b"")
            if not secrets.compare_digest(given.encode() if isinstance(given, str) else given, self._value):
                raise self._refusal()
        if self._needs is Needs.NOTHING:
            return ""
        client = self._access.identify(credential)
        if self._needs is Needs.ADMIN:
            self._access.require_admin(client)
        elif model:
            self._access.check(client, model)
        return client


class _Closed(Guard):
    """Refuses every caller."""

    __slots__ = ()

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        raise self._refusal()


class AccessTable:
    """Makes the guards of all endpoints at start-up; an endpoint that everyone may use has none, and pays nothing."""

    def __init__(
        self,
        access: Access,
        http: Iterable[str] = (),
        grpc: Iterable[str] = (),
        rules: Iterable[AccessRule] = RULES,
    ) -> None:
        """``http`` and ``grpc`` are the restrictions of either protocol. Raises InvalidConfig, as ``read_restrictions``."""
        self.access = access
        self._http = read_restrictions(http)
        self._grpc = read_restrictions(grpc, "triton-grpc-protocol-")
        self._paths = {path: rule for rule in rules for path in rule.http}
        self._methods = {name: rule for rule in rules for name in rule.grpc}

    @property
    def http_headers(self) -> frozenset[bytes]:
        """Names of the HTTP headers that open restricted groups, in lower case."""
        return frozenset(header.encode() for header, _ in self._http.values())

    def of_path(self, path: str) -> Guard | None:
        """The guard of an HTTP path, as ``Resource`` writes it."""
        return self._guard(path, self._paths.get(path), self._http, "API", PermissionDenied)

    def of_method(self, name: str) -> Guard | None:
        """The guard of a gRPC method."""
        return self._guard(name, self._methods.get(name), self._grpc, "protocol", Unavailable)

    def _guard(
        self, name: str, rule: AccessRule | None, restrictions: Restrictions, what: str, kind: type[PenstockError]
    ) -> Guard | None:
        if rule is None:
            closed = partial(PermissionDenied, f"'{name}' is closed: no access rule names it")
            return _Closed(Needs.ADMIN, self.access, None, closed)
        restriction = restrictions.get(rule.group)
        if restriction is None and (rule.needs is Needs.NOTHING or not self.access.enabled):
            return None
        header = restriction[0] if restriction else ""
        refusal = partial(kind, f"This {what} is restricted, expecting header '{header}'")
        return Guard(rule.needs, self.access, restriction, refusal)
