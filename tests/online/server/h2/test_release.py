"""Closed connections leave no garbage: reference counting frees each with all that it held."""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from garbage import uncollected
from h2_servers import CHAT, FLOOD, HOLD, PATIENCE_S, STALL, GrpcServer, Peer, data_frame, message
from http_servers import LOOPS
from penstock.online.server.access.gate import LIMIT_BYTES, Passage
from penstock.online.server.h2.connection import FrameReceiver, H2Connection
from penstock.online.server.h2.grpc_messages import MessageReader
from penstock.online.server.h2.outbox import Outbox
from penstock.online.server.h2.reader import FrameReader
from penstock.online.server.h2.session import H2Session
from penstock.online.server.h2.stream import H2Stream
from penstock.online.server.network.unread import Unread
from penstock.protocol import h2_frames as h2

KINDS = (
    H2Connection, H2Session, H2Stream, FrameReader, FrameReceiver, MessageReader, Outbox, Unread, Passage, asyncio.Task,
)  # fmt: skip
MANY = 6000


def answered(server: GrpcServer, peer: Peer) -> None:
    assert peer.ask(1).messages == [b"hello"]


def failed(server: GrpcServer, peer: Peer) -> None:
    peer.send(data_frame(0, b"x"))
    assert peer.goaway()[1] == h2.ErrorCode.PROTOCOL_ERROR


def flooded(server: GrpcServer, peer: Peer) -> None:
    with suppress(OSError):
        peer.send(*[h2.ping(b"penstock")] * MANY, data_frame(0, b"x"))
    assert peer.is_closed


def reset(server: GrpcServer, peer: Peer) -> None:
    """Many calls that are reset at once."""
    block = peer.block(HOLD)
    with suppress(OSError):
        for stream_id in range(1, 2 * MANY, 2):
            peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, block) + h2.rst_stream(stream_id, 8))
            block = peer.block(HOLD)
    assert peer.is_closed


def unread(server: GrpcServer, peer: Peer) -> None:
    for stream_id in (1, 3, 5):
        peer.send(peer.request(stream_id, b"20", FLOOD))
    next(peer.frames(h2.DATA))


def pending(server: GrpcServer, peer: Peer) -> None:
    peer.send(peer.request(1, b"", HOLD, grpc_timeout="100S"), peer.headers(3, STALL), data_frame(3, message(b"")))
    for _ in range(2):
        assert server.entered.acquire(timeout=PATIENCE_S)


def streaming(server: GrpcServer, peer: Peer) -> None:
    peer.send(peer.headers(1, CHAT), data_frame(1, message(b"a") + message(b"pause") + message(b"b") + b"\0\0"))
    next(peer.frames(h2.DATA))
    assert server.entered.acquire(timeout=PATIENCE_S)


def unfinished(server: GrpcServer, peer: Peer) -> None:
    """Half a message, in half a frame that is received directly."""
    peer.send(peer.headers(1), data_frame(1, b"\0\0\x10\0\0" + bytes(1_000_000))[:500_000])
    server.until(lambda: server.budget.used > 0)


def headless(server: GrpcServer, peer: Peer) -> None:
    """Half a header block, and half a frame."""
    answered(server, peer)
    peer.send(h2.frame(h2.HEADERS, 0, 3, peer.block()[:5]), h2.frame(h2.CONTINUATION, 0, 3, bytes(100))[:50])


def inflating(server: GrpcServer, peer: Peer) -> None:
    """Compressed messages that wait at the gate, which the test has closed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(bytes(16 << 20)) + packer.flush()
    for stream_id in (1, 3, 5):
        request = peer.headers(stream_id, HOLD, grpc_encoding="gzip")
        peer.send(request, data_frame(stream_id, message(packed, 1), h2.END_STREAM))
    server.until(lambda: server.budget.gate.waiting == 3)


ENDINGS = [answered, failed, flooded, reset, unread, pending, streaming, unfinished, headless, inflating]


@pytest.fixture(params=sorted(LOOPS), scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[GrpcServer]:
    with GrpcServer(request.param) as server:
        yield server


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda each: each.__name__)
def test_a_closed_connection_is_freed(server: GrpcServer, ending: Callable[[GrpcServer, Peer], None]) -> None:
    closer = Passage(server.budget.gate)
    server.call(lambda: closer.note(LIMIT_BYTES))
    with uncollected(*KINDS) as alive:
        for _ in range(2):
            peer = server.connect()
            ending(server, peer)
            peer.__exit__()
            server.until(lambda: not len(server.connections))
            server.held.clear()
        end = time.monotonic() + PATIENCE_S
        while found := alive():
            assert time.monotonic() < end, found
            server.call(lambda: None)
    server.call(closer.leave)
    assert (server.budget.used, server.budget.gate.used, server.budget.gate.waiting) == (0, 0, 0)
