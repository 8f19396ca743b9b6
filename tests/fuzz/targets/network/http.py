"""Fuzzes the HTTP/1.1 connection and everything behind it."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Sequence
from random import Random

import httptools
import numpy as np

from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.http.context import HttpContext
from penstock.online.server.http.resources import make_resources
from tests.fuzz.connection import Lab
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import lines, words
from tests.fuzz.target import Target

_LENGTH = re.compile(rb"(?i)(\r\ncontent-length:) *\d*")
_X = np.array([[1, 2]], np.float32)
_TENSOR = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
_VALID = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
_EXPECTED = b'"outputs":[{"name":"y","datatype":"FP32","shape":[1,2],"data":[2.0,4.0]}]}'


def head(path: str, *headers: str, method: str = "POST", version: str = "1.1") -> list[bytes]:
    """Of a request, in lines; without its end."""
    return [f"{method} {path} HTTP/{version}\r\n".encode(), *(f"{line}\r\n".encode() for line in ("Host: x", *headers))]


def request(path: str, body: bytes, *headers: str, version: str = "1.1", parts: Sequence[bytes] = ()) -> Seed:
    """With the length of its body; ``parts`` is the body again, where it has any."""
    lines = head(path, *headers, f"Content-Length: {len(body)}", version=version)
    return (*lines, b"\r\n", *(parts or (body,)))


def binary(path: str, about: dict[str, object], *tensors: bytes) -> Seed:
    """JSON followed by raw tensors."""
    text = json.dumps(about).encode()
    parts = [*words(text), *tensors]
    return request(path, b"".join(parts), f"Inference-Header-Content-Length: {len(text)}", parts=parts)


def chunked(path: str, body: bytes, *headers: str) -> Seed:
    """In two chunks, with an extension and a trailer."""
    middle = len(body) // 2
    chunks = [b"%x;ext=1\r\n" % middle, body[:middle], b"\r\n%x\r\n" % (len(body) - middle), body[middle:]]
    lines = head(path, "Transfer-Encoding: chunked", *headers)
    return (*lines, b"\r\n", *chunks, b"\r\n0\r\n", b"X-Sum: 1\r\n", b"\r\n")


def _seeds() -> list[Seed]:
    infer, plain = "/v2/models/m/infer", json.dumps({"id": "7", "inputs": [_TENSOR]}).encode()
    raw = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    text = {"name": "t", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 13}}
    wanted = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}], "parameters": {"priority": 1}}
    classes = {"outputs": [{"name": "y", "parameters": {"classification": 1}}]}
    many = json.dumps({"inputs": [_TENSOR | {"shape": [8, 2], "data": [[n, 0.5] for n in range(8)]}]}).encode()
    strings = json.dumps({"inputs": [{"name": "t", "shape": [2, 1], "datatype": "BYTES", "data": ["a", "é\u0000"]}]})
    pair = [
        {"name": "a", "shape": [2], "datatype": "INT32", "data": [1, -2]},
        {"name": "b", "shape": [2, 1], "datatype": "BOOL", "data": [[True], [False]]},
    ]
    region = {"key": "/penstock_fuzz", "offset": 0, "byte_size": 64}
    leased = {"name": "x", "shape": [1, 2], "datatype": "FP32"}
    leased["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    seeds = [
        request(infer, plain, parts=words(plain)),
        request(infer, plain, "Accept-Encoding: gzip", version="1.0", parts=words(plain)),
        request(infer, plain, "Connection: close", 'Authorization: Bearer "k"', parts=words(plain)),
        request(infer, many, "Accept-Encoding: deflate;q=0.5, gzip;q=0.1", parts=words(many)),
        binary(infer, {"inputs": [raw], **wanted}, _X.tobytes()),
        binary(infer, {"inputs": [raw], "parameters": {"binary_data_output": True}}, _X.tobytes()),
        binary("/v2/models/text/infer", {"inputs": [text]}, b"\x01\0\0\0a", b"\x04\0\0\0bcde"),
        request("/v2/models/text/versions/1/infer", strings.encode(), parts=words(strings.encode())),
        request("/v2/models/pair/infer", json.dumps({"inputs": pair}).encode()),
        request(infer, _X.tobytes(), "Inference-Header-Content-Length: 0"),
        request(infer, gzip.compress(plain, mtime=0), "Content-Encoding: gzip"),
        request(infer, zlib.compress(many), "Content-Encoding: deflate"),
        request(infer, gzip.compress(bytes(100_000), mtime=0), "Content-Encoding: gzip"),
        chunked(infer, plain),
        chunked(infer, gzip.compress(plain, mtime=0), "Content-Encoding: gzip"),
        (*request(infer, plain, "Expect: 100-continue"),),
        request(infer, json.dumps({"inputs": [_TENSOR], **classes}).encode()),
        request(infer, json.dumps({"inputs": [leased]}).encode()),
        request("/v2/systemsharedmemory/region/r/register", json.dumps(region).encode()),
        request("/v2/models/m/generate", b'{"x":[1,2],"id":"g","parameters":{"timeout":1000}}'),
        request("/v2/models/repeat/generate_stream", b'{"x":[[1,2],[3,4]]}'),
        request("/v2/models/repeat/generate_stream", b'{"x":[[1,2],[3,4]]}', version="1.0"),
        request("/v2/repository/index", b'{"ready":true}'),
        request("/v2/models/m/trace/setting", b'{"trace_rate":"2","trace_level":["OFF"]}'),
        request("/v2/logging", b'{"log_verbose_level":0}'),
        request("/v2/cudasharedmemory/region/c/register", b"{}"),
    ]
    paths = ("/v2", "/v2/health/ready", "/v2/models/m", "/v2/models/m/config", "/v2/models/stats", "/openapi.json")
    seeds += [(*head(path, "Accept-Encoding: gzip", method="GET"), b"\r\n") for path in paths]
    seeds.append((*head("/v2/health/live", "Connection: Upgrade", "Upgrade: h2c", method="GET"), b"\r\n"))
    seeds.append(tuple(map(b"".join, seeds[:5])))
    return seeds


class HttpTarget(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\r\n\r\n",
        b"\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Content-Length: 0\r\n",
        b"Content-Length: 99999999999\r\n",
        b"Inference-Header-Content-Length: 5\r\n",
        b"Expect: 100-continue\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Connection: close\r\n",
        b"HEAD",
        b"HTTP/1.0",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"[" * 2000,
        b'{"a":' * 500,
        b'"binary_data_size":4',
        b'"shared_memory_region":"r"',
        b'"classification":1000000000',
        b"NaN",
        b"1e999",
        b"-0",
        b"null",
        b"true",
        b"\\ud800",
        b"\xed\xa0\x80",
        b"%00",
        b"%ff",
    )

    def __init__(self) -> None:
        self.seeds = _seeds()
        self._lab = Lab()
        planes = self._lab.planes
        resources = make_resources(planes.dataplane, planes.control, planes.access, planes.config)
        self._context = HttpContext(resources, planes.table, planes.config, planes.connections, planes.budget)
        self._valid = b"".join(request("/v2/models/m/infer", _VALID))

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        data = b"".join(parts)
        end = data.find(b"\r\n\r\n")
        if end > 0 and random.random() < 0.5:
            size = len(data) - end - 4
            data = _LENGTH.sub(lambda found: found[1] + b" %d" % size, data[:end], 1) + data[end:]
        return data

    def split(self, data: bytes) -> Seed:
        head, end, body = data.partition(b"\r\n\r\n")
        return (*lines(head), end, *words(body))

    def run(self, data: bytes) -> None:
        written = b"".join(self._lab.try_out(self._connect, data).written)
        if b"HEAD" not in data:  # answers to HEAD have no body, which the parser of answers cannot know
            check_answers(written)
        answer = self._lab.ask(self._connect, self._valid)
        assert answer.endswith(_EXPECTED), answer

    def close(self) -> None:
        self._lab.close()

    def _connect(self) -> Http1Connection:
        return Http1Connection(self._context)


class _Answers:
    def __init__(self) -> None:
        self.finals = 0

    def on_status(self, reason: bytes) -> None:
        assert reason


def check_answers(written: bytes) -> None:
    """``written`` is a row of well-formed answers, of which the last may be cut off."""
    parser = httptools.HttpResponseParser(_Answers())
    try:
        parser.feed_data(written)
    except httptools.HttpParserError as error:
        raise AssertionError(f"the server wrote what is no HTTP: {error}: {written[-600:]!r}") from error
    except httptools.HttpParserUpgrade as error:
        raise AssertionError("the server changed the protocol") from error
