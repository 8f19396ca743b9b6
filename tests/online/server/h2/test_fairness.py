"""The cost of one client for the others: work per event-loop iteration, number of handled frames, and memory."""

import asyncio
from itertools import pairwise

import pytest

from h2_servers import CHAT, COSTLY, COSTLY_UNITS, DECODE, ECHO, FLOOD, FLOOD_BYTES, HOLD, data_frame, message
from h2_wire import READ_BYTES, Client, Lab, on_loop
from penstock.errors import DeadlineExceeded
from penstock.online.server.access.gate import LIMIT_BYTES, Gate
from penstock.online.server.grpc.call import GrpcCall, GrpcMethod
from penstock.online.server.h2.guard import BURST, CALL
from penstock.online.server.h2.outbox import FLUSH_STREAMS
from penstock.online.server.h2.session import STREAM_WINDOW
from penstock.online.server.network.turns import (
    BEGIN_UNITS,
    BYTES_A_UNIT,
    FREE_UNITS,
    LOSS_UNITS,
    SLICE_UNITS,
    TURN_UNITS,
)
from penstock.online.server.network.unread import STALE_S
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode
from penstock.tensor import Buffer

MIB = 1 << 20
MESSAGES = (1 << 19) // FLOOD_BYTES
"""Messages of an answer of half a MiB."""
MOST_DECODED = 8
LARGE = LIMIT_BYTES * 2 // 3
FLOODS = {
    "PING": h2.ping(bytes(8)),
    "PING ACK": h2.ping(bytes(8), h2.ACK),
    "SETTINGS": h2.settings({}),
    "SETTINGS ACK": h2.SETTINGS_ACK,
    "SETTINGS of windows": h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 16}),
    "WINDOW_UPDATE": h2.window_update(0, 1),
    "WINDOW_UPDATE of a stream": h2.window_update(1, 1),
    "WINDOW_UPDATE of a closed stream": h2.window_update(3, 1),
    "GOAWAY": h2.goaway(0, ErrorCode.NO_ERROR, "x" * 20),
    "PRIORITY": h2.frame(h2.PRIORITY, 0, 5, bytes(5)),
    "RST_STREAM of a closed stream": h2.rst_stream(3, ErrorCode.CANCEL),
    "empty DATA": data_frame(1, b""),
    "padding": data_frame(1, b"\x05" + bytes(5), h2.PADDED),
    "DATA by the byte": data_frame(1, b"\0"),
    "empty messages": data_frame(1, message(b"") * 100),
    "DATA on a stream that was refused": data_frame(5, b""),
    "trailers on a stream that was refused": h2.frame(h2.HEADERS, h2.END_HEADERS, 5, b""),
    "an unknown type": h2.frame(0xAA, 0, 0, b""),
}


def most_units(clients: int) -> int:
    """The maximum work of one iteration, plus half of the next one's."""
    return TURN_UNITS * 3 // 2 + SLICE_UNITS + clients * FREE_UNITS


def open_streams(client: Client) -> None:
    """Stream 1 is open, 3 has been answered, 5 was refused while it was being sent."""
    client.send(client.headers(1, CHAT), client.request(3, b"hello", ECHO), client.headers(5, "/none"))


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_is_handled_in_turns_and_then_ended(frame: bytes) -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        open_streams(client)
        await lab.settle()
        lab.units.clear()
        client.send(frame * (2 * BURST))
        await lab.settle()
        assert client.goaway == ErrorCode.ENHANCE_YOUR_CALM
        assert sum(lab.units) <= 4 * (BURST + 100)
        assert max(lab.units) <= most_units(1)

    on_loop(main)


@pytest.mark.parametrize("frame", FLOODS.values(), ids=FLOODS.keys())
def test_others_are_answered_at_once_beside_sixteen_floods(frame: bytes) -> None:
    async def main() -> None:
        lab = Lab()
        attackers = [lab.connect() for _ in range(16)]
        innocent = lab.connect()
        for attacker in attackers:
            open_streams(attacker)
            attacker.send(frame * BURST)
        for n in range(50):
            stream_id = 2 * n + 1
            innocent.send(innocent.request(stream_id, b"hello", ECHO))
            for client in lab.clients:
                client.arrive()
            assert innocent.frames()[-1].stream_id == stream_id
            lab.turns.used = 0
            await lab.settle(until=lambda: True)
        assert max(lab.units) <= most_units(17)

    on_loop(main)


