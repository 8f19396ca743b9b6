"""TorchServe's inference API, as its clients use it for models without a handler."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dialect_models import ask, dialect_server, read
from http_servers import Client, GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access

JSON = "Content-Type: application/json\r\n"
RAW = "Content-Type: application/octet-stream\r\n"
FORM = "Content-Type: multipart/form-data; boundary=xyz\r\n"
IMAGE = b"\xff\xd8\xff\xe0 a picture"


def form(*parts: tuple[str, str, bytes]) -> bytes:
    """A form with parts of name, content type and content."""
    written = [
        f'--xyz\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\nContent-Type: {kind}\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, kind, content in parts
    ]
    return b"".join(written) + b"--xyz--\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with dialect_server() as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


RAW_ROWS = np.array([[1, 2], [3, 4]], np.float32).tobytes()


@pytest.mark.parametrize(
    ("model", "headers", "body", "answer"),
    [
        ("m", JSON, {"data": [[1, 2], [3, 4]]}, [[2, 4], [6, 8]]),
        ("m", JSON, {"data": [1, 2]}, [2, 4]),
        ("m", JSON, [1, 2], [2, 4]),
        ("m", JSON, {"x": [[1, 2]]}, [[2, 4]]),
        ("m", "Content-Type: application/json; charset=utf-8\r\n", {"body": [1, 2]}, [2, 4]),
        ("m", "", [1, 2], [2, 4]),
        ("m", "Content-Type: application/x-www-form-urlencoded\r\n", [[1, 2]], [[2, 4]]),
        ("m", RAW, RAW_ROWS, [[2, 4], [6, 8]]),
        ("m/1", RAW, RAW_ROWS, [[2, 4], [6, 8]]),
        ("m", FORM, form(("data", "application/octet-stream", RAW_ROWS)), [[2, 4], [6, 8]]),
        ("m", FORM, form(("anything", "application/json", b"[1, 2]")), [2, 4]),
        (
            "pair",
            FORM,
            form(("n", "application/json", b"[5]"), ("x", "application/octet-stream", RAW_ROWS[:8])),
            {"y": [[2, 3]], "z": [10]},
        ),
        ("pair", JSON, {"x": [1, 2], "n": 5}, {"y": [2, 3], "z": 10}),
        ("half_plus_two", JSON, 3, 3.5),
        ("half_plus_two", JSON, [3, 4], [3.5, 4]),
        ("many/1", JSON, [0], [1]),
        ("plain", JSON, [1, 2, 3], {"sum": 6, "q": [2, 4, 6]}),
        ("words", "Content-Type: text/plain\r\n", b"[hi", {"s": [["[hi"]], "s_bytes": [[{"b64": "W2hp"}]]}),
        ("words", "", b"hi", {"s": [["hi"]], "s_bytes": [[{"b64": "aGk="}]]}),
        ("words", "Content-Type: image/jpeg\r\n", b"\xff", {"s": [[{"b64": "/w=="}]], "s_bytes": [[{"b64": "/w=="}]]}),
        ("words", JSON, ["hi"], {"s": ["hi"], "s_bytes": [{"b64": "aGk="}]}),
    ],
)
def test_predictions(client: Client, model: str, headers: str, body: Any, answer: Any) -> None:
    assert read(ask(client, f"/predictions/{model}", body, headers=headers)) == answer
    assert read(ask(client, f"/predictions/{model}", body, "PUT", headers)) == answer


@pytest.mark.parametrize(
    ("model", "headers", "body", "status", "kind", "message"),
    [
        ("m", "Content-Type: image/jpeg\r\n", IMAGE, 415, "BadRequestException", "no handler to decode"),
        ("m", "", IMAGE, 415, "BadRequestException", "no handler to decode"),
        ("m", FORM, form(("data", "image/png", IMAGE)), 415, "BadRequestException", "no handler to decode"),
        ("m", JSON, b"{", 400, "BadRequestException", "JSON Parse error"),
        ("m", JSON, {"z": 1}, 400, "BadRequestException", "['z'] are not the model's inputs"),
        ("m", JSON, [1, 2, 3], 400, "BadRequestException", "unexpected shape"),
        ("m", RAW, b"123", 400, "BadRequestException", "cannot have 3 bytes"),
        ("pair", JSON, [1], 400, "BadRequestException", "several inputs"),
        ("pair", RAW, b"", 400, "BadRequestException", "several inputs"),
        ("pair", JSON, {"x": [[1, 2]]}, 400, "BadRequestException", "missing required input(s) ['n']"),
        ("pair", FORM, form(("x", "", b"1"), ("x", "", b"1")), 400, "BadRequestException", "is repeated"),
        (
            "pair",
            FORM,
            form(("x", "", b"1"), ("z", "", b"1")),
            400,
            "BadRequestException",
            "'z' is repeated, or not an input",
        ),
        ("m", FORM, b"--xyz", 400, "BadRequestException", "no parts"),
        ("nobody", JSON, [1], 404, "ModelNotFoundException", "'nobody' is not found"),
        ("m/7", JSON, [1], 404, "ModelNotFoundException", "version 7 is not found"),
    ],
)
def test_errors(client: Client, model: str, headers: str, body: Any, status: int, kind: str, message: str) -> None:
    error = read(ask(client, f"/predictions/{model}", body, headers=headers), status)
    assert (error["code"], error["type"]) == (status, kind)
    assert message in error["message"]


def test_the_server_itself(server: GatedServer, client: Client) -> None:
    assert read(ask(client, "/ping")) == {"status": "Healthy"}
    server.call(server.dataplane.close)
    try:
        assert "Unhealthy" in read(ask(client, "/ping"), 503)["message"]
    finally:
        server.call(server.dataplane.open)
    assert ask(client, "/", method="OPTIONS").body == client.ask(get("/openapi.json")).body
    explained = read(ask(client, "/explanations/m", [1]), 501)
    assert explained["type"] == "UnsupportedOperationException"
    refused = read(ask(client, "/predictions/m"), 405)
    assert (refused["code"], refused["type"]) == (405, "MethodNotAllowedException")
    assert read(ask(client, "/"))["status"] == "alive"


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[clients.alice]\nkey = "alice key 012345"\nmodels = ["half*"]\n')
    alice = "Authorization: Bearer alice key 012345\r\n"
    with dialect_server(access=Access(file, ManualClock())) as server:
        client = server.connect()
        assert read(ask(client, "/ping")) == {"status": "Healthy"}
        error = read(ask(client, "/predictions/half_plus_two", [1]), 401)
        assert error["type"] == "InvalidKeyException"
        assert read(ask(client, "/predictions/half_plus_two", [1], headers=alice)) == [2.5]
        assert read(ask(client, "/predictions/m", [1, 2], headers=alice), 403)["code"] == 403


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.sampled_from(["m", "pair", "words", "halves", "plain", "nobody"]),
    kind=st.sampled_from([JSON, RAW, FORM, "", "Content-Type: image/png\r\n", "Content-Type: multipart/form-data\r\n"]),
    body=st.binary(max_size=60)
    | st.sampled_from([b"[1, 2]", b"[[1], [2, 3]]", b"null", b'{"data": null}', b'{"x": {}}', b"[[[]]]", b"NaN"])
    | st.lists(st.tuples(st.sampled_from(["x", "n", ""]), st.sampled_from(["", "a/b"]), st.binary(max_size=8))).map(
        lambda parts: form(*parts)
    ),
)
def test_nothing_that_is_sent_is_a_fault_of_ours(server: GatedServer, model: str, kind: str, body: bytes) -> None:
    with Client(server.address) as client:
        answer = client.ask(post(body, kind, f"/predictions/{model}"))
        assert answer.status in (200, 400, 404, 415), answer.body
        assert answer.status == 200 or set(json.loads(answer.body)) == {"code", "type", "message"}
