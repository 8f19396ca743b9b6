"""The frames that are sent, and the number of writes."""

import pytest

from h2_servers import FLOOD, FLOOD_BYTES, HOLD, PATIENCE_S, GrpcServer
from http_servers import LOOPS
from penstock.protocol import h2_frames as h2


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_what_is_answered_in_one_turn_is_sent_at_once(loop: str) -> None:
    with GrpcServer(loop) as server:
        peer = server.connect()
        ids = range(1, 21, 2)
        peer.send(*(peer.request(each, path=HOLD) for each in ids))
        for _ in ids:
            assert server.entered.acquire(timeout=PATIENCE_S)
        peer.send(h2.ping(bytes(8)))
        next(peer.frames(h2.PING))
        server.call(lambda: [(call.send(b"done"), call.finish()) for call in server.held])
        first = peer.socket.recv(1 << 16)
        assert first.count(b"done") == len(ids)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_reads_nothing_is_neither_read_from_nor_piled_up_for(loop: str) -> None:
    """The client's windows have the maximum size, so only the socket limits the server."""
    with GrpcServer(loop, max_unsent_bytes=2 << 20, idle_timeout_s=30) as server:
        peer = server.connect(initial_window_size=h2.MAX_WINDOW)
        peer.send(h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW))
        requests = [peer.request(each, str((1 << 20) // FLOOD_BYTES).encode(), FLOOD) for each in range(1, 101, 2)]
        peer.send(*requests)
        server.until(lambda: len(server.connections) == 1 and next(iter(server.connections._open))._outbox.paused)
        connection = next(iter(server.connections._open))
        assert not server.call(connection._transport.is_reading)
        assert server.call(connection._transport.get_write_buffer_size) < 4 << 20
        for _ in range(3):
            server.pass_time(31)
        assert server.call(lambda: len(server.connections)) == 0


def test_an_answer_that_waits_for_its_window_is_not_taken_for_an_old_one() -> None:
    """The result does not depend on how long the server has been running."""
    with GrpcServer(idle_timeout_s=30) as server:
        server.clock.advance(1000)
        peer = server.connect(initial_window_size=10)
        peer.send(peer.request(1, b"1", FLOOD))
        assert len(next(peer.frames(h2.DATA)).payload) == 10
        server.pass_time(1)
        peer.send(h2.window_update(0, 1 << 20), h2.window_update(1, 1 << 20))
        assert peer.answer(1).status == 0


def test_turns_are_taken_within_the_windows_of_all() -> None:
    """The connection's window is used up while several streams wait. All of them continue once it is enlarged."""
    with GrpcServer() as server:
        peer = server.connect(initial_window_size=1 << 24)
        peer.send(*(peer.request(each, b"3", FLOOD) for each in (1, 3, 5)))
        received = dict.fromkeys((1, 3, 5), b"")
        sizes, window = 3 * 3 * (FLOOD_BYTES + 5), h2.DEFAULT_WINDOW
        while sum(map(len, received.values())) < sizes:
            frame = next(peer.frames(h2.DATA))
            received[frame.stream_id] += frame.payload
            window -= len(frame.payload)
            assert window >= 0
            if window == 0:
                window = 50_000
                peer.send(h2.window_update(0, window))
        assert {data.count(bytes(FLOOD_BYTES - 4)) for data in received.values()} == {3}


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_reading_messages_is_progress_and_reading_pings_is_not(loop: str) -> None:
    with GrpcServer(loop) as server:
        peer = server.connect(initial_window_size=10)
        peer.send(peer.request(1, b"1", FLOOD))
        assert len(next(peer.frames(h2.DATA)).payload) == 10
        outbox = next(iter(server.connections._open))._outbox
        seen = set()
        for _ in range(5):
            peer.send(h2.ping(bytes(8)))
            next(peer.frames(h2.PING))
            seen.add(server.call(outbox.read))
        assert len(seen) == 1
        peer.send(h2.window_update(1, 1000))
        assert len(next(peer.frames(h2.DATA)).payload) == 1000
        server.until(lambda: outbox.read() > max(seen))