def test_many_calls_at_once_take_turns_with_others() -> None:
    async def main() -> None:
        lab = Lab(max_streams=2000)
        busy, other = lab.connect(), lab.connect()
        busy.send(*(busy.request(2 * n + 1, b"x", ECHO) for n in range(1500)))
        busy.arrive()
        answered = len(busy.of(h2.DATA))
        assert 0 < answered <= TURN_UNITS
        assert not busy.wire.reading
        other.send(other.request(1, b"x", ECHO))
        other.arrive()
        assert len(other.of(h2.DATA)) == 1
        await lab.settle()
        assert busy.wire.reading
        assert len(busy.of(h2.DATA)) == 1500
        assert max(lab.units) <= most_units(2)

    on_loop(main)


def test_the_start_of_a_stream_costs_more_than_its_frame() -> None:
    async def main() -> None:
        lab = Lab(max_streams=2000)
        client = lab.connect()
        client.send(*(client.headers(2 * n + 1, CHAT) for n in range(1000)))
        client.arrive()
        begun = len(client.connection._session.streams)
        assert 0 < begun <= TURN_UNITS // (1 + BEGIN_UNITS) + FREE_UNITS
        await lab.settle()
        assert len(client.connection._session.streams) == 1000

    on_loop(main)


def test_costly_calls_take_turns_like_others() -> None:
    async def main() -> None:
        lab = Lab()
        attackers, innocent = [lab.connect() for _ in range(16)], lab.connect()
        for attacker in attackers:
            attacker.send(*(attacker.request(2 * n + 1, b"x", COSTLY) for n in range(50)))
        answered = 0
        for n in range(16 * 50):
            innocent.send(innocent.request(2 * n + 1, b"hello", ECHO))
            for client in lab.clients:
                client.arrive()
            assert innocent.frames()[-1].stream_id == 2 * n + 1
            await asyncio.sleep(0)
            before, answered = answered, sum(len(attacker.of(h2.DATA)) for attacker in attackers)
            assert (answered - before) * COSTLY_UNITS <= most_units(17) + COSTLY_UNITS
        await lab.settle()
        assert {len(attacker.of(h2.DATA)) for attacker in attackers} == {50}

    on_loop(main)


def test_a_costly_call_is_answered_at_once_if_nothing_else_is_going_on() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(client.request(1, b"x", COSTLY))
        client.arrive()
        assert len(client.of(h2.DATA)) == 1

    on_loop(main)


@pytest.mark.parametrize("cause", ["a fault", "a loss"])
def test_the_calls_of_connections_that_end_are_ended_in_turns(cause: str) -> None:
    """Each notifies its service."""

    async def main() -> None:
        lab = Lab(max_streams=1000)
        clients = [lab.connect() for _ in range(4)]
        for client in clients:
            client.send(*(client.request(2 * n + 1, b"x", HOLD) for n in range(1000)))
        await lab.settle()
        calls = lab.server.held
        assert len(calls) == 4000
        for client in clients:
            if cause == "a fault":
                client.send(h2.frame(h2.SETTINGS, 0, 0, b"x"))
            else:
                client.connection.connection_lost(None)
        ended = [4000 - sum(call.on_cancel is not None for call in calls)]
        while ended[-1] < 4000:
            for client in clients:
                client.arrive()
            await asyncio.sleep(0)
            for call in calls:
                call.send(bytes(MIB))
            ended.append(4000 - sum(call.on_cancel is not None for call in calls))
            assert ended[-1] - ended[-2] <= most_units(0) // LOSS_UNITS + len(clients) * SLICE_UNITS // LOSS_UNITS
        assert len(ended) > 4000 * LOSS_UNITS // TURN_UNITS
        assert unread(lab) == lab.shared.unread.count == lab.shared.budget.used == 0
        await lab.settle()
        assert all(lab.server.cancelled.acquire(blocking=False) for _ in calls)
        assert {client.goaway for client in clients} == {ErrorCode.FRAME_SIZE_ERROR if cause == "a fault" else None}

    on_loop(main)


def test_a_connection_that_has_failed_is_hardly_read() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(h2.frame(h2.SETTINGS, 0, 0, b"x"))
        client.arrive()
        assert client.goaway == ErrorCode.FRAME_SIZE_ERROR
        client.send(bytes(4 * MIB))
        for _ in range(100):
            client.arrive()
            await asyncio.sleep(0)
        assert not client.wire.reading
        assert 4 * MIB - len(client._to_send) <= READ_BYTES

    on_loop(main)


