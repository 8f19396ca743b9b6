"""Messages that are large enough for most of a frame to be received without an intermediate copy."""

import os
import random
import socket
from collections.abc import Iterator

import pytest

from h2_servers import CHAT, ECHO, OPEN_BYTES, STALL, GrpcServer, Peer, data_frame, message
from http_servers import LOOPS
from penstock.online.server.h2.session import MAX_FRAME
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode

BIG = 900_000


@pytest.fixture(scope="module", params=sorted(LOOPS))
def server(request: pytest.FixtureRequest) -> Iterator[GrpcServer]:
    sizes = {"max_request_bytes": 3_000_000, "max_inflight_bytes": 6_000_000, "max_unsent_bytes": 20_000_000}
    with GrpcServer(request.param, **sizes) as server:
        yield server
        server.until(lambda: server.budget.used == 0)


@pytest.fixture
def peer(server: GrpcServer) -> Iterator[Peer]:
    """A client with a large window. After the test, the fixture checks that the server still answers other clients."""
    with Peer(server.address) as peer:
        peer.greet(initial_window_size=h2.MAX_WINDOW)
        peer.send(h2.window_update(0, 1 << 30))
        yield peer
    other = server.connect()
    assert other.ask(1).messages == [b"hello"]


def send_in_pieces(peer: Peer, stream: bytes, rng: random.Random) -> None:
    while stream:
        cut = rng.choice([1, 9, 5000, 30_000, 120_000, 400_000])
        peer.send(stream[:cut])
        stream = stream[cut:]


def frames_of(stream_id: int, content: bytes, size: int) -> list[bytes]:
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    return [data_frame(stream_id, part, h2.END_STREAM if part is parts[-1] else 0) for part in parts]


@pytest.mark.parametrize("size", [MAX_FRAME, 300_000, 70_000])
@pytest.mark.parametrize("seed", range(2))
def test_in_pieces_of_any_size_interleaved_with_others(peer: Peer, seed: int, size: int) -> None:
    rng = random.Random(seed)
    sent = {number: rng.randbytes(rng.randint(BIG // 3, BIG)) for number in (1, 3)}
    frames = {number: frames_of(number, message(content), size) for number, content in sent.items()}
    stream = peer.headers(1) + peer.headers(3)
    while any(frames.values()):
        number = rng.choice([number for number, left in frames.items() if left])
        stream += frames[number].pop(0)
    send_in_pieces(peer, stream + peer.request(5), rng)
    answers = dict.fromkeys((1, 3, 5), b"")
    ended = 0
    while ended < len(answers):
        frame = peer.frame()
        if frame.kind == h2.DATA:
            answers[frame.stream_id] += frame.payload
        ended += frame.kind == h2.HEADERS and bool(frame.flags & h2.END_STREAM)
    assert answers == {number: message(content) for number, content in {**sent, 5: b"hello"}.items()}


def test_several_messages_in_the_frames_of_a_stream(peer: Peer) -> None:
    sent = [os.urandom(size) for size in (400_000, 10, 350_000, 0, 300_000)]
    content = b"".join(map(message, sent))
    peer.send(peer.headers(1, CHAT))
    for frame in frames_of(1, content, 500_000):
        for start in range(0, len(frame), 90_000):
            peer.send(frame[start : start + 90_000])
    assert peer.answer(1).messages == sent


def half_of_a_message(server: GrpcServer, peer: Peer, path: str = ECHO, **headers: str) -> bytes:
    """Send most of a message, wait until it has arrived, and return the rest of the frame."""
    frame = data_frame(1, message(bytes(BIG)), h2.END_STREAM)
    peer.send(peer.headers(1, path, **headers), frame[:200_000])
    server.until(lambda: server.budget.used >= 200_000 - 9)
    peer.send(frame[200_000:500_000])
    server.until(lambda: server.budget.used >= 500_000 - 9)
    return frame[500_000:]


def test_a_call_that_ends_in_the_middle(server: GrpcServer, peer: Peer) -> None:
    rest = half_of_a_message(server, peer)
    server.pass_time(1000)
    answer = peer.answer(1)
    assert (answer.status, "took longer than" in answer.message) == (4, True)
    assert peer.reset(1) == ErrorCode.NO_ERROR
    peer.send(rest)
    assert peer.ask(3).messages == [b"hello"]


@pytest.mark.parametrize("path", [ECHO, STALL])
def test_clients_that_leave_give_their_memory_back(server: GrpcServer, path: str) -> None:
    for half_close in (False, True):
        with Peer(server.address) as peer:
            peer.greet()
            half_of_a_message(server, peer, path)
            if half_close:
                peer.socket.shutdown(socket.SHUT_WR)
                assert peer.is_closed
        server.until(lambda: server.budget.used == 0)


def test_what_is_only_announced_takes_no_memory(server: GrpcServer, peer: Peer) -> None:
    frame = data_frame(1, message(bytes(BIG)), h2.END_STREAM)
    peer.send(peer.headers(1), frame[:20_000])
    server.until(lambda: server.budget.used > 0)
    assert server.call(lambda: server.budget.used) <= 8 * 20_000 + OPEN_BYTES
    peer.send(frame[20_000:])
    assert peer.answer(1).messages == [bytes(BIG)]


def test_no_room_for_the_rest_is_told() -> None:
    with GrpcServer(max_request_bytes=600_000, max_inflight_bytes=600_000) as server:
        others, peer = server.connect(), server.connect()
        others.send(others.headers(1), data_frame(1, message(bytes(400_000))[:200_000]))
        server.until(lambda: server.budget.used >= 200_000)
        peer.send(peer.headers(1), data_frame(1, message(bytes(500_000))))
        answer = peer.answer(1)
        assert (answer.status, answer.message) == (14, str(server.budget.refusal()))
        for each in (others, peer):
            each.socket.shutdown(socket.SHUT_WR)
        server.until(lambda: server.budget.used == 0)
