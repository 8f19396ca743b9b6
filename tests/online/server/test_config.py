"""Invalid settings of the server."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import resolve
from penstock.errors import InvalidConfig
from penstock.online.server.config import ServerConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        # To the operating system, an empty host means all addresses. A user with an empty variable does not intend that.
        ({"host": ""}, "'host' from the file is wrong"),
        ({"allow_http": False, "allow_grpc": False}, "set at least one to true"),
        ({"max_inflight_bytes": 1}, "'max_inflight_bytes' must be at least 'max_request_bytes'"),
        ({"model_repository": [""]}, "'model_repository' has an empty path"),
        ({"repository_poll_secs": float("inf")}, "'repository_poll_secs' must be a finite number"),
        ({"repository_poll_secs": float("nan")}, "'repository_poll_secs'"),
        ({"drain_timeout_s": float("inf")}, "'drain_timeout_s' must be a finite number"),
        ({"processes": 1025}, "'processes' from the file is wrong: Expected `int` <= 1024"),
        ({"processes": 2, "isolation": "process"}, "'processes' must be 1 if 'isolation' is 'process'"),
        ({"processes": 2, "unix_socket": "s"}, "'processes' must be 1 if 'unix_socket' is set"),
        ({"allow_origin": ["app.example"]}, "'allow_origin' has 'app.example': write https://name"),
        ({"allow_origin": ["https://app.example/"]}, "'https://app.example/': remove the path '/'$"),
        ({"allow_origin": ["http://app.example:80/a/b"]}, "remove the path '/a/b'$"),
        ({"allow_origin": ["null"]}, "'allow_origin' has 'null'"),
        ({"http_restricted_api": ["health:key=value"]}, "'dialects' would bypass 'http_restricted_api'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve(ServerConfig, "server", settings)


OPEN = "every client that reaches '{}' may do everything"
CLEAR = "keys are sent to '{}' in clear text: set 'tls_certificate'"
METRICS = "the metrics port on '{}' requires no key: set 'metrics_host'"
KEYS = {"keys_file": "keys.toml"}
TLS = {"tls_certificate": "cert.pem"}
ANY = {"host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        (ANY, [OPEN.format("0.0.0.0")]),
        (ANY | TLS, [OPEN.format("0.0.0.0")]),
        ({"grpc_host": "10.0.0.7"}, [OPEN.format("10.0.0.7")]),
        ({"grpc_host": "10.0.0.7", "allow_grpc": False}, []),
        (KEYS, []),
        (ANY | KEYS, [CLEAR.format("0.0.0.0"), METRICS.format("0.0.0.0")]),
        (ANY | KEYS | {"allow_metrics": False}, [CLEAR.format("0.0.0.0")]),
        (ANY | KEYS | {"metrics_host": "127.0.0.1"}, [CLEAR.format("0.0.0.0")]),
        (ANY | KEYS | {"metrics_host": "0.0.0.0"}, [CLEAR.format("0.0.0.0")]),
        (ANY | KEYS | TLS, [METRICS.format("0.0.0.0")]),
        (ANY | KEYS | TLS | {"http_tls": False}, [CLEAR.format("0.0.0.0"), METRICS.format("0.0.0.0")]),
        (ANY | KEYS | TLS | {"http_tls": False, "allow_http": False}, [METRICS.format("0.0.0.0")]),
        ({"grpc_host": "10.0.0.7"} | KEYS, [CLEAR.format("10.0.0.7")]),
        (ANY | TLS | {"tls_client_ca": "ca.pem"}, [METRICS.format("0.0.0.0")]),
    ],
)
def test_each_exposure_to_other_machines_has_one_warning(settings: dict[str, Any], expected: list[str]) -> None:
    given = list(ServerConfig(**settings).warnings())
    assert len(given) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(given, expected, strict=True)), given
