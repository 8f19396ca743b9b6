"""Connections of attackers. They send arbitrary bytes, and count the received bytes and events. They may also refuse to read."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Self

import hpack

from benchmarks.attacks.site import Site
from penstock.perf.http_client import Address, parse_head
from penstock.protocol import h2_frames as h2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_READ_BYTES = 1 << 18
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Wire:
    """A TCP connection. A reader task passes received bytes to ``received``. If ``reads`` is False, nothing is read."""

    def __init__(self, site: Site, address: Address, *, reads: bool = True) -> None:
        self.site = site
        self.socket: socket.socket
        self._address = address
        self._reads = reads
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._ended = False

    async def __aenter__(self) -> Self:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        # Closing resets the connection, so that no port stays in TIME_WAIT.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        if not self._reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            address = (self._address.host, self._address.port)
            await asyncio.get_running_loop().sock_connect(self.socket, address)
        except BaseException:
            self.socket.close()
            raise
        if self._reads:
            self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
        finally:
            self.socket.close()

    async def send(self, data: bytes) -> None:
        """Send all of ``data``. Raises OSError if the server has closed the connection."""
        if self._ended:
            raise ConnectionResetError
        await asyncio.get_running_loop().sock_sendall(self.socket, data)
        await asyncio.sleep(0)  # sending does not yield while the socket has room
        self.site.begun.set()
        self.site.count("bytes sent", len(data))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until received bytes make ``condition`` true. Raises OSError if the connection ends before that."""
        while not condition():
            if self._ended:
                raise ConnectionResetError
            self._changed.clear()
            await self._changed.wait()

    async def closed(self) -> None:
        """Wait for the end of the connection, and then raise OSError."""
        await self.until(lambda: False)

    def received(self, data: bytes) -> None:
        """Handle received bytes."""

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self.socket, _READ_BYTES):
                self.received(data)
                self._changed.set()
        except OSError:
            pass
        finally:
            self._ended = True
            self._changed.set()


class HttpWire(Wire):
    """An HTTP/1.1 connection that counts complete responses by status."""

    def __init__(self, site: Site, *, reads: bool = True) -> None:
        super().__init__(site, site.http, reads=reads)
        self.answers = 0
        self._head = b""
        self._status = 0
        self._left = 0

    def request(self, path: str, body: bytes = b"", headers: str = "", method: str = "POST") -> bytes:
        """A complete request, with the site's key, if any."""
        key = f"Authorization: Bearer {self.site.key}\r\n" if self.site.key else ""
        length = f"Content-Length: {len(body)}\r\n" if method == "POST" else ""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {self.site.http.authority}\r\n{key}{headers}{length}\r\n".encode()
            + body
        )

    async def ask(self, request: bytes) -> None:
        """Send a request and wait for the whole response."""
        expected = self.answers + 1
        await self.send(request)
        await self.until(lambda: self.answers >= expected)

    def received(self, data: bytes) -> None:
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
            else:
                head, found, rest = (self._head + data).partition(b"\r\n\r\n")
                self._head = b"" if found else head
                if not found:
                    return
                answer = parse_head(head)
                self._status, self._left, data = answer.status, answer.content_length, rest
            if not self._left:
                self.answers += 1
                self.site.count(f"HTTP {self._status}")


