"""A minimal gRPC client for generating load. It makes unary calls of one method over HTTP/2 (RFC 9113). The caller serialises the
messages beforehand.

The load loops use a ``Lane`` like an ``HttpConnection``: it has one call in flight. Several lanes share a connection, as threads
or tasks of a gRPC client share a channel. An invalid frame ends the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import unquote_to_bytes

import hpack
import msgspec

from penstock.errors import Unavailable
from penstock.perf.http_client import DROPPED, TLS_HINT, UNREADABLE, Address, AnswerHead, tls_reason
from penstock.protocol import h2_frames as h2

INFER = "/inference.GRPCInferenceService/ModelInfer"

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_JOINED_BYTES = 65536
_COPIED_BYTES = 1024
_TOP_UP = 2**29  # received bytes after which the client sends a WINDOW_UPDATE for the connection
_READY_TIMEOUT_S = 10.0

OnAnswer = Callable[["Lane", AnswerHead], None]
OnLost = Callable[["Lane", str], None]


def framed(message: bytes) -> bytes:
    """Frame ``message`` for gRPC: a zero byte (not compressed), the length, and the message."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class GrpcConnector:
    """Opens lanes for calls of ``method``, up to ``streams`` per connection. Pass it to a load loop as ``connect``.

    Opens another connection when the existing connections are full. A server may allow fewer streams than ``streams``.
    """

    def __init__(self, method: str = INFER, streams: int = 16, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._method, self._streams, self._metadata = method, streams, tuple(metadata)
        self._connections: list[GrpcConnection] = []

    async def __call__(self, address: Address, on_answer: OnAnswer, on_lost: OnLost) -> Lane:
        """A free lane. Raises Unavailable if no HTTP/2 server listens at ``address``."""
        while True:
            connection = next((one for one in self._connections if one.has_room), None) or self._connect(address)
            await connection.ready(address)
            if connection.has_room:  # other tasks may have taken the streams, or the server allows fewer
                return connection.lane(on_answer, on_lost)

    def _connect(self, address: Address) -> GrpcConnection:
        key = [("authorization", f"Bearer {address.key}")] if address.key else []
        head = [
            (":method", "POST"), (":scheme", address.scheme), (":path", self._method), (":authority", address.authority),
            ("te", "trailers"), ("content-type", "application/grpc"), *key, *self._metadata,
        ]  # fmt: skip
        connection = GrpcConnection(head, self._streams, self._connections.remove)
        self._connections.append(connection)
        return connection


class Lane:
    """Carries one call at a time, with the interface of ``HttpConnection``. Requests are ``framed`` messages."""

    __slots__ = (
        "_connection", "_lost", "_on_answer", "_on_lost",
        "busy", "chunks", "index", "request", "sent", "started", "status",
    )  # fmt: skip

    def __init__(self, connection: GrpcConnection, on_answer: OnAnswer, on_lost: OnLost) -> None:
        self.busy = False
        self.started = self.sent = 0.0
        self.index = 0
        self.chunks: list[bytes | memoryview] = []
        """The parts of the response message received so far."""
        self.status: _Status | None = None
        self.request = b""
        self._connection = connection
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._lost = False

    def send(self, request: bytes, index: int, started: float, now: float) -> None:
        """Start a call. The times are ``time.perf_counter`` seconds."""
        self.busy = True
        self.index = index
        self.started = started
        self.sent = now
        self.chunks.clear()
        self.status = None
        self.request = request
        self._connection.call(self, request)

    def body(self) -> bytes:
        """The response message, or the status message of a failed call. Valid only within ``on_answer``."""
        if self.status is not None and self.status.code:
            return self.status.message
        return b"".join(self.chunks)[5:]

    def drop(self, why: str) -> None:
        """Cancel the call in flight and remove the lane from its connection. ``on_lost`` is then called with ``why``."""
        self._connection.leave(self)
        asyncio.get_running_loop().call_soon(self.lost, why)

    def answered(self, head: AnswerHead) -> None:
        self.busy = False
        self._on_answer(self, head)

    def lost(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(self, why)


class _Status(msgspec.Struct, frozen=True):
    """The status in a header block. The code is None if the block is the head of a successful response."""

    code: int | None
    message: bytes = b""
    protocol: str = "gRPC"
    """``HTTP`` if ``code`` is the status of an HTTP response without a gRPC status, such as a proxy's."""


class _Outgoing(msgspec.Struct, eq=False):
    """A message that waits for flow control. The bytes before ``position`` have been sent."""

    stream: int
    data: bytes
    position: int
    window: int


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection. It writes to the socket once per iteration of the event loop."""

    def __init__(self, head: Sequence[tuple[str, str]], streams: int, on_end: Callable[[GrpcConnection], None]) -> None:
        self._head = list(head)
        self._streams_allowed = streams
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[object] | None = None
        self._settled: asyncio.Future[bool] | None = None
        self._ended = False
        self._lanes: set[Lane] = set()
        self._calls: dict[int, Lane] = {}
        self._next_id = 1
        self._partial = b""
        self._block = b""  # the first part of a header block
        self._block_of = 0
        self._block_ends = False
        self._decoder = hpack.Decoder()
        self._known: dict[bytes, _Status] = {}
        self._encoder = hpack.Encoder()
        self._sent_block = b""
        self._steady = False
        self._window = self._stream_window = h2.DEFAULT_WINDOW
        self._max_frame = h2.MIN_FRAME_SIZE
        self._waiting: deque[_Outgoing] = deque()
        self._received = 0
        self._out: list[bytes | memoryview] = []
        self._out_bytes = 0
        self._corked = False

    # Lanes.

    @property
    def has_room(self) -> bool:
        """True if the connection can carry another lane."""
        return not self._ended and len(self._lanes) < self._streams_allowed

    async def ready(self, address: Address) -> None:
        """Connect if necessary, and wait for the server's settings. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        if self._settled is None:
            self._settled = loop.create_future()
            if address.tls is not None:
                address.tls.set_alpn_protocols(["h2"])
            opening = loop.create_connection(lambda: self, address.host, address.port, ssl=address.tls)
            self._opening = asyncio.ensure_future(opening)
        reason, hint = "the server does not speak HTTP/2", "check that a gRPC server listens at this address"
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                assert self._opening is not None
                await asyncio.shield(self._opening)
                if await asyncio.shield(self._settled):
                    return
        except ssl.SSLError as error:
            reason, hint = tls_reason(error), TLS_HINT
        except OSError as error:  # includes TimeoutError
            reason = error.strerror or str(error) or reason
        self._abort(DROPPED)
        raise Unavailable(f"cannot connect to {address.authority}: {reason}", hint) from None

    def lane(self, on_answer: OnAnswer, on_lost: OnLost) -> Lane:
        lane = Lane(self, on_answer, on_lost)
        self._lanes.add(lane)
        return lane

    def leave(self, lane: Lane) -> None:
        """Remove a lane. The last lane closes the connection."""
        self._lanes.discard(lane)
        for stream, caller in tuple(self._calls.items()):
            if caller is lane:
                self._forget(stream)
                self._write(h2.rst_stream(stream, h2.ErrorCode.CANCEL))
        if not self._lanes and self._transport is not None:
            self._transport.abort()  # over TLS, closing would wait for the server

    # Sending.

    def call(self, lane: Lane, message: bytes) -> None:
        """Send a request. Flow control may delay part of it."""
        stream = self._next_id
        self._next_id += 2
        if stream >= h2.MAX_STREAM_ID:
            self._abort(DROPPED)
            return
        self._calls[stream] = lane
        identifier, block, size = stream.to_bytes(4, "big"), self._header_block(), len(message)
        self._write(b"%b\1\4%b%b" % (len(block).to_bytes(3, "big"), identifier, block))
        if size <= self._max_frame and size <= self._window and size <= self._stream_window:
            self._window -= size
            self._write(b"%b\0\1%b" % (size.to_bytes(3, "big"), identifier))
            self._write(message)
        else:
            self._waiting.append(_Outgoing(stream, message, 0, self._stream_window))
            self._pump()

    def _header_block(self) -> bytes:
        """The header block of a call. Its bytes no longer change once the server's header table contains all its fields."""
        if not self._steady:
            block = self._encoder.encode(self._head)
            self._steady = block == self._sent_block
            self._sent_block = block
        return self._sent_block

    def _pump(self) -> None:
        """Send as much as the flow-control windows allow, in the order of the calls."""
        for outgoing in tuple(self._waiting):
            while self._window > 0 and outgoing.window > 0 and outgoing.position < len(outgoing.data):
                size = min(self._max_frame, self._window, outgoing.window, len(outgoing.data) - outgoing.position)
                part = memoryview(outgoing.data)[outgoing.position : outgoing.position + size]
                outgoing.position += size
                outgoing.window -= size
                self._window -= size
                flags = h2.END_STREAM if outgoing.position == len(outgoing.data) else 0
                self._write(b"%b\0%c%b" % (size.to_bytes(3, "big"), flags, outgoing.stream.to_bytes(4, "big")))
                self._write(part)
            if outgoing.position == len(outgoing.data):
                self._waiting.remove(outgoing)
            if self._window <= 0:
                return

    def _write(self, data: bytes | memoryview) -> None:
        self._out.append(data)
        self._out_bytes += len(data)
        if not self._corked:
            self._corked = True  # collected until the end of this iteration of the event loop
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._corked = False
        if self._out and self._transport is not None and not self._transport.is_closing():
            if self._out_bytes > _JOINED_BYTES:
                self._transport.writelines(self._out)
            else:
                self._transport.write(b"".join(self._out))
        self._out.clear()
        self._out_bytes = 0

    # Receiving.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        settings = h2.settings({h2.ENABLE_PUSH: 0, h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})
        self._write(_PREFACE + settings + h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW))

    def data_received(self, data: bytes) -> None:
        if self._partial:
            data = self._partial + data
        position, size = 0, len(data)
        self._corked = True
        try:
            while size - position >= 9:
                length = int.from_bytes(data[position : position + 3], "big")
                if length > h2.MIN_FRAME_SIZE:
                    raise ValueError("not HTTP/2, or a frame that is too large")
                end = position + 9 + length
                if end > size:
                    break
                stream = int.from_bytes(data[position + 5 : position + 9], "big") & h2.MAX_STREAM_ID
                kind, flags, start = data[position + 3], data[position + 4], position + 9
                if kind in (h2.HEADERS, h2.CONTINUATION):
                    self._headers_received(kind, flags, stream, data[start:end])
                elif kind != h2.DATA:
                    self._control_received(kind, flags, stream, data[start:end])
                elif length <= _COPIED_BYTES:
                    self._data_received(flags, stream, data[start:end])
                else:
                    # A view, because copies would slow the client down.
                    self._data_received(flags, stream, memoryview(data)[start:end])
                position = end
        except (hpack.HPACKError, h2.ConnectionFault, ValueError, IndexError):
            self._abort(UNREADABLE)
        self._partial = data[position:]
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(DROPPED)

    def _data_received(self, flags: int, stream: int, payload: bytes | memoryview) -> None:
        self._received += len(payload)
        if self._received > _TOP_UP:
            self._write(h2.window_update(0, self._received))
            self._received = 0
        lane = self._calls.get(stream)
        if lane is not None:
            lane.chunks.append(h2.without_padding(bytes(payload), h2.PADDED) if flags & h2.PADDED else payload)
            if flags & h2.END_STREAM:
                self._finish(stream, lane)

    def _headers_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            payload = h2.without_padding(payload, flags)
            self._block_of, self._block_ends = stream, bool(flags & h2.END_STREAM)
        elif stream != self._block_of:
            raise ValueError("a CONTINUATION frame without HEADERS")
        block = self._block + payload
        if not flags & h2.END_HEADERS:
            self._block = block
            return
        self._block = b""
        status = self._decode(block)
        lane = self._calls.get(stream)
        if lane is not None:
            if status.code is not None:
                lane.status = status
            if self._block_ends:
                self._finish(stream, lane)

    def _decode(self, block: bytes) -> _Status:
        """Decode a header block. Results are cached until the header table changes."""
        known = self._known.get(block)
        if known is None:
            entries = tuple(self._decoder.header_table.dynamic_entries)
            fields = dict(self._decoder.decode(block, raw=True))
            code = fields.get(b"grpc-status")
            message = unquote_to_bytes(fields.get(b"grpc-message", b""))
            known = _Status(None if code is None else int(code), message)
            if code is None and (http := fields.get(b":status", b"200")) != b"200":
                known = _Status(int(http), b"the response has no gRPC status", "HTTP")
            if tuple(self._decoder.header_table.dynamic_entries) == entries:
                self._known[block] = known
            else:
                self._known.clear()
        return known

    def _control_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == h2.SETTINGS:
            if not flags & h2.ACK:
                self._settings_received(payload)
        elif kind == h2.PING:
            if not flags & h2.ACK:
                self._write(h2.ping(payload, h2.ACK))
        elif kind == h2.WINDOW_UPDATE:
            self._open_window(stream, int.from_bytes(payload, "big") & h2.MAX_STREAM_ID)
        elif kind == h2.RST_STREAM:
            lane = self._calls.get(stream)
            code = int.from_bytes(payload, "big")
            if lane is not None and code == h2.ErrorCode.REFUSED_STREAM:
                # The server still counted a stream that was closing. Like all gRPC clients, retry the call.
                self._forget(stream)
                self.call(lane, lane.request)
            elif lane is not None:
                lane.status = _Status(2, b"stream reset, HTTP/2 error %d" % code)
                self._finish(stream, lane)
        elif kind == h2.GOAWAY:
            self._abort(DROPPED)

    def _settings_received(self, payload: bytes) -> None:
        for number, value in h2.parse_settings(payload):
            if number == h2.HEADER_TABLE_SIZE:
                self._encoder.header_table_size = min(value, 4096)
                self._steady = False
            elif number == h2.MAX_CONCURRENT_STREAMS:
                self._streams_allowed = min(self._streams_allowed, value)
            elif number == h2.INITIAL_WINDOW_SIZE:
                for outgoing in self._waiting:
                    outgoing.window += value - self._stream_window
                self._stream_window = value
            elif number == h2.MAX_FRAME_SIZE:
                self._max_frame = value
        self._write(h2.SETTINGS_ACK)
        self._pump()
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(True)

    def _open_window(self, stream: int, more: int) -> None:
        if not stream:
            self._window += more
        else:
            for outgoing in self._waiting:
                if outgoing.stream == stream:
                    outgoing.window += more
        if self._waiting:
            self._pump()

    # Ends.

    def _finish(self, stream: int, lane: Lane) -> None:
        """End a call. If it has no status, it failed with code 2 (unknown)."""
        self._forget(stream)
        if lane.status is None:
            lane.status = _Status(2, b"the call ended without a status")
        elif not lane.status.code and not lane.chunks:
            lane.status = _Status(13, b"the call succeeded without a response message")
        code = lane.status.code or 0
        lane.answered(_OK if code == 0 else AnswerHead(code, 0, None, False, lane.status.protocol))

    def _forget(self, stream: int) -> None:
        self._calls.pop(stream, None)
        if self._waiting:
            self._waiting = deque(outgoing for outgoing in self._waiting if outgoing.stream != stream)

    def _abort(self, why: str) -> None:
        if self._transport is not None:
            self._transport.abort()
        asyncio.get_running_loop().call_soon(self._end, why)

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._on_end(self)
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(False)
        for lane in tuple(self._lanes):
            lane.lost(why)


_OK = AnswerHead(200, 0, None, False, "gRPC")
