"""The access table: the rights that each endpoint requires, over HTTP and gRPC. Endpoints without a rule are closed."""

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
    """The rights that a caller needs if the server has a keys file."""

    NOTHING = enum.auto()
    MODEL = enum.auto()
    """A valid key, and the right to use the model if the request names one."""
    ADMIN = enum.auto()
    """The key of a client with ``admin``."""


class AccessRule(NamedTuple):
    """One row of the table: endpoints that require the same rights."""

    needs: Needs
    http: tuple[str, ...] = ()
    """Paths in the form of ``Resource``; a path covers its versioned form."""
    grpc: tuple[str, ...] = ()
    """Names of methods."""
    group: str = ""
    """Triton's name for the part of the API that one restriction protects; empty if none does."""


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
    # Registering a region makes the server read and write memory with the rights of its own user.
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
            "/v1/models/{model}:explain",
            *(
                f"/v1/models/{{model}}{label}{verb}"
                for label in ("", "/labels/{name}")
                for verb in ("", "/metadata", ":predict", ":classify", ":regress")
            ),
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
"""By group, the header that unlocks it, in lower case, and the header's value."""


def read_restrictions(texts: Iterable[str], prefix: str = "") -> Restrictions:
    """Parse ``group,group:header=value``. Raises InvalidConfig without showing the value, which is a secret."""
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


class Guard:
    """Checks the callers of one endpoint."""

    __slots__ = ("_access", "_header", "_needs", "_refusal", "_value")

    def __init__(
        self,
        needs: Needs,
        access: Access,
        restriction: tuple[str, bytes] | None,
        refusal: Callable[[], PenstockError],
    ) -> None:
        """``refusal`` returns the error for callers without the header and value of ``restriction``."""
        self._needs = needs
        self._access = access
        self._header, self._value = restriction or ("", b"")
        self._refusal = refusal

    def __call__(self, credential: bytes | None, headers: Mapping[str, str | bytes], model: str = "") -> str:
        """The name of the client with this ``credential``; empty if no key is required.

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
    """Returns the guards of endpoints. An endpoint that everyone may use has none, so its requests skip the check."""

    def __init__(
        self,
        access: Access,
        http: Iterable[str] = (),
        grpc: Iterable[str] = (),
        rules: Iterable[AccessRule] = RULES,
    ) -> None:
        """``http`` and ``grpc`` are the restrictions of the protocols, for ``read_restrictions``. Raises InvalidConfig."""
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
        """The guard of an HTTP path, in the form of ``Resource``; None if everyone may use it."""
        return self._guard(path, self._paths.get(path), self._http, "API", PermissionDenied)

    def of_method(self, name: str) -> Guard | None:
        """The guard of a gRPC method; None if everyone may use it."""
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
