"""The access table: the rights that each HTTP and gRPC endpoint requires. Endpoints without a rule are closed."""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, PenstockError, PermissionDenied, Unavailable
from penstock.online.server.access.admission import Admission
from penstock.online.server.access.auth import Access


class Needs(enum.Enum):
    """The rights that a client needs if the server has a keys file."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    """A valid key, and the right to use the model if the request names one."""
    ADMIN = enum.auto()
    """The key of a client with ``admin``."""


class AccessRule(NamedTuple):
    """One row of the table: endpoints that require the same rights."""

    needs: Needs
    http: tuple[str, ...] = ()
    """Paths, written as in ``Resource``. A path also covers its variant with ``/versions/{version}``."""
    grpc: tuple[str, ...] = ()
    """Names of gRPC methods."""
    group: str = ""
    """Triton's name for the group of endpoints that a restriction can protect; empty if no restriction can apply."""
    counts: bool = False
    """True if each request counts towards the client's rate. On a stream, each message counts instead of the stream."""


def _regions(kind: str) -> tuple[str, ...]:
    base = f"/v2/{kind}sharedmemory"
    region = f"{base}/region/{{name}}"
    return f"{base}/status", f"{base}/unregister", f"{region}/status", f"{region}/register", f"{region}/unregister"


_LABEL = "/labels/{name}"

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
        tuple(f"/v2/models/{{model}}/{verb}" for verb in ("infer", "run", "generate", "generate_stream")),
        ("ModelInfer",),
        "inference",
        counts=True,
    ),
    AccessRule(Needs.MODEL, (), ("ModelStreamInfer",), "inference"),
    # After registration, the server reads and writes the memory with the rights of its own user.
    AccessRule(
        Needs.ADMIN,
        (*_regions("system"), *_regions("cuda")),
        tuple(
            f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")
        ),
        "shared-memory",
    ),
    AccessRule(Needs.MODEL, ("/v2/models/{model}/config",), ("ModelConfig",), "model-config"),
    AccessRule(
        Needs.MODEL, ("/v2/repository/index", "/v2/repository/{name}/index"), ("RepositoryIndex",), "model-repository"
    ),
    AccessRule(
        Needs.ADMIN,
        tuple(
            f"/v2/repository{name}/models/{{model}}/{verb}" for name in ("", "/{name}") for verb in ("load", "unload")
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
            "/v1/config",
            *(f"/v1/models/{{model}}{label}{what}" for label in ("", _LABEL) for what in ("", "/metadata")),
        ),
    ),
    AccessRule(
        Needs.MODEL,
        (
            "/v1/models/{model}:explain",
            *(
                f"/v1/models/{{model}}{label}:{verb}"
                for label in ("", _LABEL)
                for verb in ("predict", "classify", "regress")
            ),
            *(
                f"/{what}/{{model}}{version}"
                for what in ("predictions", "explanations")
                for version in ("", "/{version}")
            ),
        ),
        counts=True,
    ),
    AccessRule(Needs.ADMIN, ("/monitoring/prometheus/metrics",)),
)

GROUPS = tuple(dict.fromkeys(rule.group for rule in RULES if rule.group))

Restrictions = Mapping[str, tuple[str, bytes]]
"""For each restricted group, the name (in lower case) and the value of the header that gives access to it."""


def read_restrictions(texts: Iterable[str], prefix: str = "") -> Restrictions:
    """Parse ``group,group:header=value``. Raises InvalidConfig. The error message omits the value, because it is a secret."""
    restrictions: dict[str, tuple[str, bytes]] = {}
    for text in texts:
        match = re.fullmatch(r"([^:]+):([^=]+)=(.+)", text)
        if match is None:
            raise InvalidConfig("a restriction lacks the API, header or value", "write api,api:header=value")
        for api in match[1].split(","):
            if api not in GROUPS:
                raise InvalidConfig(f"unknown restricted API '{api:.40}'", did_you_mean(api, GROUPS))
            if api in restrictions:
                raise InvalidConfig(f"restricted API '{api}' can not be specified in multiple config groups")
            restrictions[api] = (f"{prefix}{match[2]}".lower(), match[3].encode())
    return restrictions


class Restriction(NamedTuple):
    """A header that gives access to a group of endpoints if it has the right value."""

    header: str
    value: bytes
    refusal: Callable[[], PenstockError]
    """Creates the error for clients that do not send the value."""