def test_large_amounts_of_data_arrive_in_turns() -> None:
    async def main() -> None:
        lab = Lab()
        attackers, innocent = [lab.connect() for _ in range(16)], lab.connect()
        for attacker in attackers:
            attacker.send(attacker.headers(1, HOLD), data_frame(1, message(bytes(4 * MIB))[: MIB - 100]))
            attacker.send(*(data_frame(1, bytes(MIB - 100)) for _ in range(3)))
        sent = sum(len(attacker._to_send) for attacker in attackers)
        for n in range(100):
            for attacker in attackers:
                attacker.arrive()
            left = sum(len(attacker._to_send) for attacker in attackers)
            # Data that arrived at once is compensated for by iterations without new data.
            assert sent - left <= n * TURN_UNITS * BYTES_A_UNIT + len(attackers) * READ_BYTES
            innocent.send(innocent.request(2 * n + 1, b"hello", ECHO))
            innocent.arrive()
            assert innocent.frames()[-1].stream_id == 2 * n + 1
            await asyncio.sleep(0)
        assert left < sent - 50 * TURN_UNITS // 2 * BYTES_A_UNIT

    on_loop(main)


def test_a_client_with_much_to_decode_is_not_read() -> None:
    async def main() -> None:
        lab = Lab()
        client, other = lab.connect(), lab.connect()
        client.send(*(client.request(2 * n + 1, b"x", DECODE) for n in range(20)))
        client.send(*(client.request(2 * n + 1, b"x", ECHO) for n in range(20, 30)))
        for _ in range(20):
            client.arrive()
            await asyncio.sleep(0)
        held = lab.server.held
        assert not client.wire.reading
        assert len(held) == MOST_DECODED
        other.send(other.request(1, b"x", ECHO))
        other.arrive()
        assert len(other.of(h2.DATA)) == 1
        while held:
            assert len(held) <= MOST_DECODED
            call = held.pop()
            call.occupy(-1)
            call.finish()
            for _ in range(20):
                client.arrive()
                await asyncio.sleep(0)
        assert client.wire.reading
        assert len(client.of(h2.DATA)) == 10
        ends = [frame for frame in client.of(h2.HEADERS) if frame.flags & h2.END_STREAM]
        assert len(ends) == 30

    on_loop(main)


def test_a_client_with_much_to_decode_takes_no_turns() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        decoded = [client.request(2 * n + 1, b"x", DECODE) for n in range(MOST_DECODED)]
        further = [client.request(2 * n + 1, b"x", ECHO) for n in range(MOST_DECODED, MOST_DECODED + TURN_UNITS)]
        client.send(*decoded, *further)
        for _ in range(20):
            client.arrive()
            await asyncio.sleep(0)
        assert (len(lab.server.held), client.wire.reading) == (MOST_DECODED, False)
        before = lab.turns.begun
        for _ in range(20):
            await asyncio.sleep(0)
        assert lab.turns.begun == before
        for call in lab.server.held:
            call.occupy(-1)
            call.finish()
        await lab.settle()
        assert len(client.of(h2.DATA)) == TURN_UNITS

    on_loop(main)


def test_the_messages_in_one_frame_are_delivered_in_turns() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        count = 20_000
        client.send(client.headers(1, CHAT), h2.window_update(0, 1 << 24), h2.window_update(1, 1 << 24))
        client.send(data_frame(1, message(b"x") * count), data_frame(1, b"", h2.END_STREAM))
        await lab.settle()
        assert max(lab.units) <= most_units(1)
        answered = b"".join(frame.payload for frame in client.of(h2.DATA))
        assert answered == message(b"x") * count
        assert client.frames()[-1].flags & h2.END_STREAM

    on_loop(main)


def test_messages_that_wait_for_their_turn_are_given_no_window() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(client.headers(1, CHAT))
        await lab.settle()
        for _ in range(4):
            client.send(data_frame(1, message(b"x") * 170_000))
        client.arrive()
        assert [frame for frame in client.of(h2.WINDOW_UPDATE) if frame.stream_id] == []
        client.send(h2.window_update(0, 1 << 24), h2.window_update(1, 1 << 24))
        assert lab.turns.left < TURN_UNITS

    on_loop(main)


