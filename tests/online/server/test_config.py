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
        ({"allow_http": False, "allow_grpc": False}, "either HTTP or gRPC has to be allowed"),
        ({"max_inflight_bytes": 1}, "'max_inflight_bytes' must be at least 'max_request_bytes'"),
        ({"model_repository": [""]}, "'model_repository' has an empty path"),
        ({"repository_poll_secs": float("inf")}, "'repository_poll_secs' must be a finite number"),
        ({"repository_poll_secs": float("nan")}, "'repository_poll_secs'"),
        ({"drain_timeout_s": float("inf")}, "'drain_timeout_s' must be a finite number"),
        ({"processes": 1025}, "'processes' from the file is wrong: Expected `int` <= 1024"),
        ({"processes": 2, "isolation": "process"}, "cannot be combined with 'isolation' process"),
        ({"processes": 2, "unix_socket": "s"}, "cannot listen on one 'unix_socket'"),
        ({"allow_origin": ["app.example"]}, "'allow_origin' has 'app.example': write https://name"),
        ({"allow_origin": ["https://app.example/"]}, "'allow_origin' has"),
        ({"allow_origin": ["null"]}, "'allow_origin' has 'null'"),
        ({"http_restricted_api": ["health:key=value"]}, "'dialects' would bypass 'http_restricted_api'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve(ServerConfig, "server", settings)