class Guard:
    """Checks the clients of one endpoint."""

    __slots__ = ("_access", "_admission", "_needs", "_restrictions")

    def __init__(
        self, needs: Needs, access: Access, restrictions: Iterable[Restriction] = (), admission: Admission | None = None
    ) -> None:
        """``admission`` counts the requests. If it is None, requests are not counted."""
        self._needs = needs
        self._access = access
        self._restrictions = tuple(restrictions)
        self._admission = admission

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        """The name of the client with this ``credential``; empty if no key is required.

        Raises Unauthenticated, PermissionDenied, ResourceExhausted, Unavailable.
        """
        for restriction in self._restrictions:
            given = headers.get(restriction.header, b"")
            if not secrets.compare_digest(given.encode() if isinstance(given, str) else given, restriction.value):
                raise restriction.refusal()
        if self._needs is Needs.NOTHING:
            return ""
        client = self._access.identify(credential)
        if self._needs is Needs.ADMIN:
            self._access.require_admin(client)
        elif model:
            self._access.check(client, model)
        if self._admission is not None:
            self._admission.enter(client)
        return client


class _Closed(Guard):
    """Refuses all clients."""

    __slots__ = ("_name",)

    def __init__(self, name: str, access: Access) -> None:
        super().__init__(Needs.ADMIN, access)
        self._name = name

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        raise PermissionDenied(f"'{self._name}' is closed, since it has no access rule")


_VITAL_PATHS = "/v2/health/live", "/v2/health/ready", "/ping", "/metrics", "/monitoring/prometheus/metrics"
_VITAL = frozenset([*_VITAL_PATHS, "ServerLive", "ServerReady", "Check"])
"""Endpoints for monitoring. They can also be used over spare connections."""


class _Full(Guard):
    """Refuses all clients with a temporary error."""

    __slots__ = ()

    def __init__(self, access: Access) -> None:
        super().__init__(Needs.NOTHING, access)

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        raise Unavailable("too many connections", "try again later")


class AccessTable:
    """Returns the guards of the endpoints of one port. An endpoint that all clients may use has no guard."""

    def __init__(
        self,
        access: Access,
        http: Iterable[str] = (),
        grpc: Iterable[str] = (),
        rules: Iterable[AccessRule] = RULES,
        admission: Admission | None = None,
        port: str = "",
        is_spare: bool = False,
    ) -> None:
        """``http`` and ``grpc`` are the restrictions of the two protocols, as texts for ``read_restrictions``. ``admission``
        counts requests.

        The restrictions of a protocol apply to this protocol on every port. On the protocol's own ``port`` (``http`` or ``grpc``),
        they also apply to the other protocol, so that clients cannot evade restrictions by switching protocols. Set ``is_spare``
        for connections over the limit, which admit only monitoring. Raises InvalidConfig.
        """
        self.access = access
        self._admission = admission
        self._http = read_restrictions(http)
        self._grpc = read_restrictions(grpc, "triton-grpc-protocol-")
        self._port = port
        self._is_spare = is_spare
        self._paths = {path: rule for rule in rules for path in rule.http}
        self._methods = {name: rule for rule in rules for name in rule.grpc}

    @property
    def http_headers(self) -> frozenset[bytes]:
        """Names, in lower case, of the HTTP headers that give access to restricted groups."""
        return frozenset(header.encode() for group in (self._http, self._grpc) for header, _ in group.values())

    def of_path(self, path: str) -> Guard | None:
        """The guard of an HTTP path, which is written as in ``Resource``; None if all clients may use the path."""
        others = self._grpc if self._port == "grpc" else {}
        return self._guard(path, self._paths.get(path), PermissionDenied, "API", self._http, others)

    def of_method(self, name: str) -> Guard | None:
        """The guard of a gRPC method; None if all clients may use the method."""
        others = self._http if self._port == "http" else {}
        return self._guard(name, self._methods.get(name), Unavailable, "protocol", self._grpc, others)

    def _guard(
        self, name: str, rule: AccessRule | None, kind: type[PenstockError], what: str, *restrictions: Restrictions
    ) -> Guard | None:
        if rule is None:
            return _Closed(name, self.access)
        if self._is_spare and name not in _VITAL:
            return _Full(self.access)
        found = [
            Restriction(header, value, partial(kind, f"This {what} is restricted, expecting header '{header}'"))
            for header, value in (each[rule.group] for each in restrictions if rule.group in each)
        ]
        if not found and (rule.needs is Needs.NOTHING or not self.access.enabled):
            return None
        return Guard(rule.needs, self.access, found, self._admission if rule.counts else None)