@pytest.mark.parametrize("count", [65, 2730, 10_000])
def test_settings_by_the_thousand_are_not_read(count: int) -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(*(client.request(2 * n + 1, b"", HOLD) for n in range(100)))
        frame = h2.frame(h2.SETTINGS, 0, 0, h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 1) * count)
        client.send(frame)
        await lab.settle()
        assert client.goaway == ErrorCode.ENHANCE_YOUR_CALM

    on_loop(main)


def test_settings_do_not_look_at_open_streams() -> None:
    """A change of all windows costs as much as any other frame."""

    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(*(client.request(2 * n + 1, b"", HOLD) for n in range(1000)))
        await lab.settle()
        lab.units.clear()
        frame = h2.frame(h2.SETTINGS, 0, 0, h2.SETTING.pack(h2.INITIAL_WINDOW_SIZE, 1) * 64)
        client.send((frame + h2.settings({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})) * 500)
        await lab.settle()
        assert client.goaway is None
        assert len([each for each in client.of(h2.SETTINGS) if each.flags & h2.ACK]) == 1001
        assert sum(lab.units) <= 1000 + 50
        assert max(lab.units) <= most_units(1)

    on_loop(main)


def test_settings_cost_what_they_do_to_streams_that_wait_for_their_windows() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=0)
        streams = 1000
        client.send(*(client.request(2 * n + 1, bytes(100), ECHO) for n in range(streams)))
        client.send(h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW))
        await lab.settle()
        for size in range(1, 50):
            lab.units.clear()
            client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: size}))
            before = len(client.wire.written)
            client.arrive()
            assert len(client.wire.written) - before <= FLUSH_STREAMS * 60 + len(h2.SETTINGS_ACK)
            await lab.settle()
            for _ in range(streams // FLUSH_STREAMS):
                await asyncio.sleep(0)
            assert sum(lab.units) >= streams
            assert sum(len(frame.payload) for frame in client.of(h2.DATA)) == size * streams
        client.send(*(h2.settings({h2.INITIAL_WINDOW_SIZE: size}) for size in range(50, 51 + BURST * 16 // streams)))
        await lab.settle()
        assert client.goaway == ErrorCode.ENHANCE_YOUR_CALM

    on_loop(main)


def test_windows_beyond_the_largest_are_found_without_a_look_at_each_stream() -> None:
    """Only the credits of WINDOW_UPDATE frames can exceed it together with a setting."""

    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=1)
        client.send(*(client.request(2 * n + 1, b"", HOLD) for n in range(100)))
        client.send(h2.window_update(1, h2.MAX_WINDOW - 1), h2.rst_stream(1, ErrorCode.CANCEL))
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW}))
        await lab.settle()
        assert client.goaway is None
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 5}), h2.window_update(3, h2.MAX_WINDOW - 5))
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 6}))
        await lab.settle()
        assert client.goaway == ErrorCode.FLOW_CONTROL_ERROR

    on_loop(main)


def test_headers_cost_what_they_take_to_decode() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(client.headers(1, ECHO), h2.frame(h2.HEADERS, h2.END_HEADERS, 3, b"\x83\x86" + b"\x90" * 1600))
        client.arrive()
        assert lab.turns.used > 1600 // 8

    on_loop(main)


def test_continuations_are_charged() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        client.send(h2.frame(h2.HEADERS, 0, 1, b""), h2.frame(h2.CONTINUATION, 0, 1, b"") * (2 * BURST))
        await lab.settle()
        assert client.goaway == ErrorCode.ENHANCE_YOUR_CALM
        assert max(lab.units) <= most_units(1)
        assert sum(lab.units) <= BURST + 100

    on_loop(main)


def test_a_client_that_does_not_read_causes_no_more_work() -> None:
    """The client's floods wait in the socket. Frames that have already been read are not answered either."""

    async def main() -> None:
        lab = Lab()
        client = lab.connect()
        await lab.settle()
        client.send(h2.ping(bytes(8)) * 2000)
        client.arrive()
        client.connection.pause_writing()
        written = len(client.wire.written)
        for _ in range(100):
            client.arrive()
            await lab.settle(until=lambda: True)
        assert not client.wire.reading
        assert len(client.wire.written) == written
        client.connection.resume_writing()
        await lab.settle()
        assert client.wire.reading
        assert len(client.of(h2.PING)) == 2000

    on_loop(main)


