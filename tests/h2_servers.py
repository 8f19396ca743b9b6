"""gRPC over our own HTTP/2 in a thread, with a small table of methods, and a client that sends whatever frames it is told to."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import hpack

from http_servers import LOOPS, PATIENCE_S
from penstock.clock import ManualClock
from penstock.errors import NotFound, ResourceExhausted, Unauthenticated
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.config import ServerConfig
from penstock.online.server.grpc.call import GrpcCall, GrpcMethod, Receiver
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.h2.session import STREAM_BYTES
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.listener import Endpoint, Listener
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2
from penstock.tensor import Buffer

ECHO, FAIL, BREAK, HOLD, CHAT, FLOOD, STALL, KEYED, KEYED_CHAT, COSTLY, DECODE = (
    f"/test.Test/{name}"
    for name in ("Echo", "Fail", "Break", "Hold", "Chat", "Flood", "Stall", "Keyed", "KeyedChat", "Costly", "Decode")
)
KEYED_BYTES = 1000
OPEN_BYTES = STREAM_BYTES + 300
"""The most that one of these open calls takes of the budget, beside its message."""
"""Maximum bytes of a message of the methods that need a key."""
FLOOD_BYTES = 1 << 16
COSTLY_UNITS = 100


class Chat:
    """Answers each message with itself; "pause" holds back what follows until the server is told to go on."""

    def __init__(self, server: GrpcServer, call: GrpcCall) -> None:
        self.server = server
        self.call = call
        call.on_cancel = server.cancelled.release

    def admit(self, data: Buffer | None) -> bool:
        return True

    def message(self, data: Buffer) -> None:
        if data == b"pause":
            self.call.pause()
            self.server.held.append(self.call)
            self.server.entered.release()
        elif data == b"fail":
            self.call.finish(NotFound("no such thing"))
        elif data == b"break":
            raise ValueError
        else:
            self.call.send(bytes(data))

    def half_close(self) -> None:
        self.call.finish()


class Stall(Chat):
    """Answers nothing, ever."""

    def message(self, data: Buffer) -> None:
        self.server.entered.release()

    def half_close(self) -> None:
        pass


class GrpcServer:
    """``held`` are calls of ``Hold`` and of paused streams; ``entered`` counts them, and ``cancelled`` those that ended early."""

    def __init__(self, loop: str = "uvloop", tls: ssl.SSLContext | None = None, **config: Any) -> None:
        self.clock = ManualClock()
        self.held: list[GrpcCall] = []
        self.entered = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.metadata: dict[str, str | bytes] = {}
        self._config = ServerConfig(**config)
        self._tls = tls
        self._loop_name = loop
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._clients = ExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._clients.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.address[1]}"

    def connect(self, **settings: int) -> Peer:
        """A client that has greeted."""
        peer = self._clients.enter_context(Peer(self.address))
        peer.greet(**settings)
        return peer

    def call(self, function: Callable[[], Any]) -> Any:
        """``function()`` on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def pass_time(self, seconds: float) -> None:
        """Look at the connections, let ``seconds`` pass, look again."""
        self.call(self.listener.sweep)
        self.clock.advance(seconds)
        self.call(self.listener.sweep)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition()`` holds on the server's event loop."""
        end = time.monotonic() + PATIENCE_S
        while not self.call(condition):
            assert time.monotonic() < end, "it never came to hold"

    def methods(self) -> dict[bytes, GrpcMethod]:
        unary = {ECHO: self._echo, FAIL: self._fail, BREAK: self._break, HOLD: self._hold, FLOOD: self._flood}
        table = {path.encode(): GrpcMethod(unary=method) for path, method in unary.items()}
        streams: dict[str, Callable[[GrpcCall], Receiver]] = {
            CHAT: lambda call: Chat(self, call),
            STALL: lambda call: Stall(self, call),
        }
        table |= {path.encode(): GrpcMethod(stream=method) for path, method in streams.items()}
        keyed = {"admit": self._admit, "max_bytes": KEYED_BYTES}
        table[KEYED.encode()] = GrpcMethod(self._echo_client, **keyed)
        table[DECODE.encode()] = GrpcMethod(self._decode)
        table[COSTLY.encode()] = GrpcMethod(self._echo, units=COSTLY_UNITS)
        table[KEYED_CHAT.encode()] = GrpcMethod(stream=streams[CHAT], **keyed)
        return table

    def _admit(self, metadata: Mapping[str, str | bytes]) -> str:
        """Refuse who has no key, or has used it too often."""
        key = str(metadata.get("x-api-key", ""))
        if key == "busy":
            raise ResourceExhausted("too many", "wait", 1.0)
        if not key:
            raise Unauthenticated("no key")
        return key

    def _echo_client(self, call: GrpcCall, data: Buffer) -> None:
        call.send(call.client.encode())
        call.finish()

    def _echo(self, call: GrpcCall, data: Buffer) -> None:
        self.metadata = dict(call.metadata)
        view = memoryview(data)
        call.send(view[: len(view) // 2], view[len(view) // 2 :])
        call.finish()

    def _fail(self, call: GrpcCall, data: Buffer) -> None:
        call.finish(NotFound(bytes(data).decode()))

    def _break(self, call: GrpcCall, data: Buffer) -> None:
        raise ValueError("a bug")

    def _hold(self, call: GrpcCall, data: Buffer) -> None:
        call.on_cancel = self.cancelled.release
        self.held.append(call)
        self.entered.release()

    def _decode(self, call: GrpcCall, data: Buffer) -> None:
        """Hold the call as one whose message another thread decodes."""
        call.occupy(len(data))
        self._hold(call, data)

    def _flood(self, call: GrpcCall, data: Buffer) -> None:
        """As many messages as asked for."""
        call.on_cancel = self.cancelled.release
        for n in range(int(bytes(data))):
            call.send(n.to_bytes(4, "big"), bytes(FLOOD_BYTES - 4))
        call.finish()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=LOOPS[self._loop_name]) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.connections = Connections(self._config.max_connections)
        self.listener = Listener(self.connections, self._config, self.clock)
        self.budget = ByteBudget(self._config.max_inflight_bytes)
        shared = H2Context(self.methods(), self._config, self.connections, self.clock, self.budget)
        self.address = await self.listener.listen(
            Endpoint(host="127.0.0.1", tls=self._tls, http2=lambda: H2Connection(shared))
        )
        self._started.set()
        await self._stop.wait()
        self.listener.stop()


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


class Answer(NamedTuple):
    headers: dict[str, str]
    messages: list[bytes]
    """Whole ones."""
    trailers: dict[str, str]
    """Empty if the stream was reset."""
    reset: int | None

    @property
    def status(self) -> int:
        return int((self.trailers or self.headers)["grpc-status"])

    @property
    def message(self) -> str:
        return (self.trailers or self.headers)["grpc-message"]


class Peer:
    """One HTTP/2 connection of plain frames. Reads give what is not for the stream asked for to nobody."""

    def __init__(self, address: tuple[str, int] | socket.socket) -> None:
        if isinstance(address, socket.socket):
            self.socket = address
        else:
            self.socket = socket.create_connection(address, PATIENCE_S)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = self.socket.makefile("rb")
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._reader.close()
        self.socket.close()

    def greet(self, **settings: int) -> None:
        self.send(PREFACE + h2.settings({getattr(h2, name.upper()): value for name, value in settings.items()}))

    def send(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def block(self, path: str = ECHO, **headers: str) -> bytes:
        """The header block of a request; names with ``_`` for ``-``; a value of None leaves a usual one out."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        return bytes(self.encoder.encode([(name, value) for name, value in fields.items() if value is not None]))

    def headers(self, stream_id: int, path: str = ECHO, flags: int = h2.END_HEADERS, **headers: str) -> bytes:
        return h2.frame(h2.HEADERS, flags, stream_id, self.block(path, **headers))

    def request(self, stream_id: int, data: bytes = b"hello", path: str = ECHO, **headers: str) -> bytes:
        return self.headers(stream_id, path, **headers) + data_frame(stream_id, message(data), h2.END_STREAM)

    def frame(self) -> Frame:
        """The next frame; raises EOFError if the connection is closed instead."""
        try:
            head = self._reader.read(9)
        except ConnectionResetError:
            head = b""
        if len(head) < 9:
            raise EOFError
        high, low, kind, flags, stream_id = h2.HEADER.unpack(head)
        return Frame(kind, flags, stream_id, self._reader.read(high << 8 | low))

    def frames(self, kind: int) -> Iterator[Frame]:
        """Those of ``kind``."""
        while True:
            frame = self.frame()
            if frame.kind == kind and not (kind == h2.SETTINGS and frame.flags & h2.ACK):
                yield frame

    def goaway(self) -> tuple[int, int, str]:
        """Last stream, code and reason of the next GOAWAY."""
        payload = next(self.frames(h2.GOAWAY)).payload
        return *h2.GOAWAY_HEAD.unpack_from(payload), payload[8:].decode()

    def reset(self, stream_id: int) -> int:
        """The code with which ``stream_id`` is reset."""
        while True:
            frame = next(self.frames(h2.RST_STREAM))
            if frame.stream_id == stream_id:
                return int(h2.UINT32.unpack(frame.payload)[0])

    def answer(self, stream_id: int) -> Answer:
        """The whole answer on one stream."""
        headers: list[dict[str, str]] = []
        data = b""
        while True:
            frame = self.frame()
            if frame.kind == h2.HEADERS:
                block = dict(self.decoder.decode(frame.payload))
                if frame.stream_id == stream_id:
                    headers.append(block)
            if frame.kind == h2.GOAWAY:
                raise AssertionError(frame.payload)
            if frame.stream_id != stream_id:
                continue
            if frame.kind == h2.DATA:
                data += frame.payload
            elif frame.kind == h2.RST_STREAM:
                code = h2.UINT32.unpack(frame.payload)[0]
                return Answer(headers[0] if headers else {}, split(data), {}, code)
            if frame.flags & h2.END_STREAM:
                return Answer(headers[0], split(data), headers[1] if len(headers) > 1 else {}, None)

    def ask(self, stream_id: int, data: bytes = b"hello", path: str = ECHO, **headers: str) -> Answer:
        self.send(self.request(stream_id, data, path, **headers))
        return self.answer(stream_id)

    @property
    def is_closed(self) -> bool:
        """Whether the server closes the connection; waits for it."""
        try:
            while True:
                self.frame()
        except EOFError:
            return True


def message(data: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(data)) + data


def split(data: bytes) -> list[bytes]:
    """The whole messages in ``data``."""
    messages = []
    while len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[1:5], "big"):
        size = int.from_bytes(data[1:5], "big")
        messages.append(data[5 : 5 + size])
        data = data[5 + size :]
    return messages


def data_frame(stream_id: int, data: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, stream_id, data)
