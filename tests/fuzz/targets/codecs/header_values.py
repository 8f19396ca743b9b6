"""Fuzzes the header fields that a client sets freely: trace context, accepted encodings, time-outs and metadata of gRPC."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

from penstock.online.server.h2.grpc_headers import encode_message, parse_metadata, parse_timeout
from penstock.online.server.http.compression import preferred
from penstock.telemetry.trace_context import TraceContext
from tests.fuzz.parts import tokens
from tests.fuzz.target import DecoderTarget

_MESSAGES = (
    b"traceparent\n00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\nrojo=00f067aa0ba902b7, congo=t61rcWkgMzE",
    b"traceparent\ncc-" + b"1" * 32 + b"-" + b"2" * 16 + b"-00-what\nfw529a3039@dt=FfD",
    b"accept\ngzip;q=0.5, deflate, *;q=0, identity;q=1.0",
    b"timeout\n20m",
    b"timeout\n99999999H",
    b"metadata\nx-bin: YWJj\nx-bin:Yg==,Yw\nuser-agent: grpc\ngrpc-timeout: 1S\n:path: /a",
    b"message\nmodel '\xc3\xa9' has 100% \x00\n",
)


class HeaderValuesTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"traceparent\n",
        b"metadata\n",
        b"q=nan",
        b"q=1e999",
        b"-bin:",
        b"ff-",
        b"0" * 32,
        b",",
        b"=",
    )

    def __init__(self) -> None:
        super().__init__([tokens(message) for message in _MESSAGES])

    def decode(self, data: bytes) -> object:
        kind, _, rest = data.partition(b"\n")
        match kind:
            case b"traceparent":
                parent, _, state = rest.decode("latin-1").partition("\n")
                context = TraceContext.parse(parent, state)
                if context is not None:
                    child = context.child(sampled=True)
                    assert TraceContext.parse(child.traceparent, child.state) == child, "what is passed on is not valid"
                    assert len(context.state) <= 512
                return context
            case b"accept":
                best = preferred(rest)
                assert best in (b"gzip", b"deflate", b"")
                return best
            case b"timeout":
                seconds = parse_timeout(rest)
                assert 0 <= seconds < math.inf
                return seconds
            case b"metadata":
                headers = [(name, value) for name, _, value in (line.partition(b":") for line in rest.split(b"\n"))]
                found = parse_metadata(headers)
                assert all(isinstance(value, bytes) == name.endswith("-bin") for name, value in found.items())
                return sorted(found.items())
        message = encode_message(rest.decode(errors="replace"))
        assert len(message) <= 1000
        assert all(0x20 <= byte < 0x7F for byte in message)
        return base64.b64encode(message)