# Memory


def unread(lab: Lab) -> int:
    return sum(client.connection._session.unread.count for client in lab.clients)


@pytest.mark.parametrize("window", [0, 1, 1 << 15])
def test_answers_that_nobody_reads_are_bounded_per_connection(window: int) -> None:
    async def main() -> None:
        lab = Lab(max_unsent_bytes=2 * MIB, max_unread_bytes=32 * MIB)
        client = lab.connect(initial_window_size=window)
        requests = [client.request(2 * n + 1, str(MESSAGES).encode(), FLOOD) for n in range(400)]
        client.send(*requests)
        await lab.settle()
        assert 2 * MIB <= unread(lab) <= 4 * MIB
        assert client.wire.reading  # otherwise, its WINDOW_UPDATE would not be received
        client.send(
            h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW), h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24})
        )
        await lab.settle()
        assert unread(lab) == 0
        ends = [frame for frame in client.of(h2.HEADERS) if frame.flags & h2.END_STREAM]
        assert len(ends) == 400
        assert sum(len(frame.payload) for frame in client.of(h2.DATA)) == 400 * MESSAGES * (FLOOD_BYTES + 5)

    on_loop(main)


def test_calls_that_are_slow_to_answer_are_bounded_in_all() -> None:
    """All calls have started before the first response, so the size of their responses is unknown."""

    async def main() -> None:
        lab = Lab(max_unsent_bytes=2 * MIB, max_unread_bytes=8 * MIB)
        client = lab.connect(initial_window_size=0)
        client.send(*(client.request(2 * n + 1, b"", HOLD) for n in range(400)))
        await lab.settle()
        assert len(lab.server.held) == 400
        for call in lab.server.held:
            call.send(bytes(MIB))
            call.finish()
        await lab.settle()
        assert unread(lab) <= 8 * MIB + MIB
        refused = [frame for frame in client.of(h2.HEADERS) if frame.flags & h2.END_STREAM]
        assert len(refused) >= 392
        assert all(b"grpc-status\x018" in frame.payload for frame in refused)
        client.connection.connection_lost(None)
        assert unread(lab) == lab.shared.unread.count == 0

    on_loop(main)


def test_a_part_that_is_left_counts_like_the_whole() -> None:
    """The unsent part keeps the memory of the whole message in use."""

    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=FLOOD_BYTES)
        client.send(h2.window_update(0, 1 << 24))
        client.send(*(client.request(2 * n + 1, b"1", FLOOD) for n in range(10)))
        await lab.settle()
        assert unread(lab) >= 10 * FLOOD_BYTES
        client.send(*(h2.window_update(2 * n + 1, 5) for n in range(10)))
        await lab.settle()
        assert unread(lab) == 0

    on_loop(main)


def test_a_slow_stream_does_not_keep_other_calls_from_being_answered() -> None:
    async def main() -> None:
        lab = Lab(max_unsent_bytes=MIB)
        client = lab.connect(initial_window_size=1 << 15)
        whole, half = message(bytes(MIB)), MIB // 2
        client.send(h2.window_update(0, 1 << 24), client.headers(1, CHAT))
        client.send(data_frame(1, whole[:half]), data_frame(1, whole[half:]))
        await lab.settle()
        assert client.connection._session.calls._lone is None
        assert unread(lab) >= MIB
        client.send(*(client.request(2 * n + 3, b"hello", ECHO) for n in range(100)))
        await lab.settle()
        assert len({frame.stream_id for frame in client.of(h2.HEADERS) if frame.flags & h2.END_STREAM}) == 100

    on_loop(main)


def test_calls_that_wait_can_be_cancelled() -> None:
    async def main() -> None:
        lab = Lab(max_unsent_bytes=MIB)
        client = lab.connect(initial_window_size=0)
        client.send(*(client.request(2 * n + 1, str(MESSAGES).encode(), FLOOD) for n in range(50)))
        await lab.settle()
        session = client.connection._session
        assert len(session.calls.held) > 40
        client.send(*(h2.rst_stream(2 * n + 1, ErrorCode.CANCEL) for n in range(50)))
        await lab.settle()
        assert not session.streams
        assert not session.calls.held
        assert unread(lab) == lab.shared.budget.used == 0

    on_loop(main)