class H2Wire(Wire):
    """An HTTP/2 connection that respects the server's flow control, and counts received frames and gRPC statuses."""

    def __init__(self, site: Site, *, reads: bool = True, window: int = h2.MAX_WINDOW) -> None:
        """``window`` is the flow-control window that the client grants to each stream."""
        super().__init__(site, site.grpc, reads=reads)
        self.ended = 0
        """Number of calls that have ended."""
        self.frames: Counter[int] = Counter()
        self._granted = window
        self._partial = b""
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._allowed: defaultdict[int, int] = defaultdict(int)
        self._initial = h2.DEFAULT_WINDOW
        self._next_stream = -1
        self._replies = b""

    async def open(self) -> None:
        """Send the preface. Unless the connection refuses to read, wait for the server's settings."""
        settings = h2.settings({h2.ENABLE_PUSH: 0, h2.INITIAL_WINDOW_SIZE: self._granted})
        more = h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW)
        await self.send(PREFACE + settings + more + h2.SETTINGS_ACK)
        if self._reads:
            await self.until(lambda: self.frames[h2.SETTINGS] > 0)

    def call(self, method: str, *, encoding: str = "", flags: int = h2.END_HEADERS) -> tuple[int, bytes]:
        """The stream id and the HEADERS frame of a new call."""
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", f"/inference.GRPCInferenceService/{method}"),
            (":authority", self.site.grpc.authority), ("te", "trailers"), ("content-type", "application/grpc"),
        ]  # fmt: skip
        if self.site.key:
            fields.append(("authorization", f"Bearer {self.site.key}"))
        if encoding:
            fields.append(("grpc-encoding", encoding))
        self._next_stream += 2
        return self._next_stream, h2.frame(h2.HEADERS, flags, self._next_stream, self._encoder.encode(fields))

    async def unary(self, method: str, message: bytes, *, encoding: str = "") -> None:
        """Make a call with one message, which is already framed for gRPC, and wait for the end of the call."""
        expected = self.ended + 1
        stream, head = self.call(method, encoding=encoding)
        await self.send(head)
        await self.data(stream, message, h2.END_STREAM)
        await self.until(lambda: self.ended >= expected)

    async def data(self, stream: int, payload: bytes, flags: int = 0) -> None:
        """Send DATA frames as fast as the server's windows allow."""
        expected = self.ended
        for start in range(0, len(payload), h2.MIN_FRAME_SIZE):
            part = payload[start : start + h2.MIN_FRAME_SIZE]
            if not self._room(stream, len(part)):
                size = len(part)
                await self.until(lambda size=size: self._room(stream, size) or self.ended > expected)
            if self.ended > expected:
                return  # the server answered without reading the rest
            for one in (0, stream):
                self._sent[one] += len(part)
            last = start + len(part) == len(payload)
            await self.send(self._replies + h2.frame(h2.DATA, flags if last else 0, stream, part))
            self._replies = b""

    def _room(self, stream: int, size: int) -> bool:
        whole = h2.DEFAULT_WINDOW + self._allowed[0] - self._sent[0]
        return min(whole, self._initial + self._allowed[stream] - self._sent[stream]) >= size

    def received(self, data: bytes) -> None:
        data = self._partial + data
        position = 0
        while len(data) - position >= h2.HEADER.size:
            upper, lower, kind, flags, stream = h2.HEADER.unpack_from(data, position)
            end = position + h2.HEADER.size + (upper << 8 | lower)
            if end > len(data):
                break
            self._frame(kind, flags, stream, data[position + h2.HEADER.size : end])
            position = end
        self._partial = data[position:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.frames[kind] += 1
        if kind == h2.WINDOW_UPDATE:
            self._allowed[stream] += h2.parse_window_update(payload)
        elif kind == h2.SETTINGS and flags & h2.ACK:
            self.site.count("SETTINGS acknowledged")
        elif kind == h2.SETTINGS:
            self._initial = dict(h2.parse_settings(payload)).get(h2.INITIAL_WINDOW_SIZE, self._initial)
        elif kind == h2.PING and flags & h2.ACK:
            self.site.count("PING answered")
        elif kind == h2.PING:
            self._replies += h2.ping(payload, h2.ACK)
        elif kind == h2.RST_STREAM:
            self._end(f"RST_STREAM {h2.ErrorCode(h2.UINT32.unpack(payload)[0]).name}")
        elif kind == h2.GOAWAY:
            self.site.count(f"GOAWAY {h2.ErrorCode(h2.GOAWAY_HEAD.unpack_from(payload)[1]).name}")
        elif kind == h2.HEADERS:
            fields = dict(self._decoder.decode(payload, raw=True))
            if flags & h2.END_STREAM:
                self._end(f"gRPC status {fields.get(b'grpc-status', b'missing').decode()}")

    def _end(self, how: str) -> None:
        self.ended += 1
        self.site.count(how)
