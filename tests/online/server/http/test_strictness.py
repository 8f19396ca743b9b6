"""Ambiguous requests: the server refuses requests that a proxy could parse differently, so that no request can hide in another one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from http_servers import LOOPS, GatedServer, get
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig

BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 0]}]}).encode()
PACKED = gzip.compress(BODY, mtime=0)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = f"Content-Length: {len(BODY)}\r\n"
CODING = "Transfer-Encoding: "
HIDDEN = get("/v2/models/hidden")
"""A request that follows in the same bytes; it must not be answered after a refusal."""


@pytest.fixture(scope="module", params=LOOPS)
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    with GatedServer(request.param) as server:
        yield server


def head(fields: str, line: str = "POST /v2/models/m/infer HTTP/1.1", host: str = "Host: localhost\r\n") -> bytes:
    return f"{line}\r\n{host}{fields}\r\n".encode("latin-1")


def status_of(server: GatedServer, request: bytes) -> int:
    """The status of ``request``. After a refusal, the connection is closed without a response to further data."""
    client = server.connect()
    client.send(request + HIDDEN)
    answer = client.read()
    if answer.headers.get("connection") == "close":
        assert client.is_closed
    else:
        assert client.read().error.startswith("Request for unknown model: 'hidden'")
    client.close()
    return answer.status


@pytest.mark.parametrize(
    ("fields", "body", "status"),
    [
        (LENGTH, BODY, 200),
        (CODING + "chunked\r\n", CHUNKED, 200),
        (CODING + "CHUNKED\r\n", CHUNKED, 200),
        (CODING + "gzip, chunked\r\n", CHUNKED, 501),
        (CODING + "identity, chunked\r\n", CHUNKED, 501),
        (CODING + "gzip\r\n" + CODING + "chunked\r\n", CHUNKED, 501),
        (CODING + "xchunked\r\n", CHUNKED, 501),
        (CODING + "chunked;q=1\r\n", CHUNKED, 501),
        (CODING + "identity\r\n", BODY, 501),
        (CODING + "chunked, gzip\r\n", CHUNKED, 400),
        (CODING + "chunked\r\n" + CODING + "chunked\r\n", CHUNKED, 400),
        (CODING + "chunked, chunked\r\n", CHUNKED, 400),
        (CODING + "\r\n" + LENGTH, BODY, 400),
        (CODING + "chunked\r\n" + LENGTH, CHUNKED, 400),
        (LENGTH + CODING + "chunked\r\n", CHUNKED, 400),
        (LENGTH + CODING + "identity\r\n", BODY, 400),
        (LENGTH + LENGTH, BODY, 400),
        (LENGTH + "Content-Length: 3\r\n", BODY, 400),
        (f"Content-Length: {len(BODY)}, {len(BODY)}\r\n", BODY, 400),
        *(
            (f"Content-Length: {text}\r\n", BODY, 400)
            for text in (f"+{len(BODY)}", "-1", "7_0", "0x40", "6 9", "", "9" * 26, "1.0", "٣".encode().decode("latin-1"))
        ),
        (CODING + "chunked\r\n", CHUNKED.replace(b"\r\n", b"\n"), 400),
        *((CODING + "chunked\r\n", prefix + CHUNKED, 400) for prefix in (b"0x", b"+", b" ", b"-", b"1" * 17)),
        (CODING + "chunked\r\n", CHUNKED.replace(b"\r\n", b" \r\n", 1), 400),
        (CODING + "chunked\r\n", CHUNKED.replace(BODY, BODY + b"XX"), 400),
        (CODING + "chunked\r\n", CHUNKED.replace(b"\r\n", b";a\nb\r\n", 1), 400),
        (CODING + "chunked\r\n", CHUNKED.replace(b"\r\n", b";a=b\r\n", 1), 200),
        (CODING + "chunked\r\n", CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n", 400),
        (CODING + "chunked\r\n", CHUNKED[:-2] + b"X: y\r\n\r\n", 200),
    ],
)  # fmt: skip
def test_the_length_of_a_body_is_beyond_doubt(server: GatedServer, fields: str, body: bytes, status: int) -> None:
    assert status_of(server, head(fields) + body) == status


def test_http_1_0_has_no_chunks(server: GatedServer) -> None:
    request = head(CODING + "chunked\r\nConnection: keep-alive\r\n", "POST /v2/models/m/infer HTTP/1.0") + CHUNKED
    assert status_of(server, request) == 400


@pytest.mark.parametrize(
    ("version", "status"), [("1.0", 200), ("1.1", 200), ("2.0", 505), ("0.9", 505), ("1.2", 400), ("3", 400)]
)
def test_versions_of_http(server: GatedServer, version: str, status: int) -> None:
    assert status_of(server, head("", f"GET /v2 HTTP/{version}")) == status


@pytest.mark.parametrize(
    "fields",
    [
        "X: a\r\n b\r\n",
        "Authorization: Bearer\r\n\tb\r\n",
        "X : a\r\n",
        "X Y: a\r\n",
        ": a\r\n",
        "abc\r\n",
        "X\0: a\r\n",
        "X: a\0b\r\n",
        "X: a\x01b\r\n",
        "X: a\x7fb\r\n",
        "X: a\rb\r\n",
        "X: a\rY: b\r\n",
        "X: a\nY: b\r\n",
        "X: a\r\n\n",
    ],
)
def test_malformed_fields_are_refused(server: GatedServer, fields: str) -> None:
    assert status_of(server, head(fields, "GET /v2 HTTP/1.1")) == 400


@pytest.mark.parametrize(
    "line", ["GET /v2\r HTTP/1.1", "GET\t/v2 HTTP/1.1", "GET /v2 x HTTP/1.1", "get /v2 HTTP/1.1", "GET /\x01 HTTP/1.1"]
)
def test_malformed_request_lines_are_refused(server: GatedServer, line: str) -> None:
    assert status_of(server, head("", line)) == 400


@pytest.mark.parametrize(
    "ends", [b"GET /v2 HTTP/1.1\nHost: localhost\n\n", b"GET /v2 HTTP/1.1\r\n Host: localhost\r\n\r\n"]
)
def test_lines_end_with_crlf_and_begin_with_a_name(server: GatedServer, ends: bytes) -> None:
    assert status_of(server, ends) == 400


@pytest.mark.parametrize(
    "name",
    [
        "Inference-Header-Content-Length",
        "Content-Type",
        "Authorization",
        "X-API-Key",
        "Origin",
        "Sec-Fetch-Site",
        "Sec-Fetch-Mode",
        "Host",
    ],
)
def test_headers_that_decide_are_not_repeated(server: GatedServer, name: str) -> None:
    client = server.connect()
    first, second = ("localhost", "localhost") if name == "Host" else ("1", "2")
    host = "" if name == "Host" else "Host: localhost\r\n"
    answer = client.ask(head(f"{name}: {first}\r\n{name.lower()}: {second}\r\n", "GET /v2 HTTP/1.1", host))
    assert (answer.status, f"the header {name.title()} is repeated" in answer.error) == (400, True)


def test_a_header_that_unlocks_is_not_repeated() -> None:
    with GatedServer(http_restricted_api=("model-repository:x-admin=secret",), dialects=()) as server:
        fields = "X-Admin: secret\r\nX-Admin: other\r\n"
        answer = server.connect().ask(head(fields, "GET /v2 HTTP/1.1"))
        assert (answer.status, answer.error) == (400, "the header X-Admin is repeated (send it once)")


@pytest.mark.parametrize(
    ("codings", "body", "status"),
    [
        (("gzip", "identity"), PACKED, 200),
        (("identity", "gzip"), PACKED, 200),
        (("identity",), BODY, 200),
        (("gzip, identity",), PACKED, 200),
        (("gzip", "gzip"), gzip.compress(PACKED, mtime=0), 501),
        (("gzip, deflate",), PACKED, 501),
        (("br", "gzip"), PACKED, 501),
    ],
)
def test_repeated_codings_of_the_content_are_one_list(
    server: GatedServer, codings: tuple[str, ...], body: bytes, status: int
) -> None:
    fields = "".join(f"Content-Encoding: {coding}\r\n" for coding in codings)
    assert status_of(server, head(f"{fields}Content-Length: {len(body)}\r\n") + body) == status


@pytest.mark.parametrize(
    ("url", "host", "status"),
    [
        ("http://localhost/v2", "localhost", 200),
        ("HTTP://localhost:8000/v2", "localhost", 200),
        ("http://localhost/v2", "evil.example", 200),
        ("http://evil.example/v2", "localhost", 403),
        ("http://evil.example?/v2", "localhost", 403),
        ("http://localhost@evil.example/v2", "localhost", 400),
        ("ftp://localhost/v2", "localhost", 400),
        ("http://localhost/v2", "", 403),
        ("localhost:80", "localhost", 400),
        ("*", "localhost", 404),
    ],
)
def test_the_host_of_an_absolute_url_precedes_the_header(strict: GatedServer, url: str, host: str, status: int) -> None:
    assert status_of(strict, head("", f"GET {url} HTTP/1.1", f"Host: {host}\r\n" if host else "")) == (
        status if host else 400
    )


@pytest.fixture(scope="module")
def strict() -> Iterator[GatedServer]:
    """Accepts only the name ``localhost``."""
    with GatedServer(web=WebAccess.of(ServerConfig(), "127.0.0.1")) as server:
        yield server


def test_connect_is_refused_and_upgrades_are_ignored(server: GatedServer) -> None:
    assert status_of(server, head("", "CONNECT localhost:80 HTTP/1.1")) == 501
    assert status_of(server, head("Upgrade: h2c\r\nConnection: Upgrade\r\n", "GET /v2 HTTP/1.1")) == 200


@pytest.mark.parametrize(
    "request_head",
    [
        head("", f"GET /v2/{'a' * (64 << 10)} HTTP/1.1"),
        head(f"X: {'y' * (64 << 10)}\r\n", "GET /v2 HTTP/1.1"),
        head("X: y\r\n" * 2000, "GET /v2 HTTP/1.1"),
        head(CODING + "chunked\r\n") + b"1;" + b"a" * (70 << 10),
    ],
    ids=["url", "field", "fields", "extension"],
)
def test_a_long_head_is_refused(server: GatedServer, request_head: bytes) -> None:
    assert server.connect().ask(request_head).status == 431


def test_extensions_of_chunks_are_bounded_in_all(server: GatedServer) -> None:
    client = server.connect()
    client.send(head(CODING + "chunked\r\n"))
    chunk = b"1;" + b"a" * 4000 + b"\r\n \r\n"
    sent = 0
    try:
        for _ in range(1000):
            client.send(chunk)
            sent += 1
    except OSError:
        pass
    assert client.read().status == 431
    for _ in range(3):  # chunks of one byte are a valid way to send a body
        other = server.connect()
        other.send(head(CODING + "chunked\r\n"))
        for start in range(0, len(BODY), 8):
            other.send(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY[start : start + 8]))
        other.send(b"0\r\n\r\n")
        assert other.read().status == 200


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("%2e%2e", ".."),
        ("..%2fm", "../m"),
        ("m%00", r"m\\x00"),
        ("m%e2%80%ae", r"m\\u202e"),
        ("m%c2%9b2J", r"m\\x9b2J"),
        ("m%0d%0aX:y", r"m\\r\\nX:y"),
        ("m%zz", "m%zz"),
        ("m%7f", r"m\\x7f"),
    ],
)
def test_a_name_is_decoded_once_and_never_a_path(server: GatedServer, name: str, shown: str) -> None:
    answer = server.connect().ask(get(f"/v2/models/{name}"))
    assert answer.status == 404
    assert f"Request for unknown model: '{shown}'".encode() in answer.body
    assert answer.body.isascii()
    assert b"\x7f" not in answer.body


@pytest.mark.parametrize(
    "path", ["/v2/../v2", "/v2/models/..", "/v2/models/m/../m", "//v2", "/v2/%2e%2e/v2", "/v2#x", "/v2/models/m%ff"]
)
def test_paths_are_not_resolved(server: GatedServer, path: str) -> None:
    assert server.connect().ask(get(path)).status == 404


@pytest.mark.parametrize(
    "path", ["/v2/models/m/infer", "/v2/models/m/generate", "/v1/models/m:predict", "/predictions/m"]
)
@pytest.mark.parametrize("text", [rb"\ud800", rb"\udc00", b"\xed\xa0\x80", rb"\u0000\u202e"])
@pytest.mark.parametrize("more", [b"1", b"NaN"])
def test_half_characters_are_refused(server: GatedServer, path: str, text: bytes, more: bytes) -> None:
    body = b'{"id":"%b","x":[[%b,"%b"]],"inputs":{"%b":[%b]},"signature_name":"%b"}' % (
        text,
        more,
        text,
        text,
        more,
        text,
    )
    client = server.connect()
    answer = client.ask(head(f"Content-Length: {len(body)}\r\n", f"POST {path} HTTP/1.1") + body)
    assert answer.status in (400, 415)
    assert answer.body.isascii()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=st.lists(
        st.sampled_from(
            [
                LENGTH,
                "Content-Length: 0\r\n",
                CODING + "chunked\r\n",
                CODING + "gzip\r\n",
                CODING + "identity\r\n",
                "Content-Encoding: identity\r\n",
                "X: y\r\n",
                "X: y\n",
                " X: y\r\n",
                "Content-Length : 3\r\n",
            ]
        ),
        max_size=4,
    ),
    is_chunked=st.booleans(),
)
def test_a_request_with_two_readings_is_never_answered(
    strict: GatedServer, fields: list[str], is_chunked: bool
) -> None:
    told = [each for each in fields if each.startswith(("Content-Length:", "Transfer"))]
    client = strict.connect()
    client.send(head("".join(fields)) + (CHUNKED if is_chunked else BODY))
    status = client.read().status
    client.close()
    if status == 200:
        assert told == [CODING + "chunked\r\n" if is_chunked else LENGTH]
        assert all(each.endswith("\r\n") and not each.startswith(" ") for each in fields)


def test_only_a_browser_without_tls_has_to_name_an_exposed_server() -> None:
    with GatedServer(web=WebAccess.of(ServerConfig(), "0.0.0.0")) as server:
        for fields, status in (
            ("Accept-Language: en\r\n", 403),
            ("Origin: http://evil.example\r\n", 403),
            ("", 200),
            ("Accept-Language: *\r\nSec-Fetch-Mode: cors\r\n", 200),
            ("Accept-Language: en\r\nSec-Fetch-Site: same-origin\r\n", 200),
        ):
            assert status_of(server, head(fields, "GET /v2 HTTP/1.1", "Host: evil.example\r\n")) == status