def test_calls_that_wait_for_a_window_and_are_cancelled_are_forgotten() -> None:
    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=1 << 24)
        client.send(client.request(1, b"1", FLOOD))  # uses up the connection's window
        for n in range(1, BURST // CALL - 10):
            client.send(client.request(2 * n + 1, b"x", ECHO), h2.rst_stream(2 * n + 1, ErrorCode.CANCEL))
        await lab.settle()
        assert client.goaway is None
        outbox = client.connection._outbox
        assert len(outbox._starved) == 1
        assert not outbox._ready

    on_loop(main)


def test_a_client_that_reads_nothing_is_disconnected_for_others() -> None:
    async def main() -> None:
        lab = Lab(max_unsent_bytes=2 * MIB, max_unread_bytes=4 * MIB)
        idle = [lab.connect(initial_window_size=0) for _ in range(2)]
        for client in idle:
            client.send(*(client.request(2 * n + 1, str(MESSAGES).encode(), FLOOD) for n in range(50)))
        await lab.settle()
        lab.clock.advance(STALE_S)
        other = lab.connect()
        other.send(h2.window_update(0, 1 << 24), h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24}))
        other.send(*(other.request(2 * n + 1, str(MESSAGES).encode(), FLOOD) for n in range(10)))
        await lab.settle()
        assert ErrorCode.ENHANCE_YOUR_CALM in {client.goaway for client in idle}
        assert len([frame for frame in other.of(h2.HEADERS) if frame.payload.endswith(b"grpc-status\x010")]) == 10
        assert unread(lab) == lab.shared.unread.count <= 5 * MIB

    on_loop(main)


def test_each_window_is_used_by_as_many_streams_as_it_lasts_for() -> None:
    """A thousand streams wait for the connection's window. A WINDOW_UPDATE of one byte costs one frame, not a visit of all streams."""

    async def main() -> None:
        lab = Lab()
        client = lab.connect(initial_window_size=1 << 24)
        client.send(client.request(1, b"1", FLOOD))
        client.send(*(client.request(2 * n + 1, b"x", ECHO) for n in range(1, 1000)))
        await lab.settle()
        before = len(client.frames())
        for _ in range(100):
            client.send(h2.window_update(0, 1))
            client.arrive()
            assert not client.connection._outbox._ready
        assert len(client.of(h2.DATA)) >= 100
        assert len(client.frames()) - before <= 3 * 100

    on_loop(main)


def test_the_headers_of_open_calls_are_bounded() -> None:
    """With the dynamic table, a short header block can represent many bytes."""

    async def main() -> None:
        lab = Lab(max_streams=1000)
        client = lab.connect()
        client.send(client.headers(1, HOLD, x="y" * 3000))
        block = client.block(HOLD, x="y" * 3000)
        block += b"\xbe" * 18
        for n in range(1, 1000):
            client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, block + b"\0\x01n\x04%04d" % n))
        await lab.settle()
        session = client.connection._session
        assert client.goaway is None
        held = sum(len(str(stream.head.metadata)) for stream in session.streams.values() if stream.head.size)
        known = sum(len(str(head.metadata)) for head in session._headers.known.values())
        assert 3 * MIB < held < 5 * MIB
        assert h2.UINT32.pack(ErrorCode.REFUSED_STREAM) in {frame.payload for frame in client.of(h2.RST_STREAM)}
        assert known < MIB // 8
        client.send(*(h2.rst_stream(2 * n + 1, ErrorCode.CANCEL) for n in range(100)))
        await lab.settle()
        for stream in list(session.streams.values()):
            session.reset(stream, ErrorCode.CANCEL)
        assert session._head_bytes == 0

    on_loop(main)


def test_the_time_of_thousands_of_streams_is_checked_by_and_by() -> None:
    async def main() -> None:
        lab = Lab(max_streams=1000, request_timeout_s=10)
        client = lab.connect()
        client.send(*(client.headers(2 * n + 1, HOLD) for n in range(1000)))
        await lab.settle()
        answered = []
        for _ in range(60):
            client.connection.check_time(lab.clock.now())
            await lab.settle(until=lambda: True)
            lab.clock.advance(1)
            answered.append(len(client.of(h2.HEADERS)))
        assert answered[-1] == 1000
        assert max(after - before for before, after in pairwise(answered)) <= 128

    on_loop(main)


