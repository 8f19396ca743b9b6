"""Fuzzes the HTTP/2 connection, gRPC's framing in it, and everything behind."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import hpack
import numpy as np

from penstock.online.server.grpc.service import HEALTH, INFERENCE
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.h2.grpc_messages import PREFIX
from penstock.online.server.h2.headers import literal
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2
from penstock.protocol import messages
from tests.fuzz.connection import Lab
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Target

_HEADER_BYTES = 9
_GREETING = (PREFACE, h2.settings({}))
_X = np.array([[1, 2]], np.float32)
_END_ALL = h2.END_HEADERS | h2.END_STREAM


def block(path: str, **headers: str) -> bytes:
    """Of a request, as HPACK without a table, so that tampering with one field leaves the others."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, "te": "trailers", "content-type": "application/grpc"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    return b"".join(literal(name.encode(), value.encode()) for name, value in fields.items())


def message(data: bytes, flag: int = 0) -> bytes:
    """As gRPC frames it."""
    return PREFIX.pack(flag, len(data)) + data


def call(stream_id: int, path: str, *contents: bytes, **headers: str) -> list[bytes]:
    """The frames of one."""
    frames = [h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, block(path, **headers))]
    frames += [h2.frame(h2.DATA, 0, stream_id, content) for content in contents[:-1]]
    return [*frames, h2.frame(h2.DATA, h2.END_STREAM, stream_id, contents[-1] if contents else b"")]


def infer_request(model: str = "m", **fields: Any) -> bytes:
    """A serialized ModelInferRequest for one row."""
    request = messages.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(_X.tobytes())
    return bytes(request.SerializeToString())


