"""Requests that cost the server far more than the attacker: small bodies that decompress to large ones, and long texts that take
time to parse.

Every body is valid and as large as the server's default limits allow, unless the attack's name says otherwise.
"""

from __future__ import annotations

import functools
import gzip
import struct
from collections.abc import Awaitable, Callable

import numpy as np

from benchmarks.attacks.site import Attack, Site
from benchmarks.attacks.wire import H2Wire, HttpWire
from penstock.perf.grpc_client import framed
from penstock.perf.oip_client import infer_message
from penstock.protocol import messages

MODEL = "wide"
"""Name of the identity model, whose rows have ``COLUMNS`` numbers."""
COLUMNS = 4096
ROWS = 1000
"""Number of rows. Each number takes four bytes, so a body has 15.6 MiB, both as JSON and as FP32."""
_OVERSIZED_BYTES = 56 << 20
_LOG_BYTES = 60 << 10
_GZIP = "Content-Encoding: gzip\r\n"
_INFER = f"/v2/models/{MODEL}/infer"


@functools.cache
def _json() -> bytes:
    numbers = b"0.5," * (ROWS * COLUMNS - 1) + b"0.5"
    return b'{"inputs":[{"name":"input","datatype":"FP32","shape":[%d,%d],"data":[%b]}]}' % (ROWS, COLUMNS, numbers)


@functools.cache
def _nested_json() -> bytes:
    row = b"[" + b"0.5," * (COLUMNS - 1) + b"0.5]"
    return b'{"input":[' + b",".join([row] * (ROWS - 1)) + b"]}"


@functools.cache
def _tensor() -> tuple[bytes, str]:
    """A compressed binary tensor, and the headers that describe it."""
    size = ROWS * COLUMNS * 4
    head = (
        b'{"inputs":[{"name":"input","datatype":"FP32","shape":[%d,%d],"parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}'
    ) % (ROWS, COLUMNS, size)
    return _packed(head + bytes(size)), f"{_GZIP}Inference-Header-Content-Length: {len(head)}\r\n"


def _packed(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


@functools.cache
def _packed_json() -> bytes:
    return _packed(_json())


@functools.cache
def _packed_nested() -> bytes:
    return _packed(_nested_json())


@functools.cache
def _packed_spaces() -> bytes:
    return _packed(b" " * _OVERSIZED_BYTES)


@functools.cache
def _oversized() -> bytes:
    return b'{"inputs":[' + b" " * _OVERSIZED_BYTES


@functools.cache
def _log_settings() -> bytes:
    return b'{"log_format":"%b"}' % (b"x" * _LOG_BYTES)


@functools.cache
def _packed_message() -> bytes:
    """A compressed gRPC message with one raw tensor."""
    packed = _packed(infer_message(MODEL, {"input": np.zeros((ROWS, COLUMNS), np.float32)}))
    return b"\1" + struct.pack(">I", len(packed)) + packed


@functools.cache
def _typed_message() -> bytes:
    """A gRPC message whose tensor is a list of protobuf floats."""
    message = messages.ModelInferRequest(model_name=MODEL)
    tensor = message.inputs.add(name="input", datatype="FP32", shape=[ROWS, COLUMNS])
    tensor.contents.fp32_contents.extend(np.full(ROWS * COLUMNS, 0.5, np.float32))
    return framed(message.SerializeToString())


@functools.cache
def _packed_typed() -> bytes:
    packed = _packed(_typed_message()[5:])
    return b"\1" + struct.pack(">I", len(packed)) + packed


def _posting(
    path: str, make: Callable[[], bytes | tuple[bytes, str]], headers: str = ""
) -> Callable[[Site], Awaitable[None]]:
    """One HTTP connection that repeats the same request as soon as it is answered."""

    async def run(site: Site) -> None:
        made = make()
        body, more = made if isinstance(made, tuple) else (made, headers)
        async with HttpWire(site) as wire:
            request = wire.request(path, body, f"Content-Type: application/json\r\n{more}")
            while True:
                await wire.ask(request)

    return run


def _calling(make: Callable[[], bytes], encoding: str = "") -> Callable[[Site], Awaitable[None]]:
    """One HTTP/2 connection that repeats the same call as soon as it has ended."""

    async def run(site: Site) -> None:
        message = make()
        async with H2Wire(site) as wire:
            await wire.open()
            while True:
                await wire.unary("ModelInfer", message, encoding=encoding)

    return run


BOMBS = {
    "gzip-tensor": Attack("gzip of a binary tensor over HTTP", _posting(_INFER, _tensor)),
    "gzip-json": Attack("gzip of JSON of 15.6 MiB", _posting(_INFER, _packed_json, _GZIP)),
    "gzip-oversized": Attack("gzip of 56 MiB where 16 are allowed", _posting(_INFER, _packed_spaces, _GZIP)),
    "gzip-message": Attack("gzip of a gRPC message of 15.6 MiB", _calling(_packed_message, "gzip")),
    "json": Attack("JSON of 15.6 MiB", _posting(_INFER, _json)),
    "json-oversized": Attack("JSON of 56 MiB where 16 are allowed", _posting(_INFER, _oversized)),
    "typed-contents": Attack("a gRPC message with 4 million typed numbers", _calling(_typed_message)),
    "gzip-typed": Attack("gzip of a gRPC message with 4 million typed numbers", _calling(_packed_typed, "gzip")),
    "generate": Attack("gzip of nested lists to /generate", _posting(f"/v2/models/{MODEL}/generate", _packed_nested, _GZIP)),
    "logging": Attack("a setting of 60 KiB to /v2/logging", _posting("/v2/logging", _log_settings)),
    "gzip-logging": Attack("gzip of 56 MiB to /v2/logging", _posting("/v2/logging", _packed_spaces, _GZIP)),
}  # fmt: skip
