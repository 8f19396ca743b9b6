"""Bytes in pieces of any size: the responses are the same. Invalid bytes end the connection with a reason."""

import asyncio
from itertools import pairwise
from typing import Any

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from h2_servers import CHAT, ECHO, FAIL, FLOOD, GrpcServer, data_frame, message
from penstock.clock import ManualClock
from penstock.online.server.config import ServerConfig
from penstock.online.server.h2.connection import H2Connection, H2Context
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.sniffer import PREFACE
from penstock.protocol import h2_frames as h2


class Wire:
    """A transport that records the written data."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, data: list[bytes]) -> None:
        self.written += b"".join(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        return None


def converse(pieces: list[bytes]) -> tuple[bytes, H2Connection]:
    """The bytes that a server writes after it receives ``pieces``, and its connection."""

    async def run() -> tuple[bytes, H2Connection]:
        # Only the server's methods are needed, not its sockets or its thread.
        config = ServerConfig(max_request_bytes=10_000, max_streams=8, max_header_bytes=2000, max_unsent_bytes=500_000)
        shared = H2Context(GrpcServer().methods(), config, Connections(10), ManualClock())
        connection, wire = H2Connection(shared), Wire()
        transport: Any = wire
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
        for _ in range(3):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return wire.written, connection

    return asyncio.run(run())


def answers(written: bytes) -> dict[int, list[tuple[int, int, bytes]]]:
    """The frames of each stream, DATA joined; those of the connection without WINDOW_UPDATE."""
    found: dict[int, list[tuple[int, int, bytes]]] = {}
    while written:
        high, low, kind, flags, stream_id = h2.HEADER.unpack_from(written)
        size = 9 + (high << 8 | low)
        assert len(written) >= size
        frames, payload = found.setdefault(stream_id, []), written[9:size]
        if kind == h2.DATA and frames and frames[-1][0] == h2.DATA:
            frames[-1] = (kind, flags, frames[-1][2] + payload)
        elif kind != h2.WINDOW_UPDATE:
            frames.append((kind, flags, payload))
        written = written[size:]
    return found


def conversation() -> bytes:
    """Samples of all frames that a client may send."""
    encoder = hpack.Encoder()

    def block(path: str, **more: str) -> bytes:
        usual = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"}
        return bytes(encoder.encode(list((usual | more).items())))

    end = h2.END_STREAM
    first = block(ECHO, x="1" * 100)
    return b"".join(
        (
            PREFACE,
            h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20, h2.MAX_FRAME_SIZE: 1 << 15}),
            h2.frame(h2.HEADERS, 0, 1, first[:20]),
            h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, first[20:]),
            data_frame(1, message(b"whole"), end),
            h2.frame(h2.HEADERS, h2.END_HEADERS, 3, block(ECHO)),
            h2.frame(h2.HEADERS, h2.END_HEADERS, 5, block(CHAT)),
            data_frame(3, b"\x04" + message(b"m" * 300)[:100] + bytes(4), h2.PADDED),
            data_frame(5, message(b"one") + message(b"") + message(b"three")[:6]),
            h2.ping(b"pingpong"),
            data_frame(3, b"\x00" + message(b"m" * 300)[100:], h2.PADDED | end),
            data_frame(5, message(b"three")[6:] + message(b"4" * 5000)),
            h2.frame(0x77, 3, 5, b"unknown"),
            h2.frame(h2.HEADERS, h2.END_HEADERS, 7, block(FAIL)) + data_frame(7, message(b"so"), end),
            h2.frame(h2.HEADERS, h2.END_HEADERS, 9, block("/none")),
            h2.frame(h2.HEADERS, h2.END_HEADERS | end, 11, block(ECHO)),
            h2.frame(h2.HEADERS, h2.END_HEADERS, 13, block(ECHO)) + data_frame(13, bytes((0, 0, 1, 0, 0))),
            h2.frame(h2.HEADERS, h2.END_HEADERS | end, 5, bytes(encoder.encode([("sum", "1")]))),
        )
    )


WHOLE = conversation()
EXPECTED = answers(converse([WHOLE])[0])


def test_the_conversation_is_answered() -> None:
    assert [kind for kind, _, _ in EXPECTED[5]] == [h2.HEADERS, h2.DATA, h2.HEADERS]
    assert EXPECTED[5][1][2] == message(b"one") + message(b"") + message(b"three") + message(b"4" * 5000)
    assert {1, 3, 5, 7, 9, 11, 13} < EXPECTED.keys()
    assert [kind for kind, _, _ in EXPECTED[0]] == [h2.SETTINGS, h2.SETTINGS, h2.PING]


@given(st.lists(st.integers(0, len(WHOLE)), max_size=30))
def test_any_cuts_give_the_same_answers(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[start:stop] for start, stop in pairwise(bounds) if start < stop]
    assert answers(converse(pieces)[0]) == EXPECTED


def test_single_bytes_give_the_same_answers() -> None:
    assert answers(converse([bytes((byte,)) for byte in WHOLE])[0]) == EXPECTED


BLOCKS = st.sampled_from(
    [
        bytes(
            hpack.Encoder().encode([(":method", "POST"), (":scheme", "http"), (":path", path), ("content-type", kind)])
        )
        for path in (ECHO, CHAT, FLOOD, "/none")
        for kind in ("application/grpc", "text/html")
    ]
) | st.binary(max_size=40)
PAYLOADS = st.one_of(
    st.binary(max_size=60),
    BLOCKS,
    st.sampled_from([message(b"9"), message(b"pause"), message(b"fail"), message(b"x", 1), message(b"break")]),
    st.builds(h2.UINT32.pack, st.integers(0, (1 << 32) - 1)),
    st.builds(h2.SETTING.pack, st.integers(0, 8), st.integers(0, (1 << 32) - 1)),
)
FRAMES = st.builds(
    h2.frame,
    st.integers(0, 11),
    st.sampled_from([0, 0x1, 0x4, 0x5, 0x8, 0x9, 0x20, 0x24, 0x2D]),
    st.sampled_from([0, 1, 3, 5, 7, 9, 2, (1 << 32) - 1]),
    PAYLOADS,
)
OPENED = st.builds(
    lambda stream_id, block: h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, block),
    st.sampled_from([1, 3, 5, 7, 9, 11]),
    BLOCKS,
)


@settings(max_examples=400)
@given(st.lists(FRAMES | OPENED, max_size=25), st.integers(1, 100))
def test_random_frames_are_answered_or_end_the_connection(frames: list[bytes], size: int) -> None:
    sent = PREFACE + h2.settings({}) + b"".join(frames)
    written, connection = converse([sent[start : start + size] for start in range(0, len(sent), size)])
    found = answers(written)
    assert found[0][0][0] == h2.SETTINGS
    assert sum(kind == h2.GOAWAY for kind, _, _ in found[0]) <= 1
    for stream_id, frames_of_stream in found.items():
        # After the end of a stream, only a reset may follow.
        ends = [
            n for n, (kind, flags, _) in enumerate(frames_of_stream) if kind == h2.HEADERS and flags & h2.END_STREAM
        ]
        if stream_id and ends:
            assert all(kind == h2.RST_STREAM for kind, _, _ in frames_of_stream[ends[0] + 1 :])
    assert not connection._session.streams
    assert len(connection._reader._rest) <= len(sent)


@given(st.binary(max_size=200))
def test_random_bytes_end_the_connection(data: bytes) -> None:
    written, _ = converse([data])
    found = answers(written)[0]
    assert found[-1][0] in (h2.SETTINGS, h2.GOAWAY)