def _seeds() -> list[Seed]:
    infer, stream, service = f"/{INFERENCE}/ModelInfer", f"/{INFERENCE}/ModelStreamInfer", f"/{INFERENCE}"
    one, many = infer_request(id="7"), infer_request("repeat")
    packed = gzip.compress(one, mtime=0)
    whole = h2.frame(h2.HEADERS, 0, 1, block(infer)[:30])
    rest = h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(infer)[30:])
    data = h2.frame(h2.DATA, h2.END_STREAM, 1, message(one))
    padded = h2.frame(h2.DATA, h2.PADDED | h2.END_STREAM, 1, b"\x04" + message(one) + bytes(4))
    prioritised = h2.frame(
        h2.HEADERS, h2.PADDED | h2.PRIORITISED | h2.END_HEADERS, 1, b"\x02" + bytes(5) + block(infer) + bytes(2)
    )
    table = hpack.Encoder().encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", infer.encode())])
    table += b"\x40\x0ccontent-type\x10application/grpc"
    seeds: list[list[bytes]] = [
        call(1, infer, message(one)) + call(3, infer, message(one)),
        call(1, infer, message(one), grpc_timeout="20m", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
        call(1, infer, message(packed, 1), grpc_encoding="gzip"),
        call(1, infer, message(one)[:7], message(one)[7:], content_length=str(len(one) + 5)),
        call(1, stream, *[message(one)] * 12),
        call(1, stream, message(many), message(one), message(infer_request("absent")), triton_grpc_error="true"),
        call(1, stream, message(infer_request("repeat")), message(one) + message(one)[:9]),
        call(1, f"/{HEALTH}/Check", message(b"")),
        call(1, f"/{HEALTH}/Watch", message(b"")),
        call(1, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", message(b"\x3a\x00")),
        call(1, f"{service}/ServerMetadata", message(b"")),
        call(1, f"{service}/ModelConfig", message(b"\x0a\x01m")),
        call(1, f"{service}/ModelStatistics", message(b"")),
        call(1, f"{service}/TraceSetting", message(b"\x12\x01m")),
        call(1, f"{service}/SystemSharedMemoryStatus", message(b"")),
        call(1, f"{service}/Nothing", message(b"")),
        [h2.frame(h2.HEADERS, h2.END_HEADERS, 1, table), data],
        [h2.frame(h2.HEADERS, h2.END_HEADERS, n, table if n == 1 else b"\x83\x86\xbf\xbe") for n in (1, 3, 5)],
        [whole, rest, data],
        [prioritised, padded],
        [*call(1, infer, message(one))[:1], h2.rst_stream(1, h2.ErrorCode.CANCEL)],
        [*call(1, infer, message(one))[:2], h2.frame(h2.HEADERS, _END_ALL, 1, literal(b"x-sum", b"1"))],
        [h2.settings({h2.INITIAL_WINDOW_SIZE: 3, h2.HEADER_TABLE_SIZE: 0}), *call(1, infer, message(one))],
        [h2.settings({h2.MAX_FRAME_SIZE: 1 << 14, h2.INITIAL_WINDOW_SIZE: 1 << 20}), h2.window_update(0, 1 << 20)],
        [h2.settings({h2.INITIAL_WINDOW_SIZE: 0}), *call(1, infer, message(one)), h2.window_update(1, 10)],
        [h2.ping(b"12345678"), h2.frame(h2.PRIORITY, 0, 1, bytes(5)), h2.goaway(0, h2.ErrorCode.NO_ERROR)],
        [h2.frame(h2.HEADERS, _END_ALL, 1, block(infer))],
        [h2.frame(h2.HEADERS, h2.END_HEADERS, 1, block(infer, grpc_encoding="br")), h2.frame(0x77, 0, 1, b"any")],
    ]
    return [(*_GREETING, *frames) for frames in seeds]


class H2Target(Target):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        h2.ping(bytes(8)),
        h2.settings({}),
        h2.settings({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW}),
        h2.settings({h2.MAX_FRAME_SIZE: 1}),
        h2.window_update(0, h2.MAX_WINDOW),
        h2.window_update(1, h2.MAX_WINDOW),
        h2.window_update(1, 0),
        h2.rst_stream(1, h2.ErrorCode.CANCEL),
        h2.rst_stream(5, h2.ErrorCode.CANCEL),
        h2.frame(h2.DATA, 0, 1),
        h2.frame(h2.DATA, h2.END_STREAM, 1, b"\0\0\0\0\0"),
        h2.frame(h2.DATA, 0, 1, b"\0\x7f\xff\xff\xff"),
        h2.frame(h2.DATA, 0, 1, b"\1\0\0\0\1x"),
        h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\x3f\xe1\xff\x03"),
        h2.frame(h2.HEADERS, 0, 1, b"\x83"),
        h2.frame(h2.CONTINUATION, 0, 1),
        h2.frame(h2.PUSH_PROMISE, 0, 1, bytes(4)),
        literal(b"content-length", b"5"),
        literal(b"grpc-timeout", b"1n"),
        literal(b"grpc-timeout", b"99999999H"),
        literal(b"x-bin", b"!!"),
        b"\xff\xff\xff\xff\xff\x0f",
        b"\x20",
        b"\x7f\xff\xff\xff\xff",
    )

    def __init__(self) -> None:
        self.seeds = _seeds()
        self._lab = Lab()
        planes = self._lab.planes
        self._shared = H2Context(planes.service.methods, planes.config, planes.connections, self._lab.loop)
        content = infer_request()
        self._valid = b"".join((*_GREETING, *call(1, f"/{INFERENCE}/ModelInfer", message(content))))

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        if random.random() < 0.7:
            parts = [_with_length(part) if random.random() < 0.9 else part for part in parts]
        return b"".join(parts)

    def run(self, data: bytes) -> None:
        for _ in read_frames(b"".join(self._lab.try_out(self._connect, data).written)):
            pass
        frames = read_frames(self._lab.ask(self._connect, self._valid))
        answered = b"".join(payload for kind, payload in frames if kind == h2.DATA)
        (answer,) = messages.ModelInferResponse.FromString(answered[5:]).raw_output_contents
        assert answer == (2 * _X).tobytes()

    def close(self) -> None:
        self._lab.close()

    def _connect(self) -> H2Connection:
        return H2Connection(self._shared)


def _with_length(part: bytes) -> bytes:
    """A frame that says how long it is; what is none stays as it is."""
    size = len(part) - _HEADER_BYTES
    if size < 0 or part.startswith(PREFACE[:3]):
        return part
    return (size & 0xFFFFFF).to_bytes(3, "big") + part[3:]


def read_frames(written: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and payload of what the server wrote, which are frames that a client understands; the last may be cut off."""
    decoder = hpack.Decoder()
    position = 0
    while len(written) - position >= _HEADER_BYTES:
        high, low, kind, _, stream_id = h2.HEADER.unpack_from(written, position)
        start = position + _HEADER_BYTES
        position = start + (high << 8 | low)
        assert kind <= h2.CONTINUATION, f"the server wrote a frame of type {kind}"
        assert kind not in (h2.DATA, h2.HEADERS) or stream_id & 1, "an answer on no stream"
        payload = written[start:position]
        if kind == h2.HEADERS and position <= len(written):
            assert decoder.decode(payload)
        yield kind, payload
    assert position >= len(written) or len(written) - position < _HEADER_BYTES