class Uploader:
    """Sends one message of ``LARGE`` bytes, as much as its window allows."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.left = data_frames(message(bytes(LARGE)))
        self.window = STREAM_WINDOW
        self.grants = 0
        client.send(client.headers(1, HOLD))

    def send(self) -> bool:
        """Whether a part could be sent."""
        updates = [frame.payload for frame in self.client.of(h2.WINDOW_UPDATE) if frame.stream_id == 1]
        self.window += sum(h2.parse_window_update(payload) for payload in updates[self.grants :])
        self.grants = len(updates)
        before = len(self.left)
        while self.left and len(self.left[0]) - 9 <= self.window:
            self.window -= len(self.left[0]) - 9
            self.client.send(self.left.pop(0))
        return len(self.left) < before


def data_frames(content: bytes) -> list[bytes]:
    parts = [content[start : start + READ_BYTES] for start in range(0, len(content), READ_BYTES)]
    return [data_frame(1, part, h2.END_STREAM if part is parts[-1] else 0) for part in parts]


async def upload(lab: Lab, uploaders: list[Uploader]) -> None:
    """Send everything that the windows allow."""
    while sum(uploader.send() for uploader in uploaders):
        await lab.settle()


def test_large_messages_are_received_one_after_the_other() -> None:
    async def main() -> None:
        lab = Lab(request_timeout_s=10)
        lab.shared.budget.gate = gate = Gate(LIMIT_BYTES, patience_s=1e6, aside=0)
        uploaders = [Uploader(lab.connect()) for _ in range(4)]
        for number in range(4):
            await upload(lab, uploaders)
            # One message is complete, and its call in progress; of the others only what the first window allows has arrived.
            assert [not uploader.left for uploader in uploaders].count(True) == number + 1
            assert [bool(uploader.grants) for uploader in uploaders].count(True) == number + 1
            assert gate.used == LARGE
            for _ in range(3):  # the server keeps them waiting, not they the server
                lab.clock.advance(4)
                for uploader in uploaders:
                    uploader.client.connection.check_time(lab.clock.now())
            lab.server.held[number].finish()
            await lab.settle()
        assert (len(lab.server.held), gate.waiting) == (4, 0)
        await upload(lab, uploaders)
        assert gate.used == 0

    on_loop(main)


def test_a_client_that_leaves_while_it_waits_lets_the_next_one_send() -> None:
    async def main() -> None:
        lab = Lab()
        lab.shared.budget.gate = gate = Gate(LIMIT_BYTES, patience_s=1e6, aside=0)
        uploaders = [Uploader(lab.connect()) for _ in range(3)]
        await upload(lab, uploaders)
        waiting = [uploader for uploader in uploaders if uploader.left]
        assert len(waiting) == 2
        waiting[0].client.send(h2.rst_stream(1, ErrorCode.CANCEL))
        await lab.settle()
        assert gate.waiting == 1
        lab.server.held[0].finish()
        await lab.settle()
        await upload(lab, waiting[1:])
        assert not waiting[1].left
        waiting[1].client.connection.connection_lost(None)
        await lab.settle()
        assert (gate.used, gate.waiting) == (0, 0)

    on_loop(main)


def test_calls_that_wait_for_room_do_not_start_once_they_have_ended() -> None:
    size = LIMIT_BYTES // 3

    async def main() -> None:
        started: list[GrpcCall] = []
        tasks: list[asyncio.Task[None]] = []

        async def later(call: GrpcCall) -> None:
            await call.hold(size)
            started.append(call)
            call.park()

        def begin(call: GrpcCall, data: Buffer) -> None:
            task = asyncio.create_task(later(call))
            call.on_cancel = task.cancel
            tasks.append(task)

        lab = Lab()
        lab.shared.methods = {HOLD.encode(): GrpcMethod(begin)}
        lab.shared.budget.gate = gate = Gate(LIMIT_BYTES, patience_s=1e6, aside=0)
        for is_lost in (True, False):
            client = lab.connect()
            client.send(*(client.request(2 * n + 1, b"x", HOLD) for n in range(50)))
            await lab.settle()
            assert (len(started), gate.waiting) == (3, 47)
            if is_lost:
                client.connection.connection_lost(None)
            for stream in list(client.connection._session.streams.values()):
                stream.abandon(DeadlineExceeded("too late"))
            await asyncio.gather(*tasks, return_exceptions=True)
            assert len(started) == 3
            assert (gate.used, gate.waiting) == (0, 0)
            started.clear()

    on_loop(main)
