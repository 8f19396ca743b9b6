"""The published description is valid, complete, and matches a running server."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from http_servers import LOOPS, GatedServer, get, infer
from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.openapi import document
from penstock.online.server.http.resources import make_resources


def no_bug(context: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """501 and 503 are valid responses, and 500 is Triton's response to one mistake of clients."""
    assert response.status_code != 500 or "Unable to open shared memory region" in response.text, response.text


CHECKS = [
    no_bug,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
NO_PLANE = cast(Any, SimpleNamespace(shared_memory=None, response_limit=ResponseLimit()))
"""Nothing is asked of it."""
RESOURCES = make_resources(NO_PLANE, NO_PLANE, Access(None, ManualClock()), ServerConfig())
DOCUMENT = document(RESOURCES)


@schemathesis.serializer("image/*", "audio/*")
def as_bytes(context: object, value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


SCHEMA = schemathesis.openapi.from_dict(json.loads(DOCUMENT))


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with GatedServer(sorted(LOOPS)[0]) as server:
        yield server


def test_it_describes_exactly_what_is_served() -> None:
    described = {
        path: {method.upper() for method in operations if method != "parameters"}
        for path, operations in json.loads(DOCUMENT)["paths"].items()
    }
    served = {
        path: {method.decode() for method in resource.handlers} for resource in RESOURCES for path in resource.paths
    }
    assert described == served


def test_every_reference_leads_somewhere() -> None:
    schemas = json.loads(DOCUMENT)["components"]["schemas"]
    assert set(re.findall(rb'"#/components/schemas/(\w+)"', DOCUMENT)) == {name.encode() for name in schemas}


def test_it_is_published(server: GatedServer) -> None:
    assert server.connect().ask(get("/openapi.json")).body == DOCUMENT


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=6, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
def test_what_it_says_is_true(case: schemathesis.Case, server: GatedServer) -> None:
    case.call_and_validate(base_url="http://{}:{}".format(*server.address), checks=CHECKS)
    assert server.connect().ask(infer(21)).data == [42, 0]
