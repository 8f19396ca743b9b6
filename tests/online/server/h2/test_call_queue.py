from __future__ import annotations

import random

import pytest

from penstock.clock import ManualClock
from penstock.online.server.access.gate import SMALL_BYTES
from penstock.online.server.h2.call_queue import OCCUPIED_BYTES, CallQueue
from penstock.online.server.h2.headers import CallHead
from penstock.online.server.network.turns import SLICE_UNITS
from penstock.online.server.network.unread import Unread, UnreadTotal

MAX_UNSENT = 1000
UNITS = 6


class Call:
    """A unary call, or a stream with one message."""

    def __init__(self, queue: CallQueue, number: int, *, is_unary: bool = True, units: int = UNITS) -> None:
        self.id, self.head, self.gone = number, CallHead(units=units), False
        self.receiver = None if is_unary else object()
        self._queue = queue
        self.runs = 0

    def go_on(self) -> None:
        self.runs += self._queue.admits(self)


class Connection:
    def __init__(self) -> None:
        self.turns = 0
        self.unread = Unread(UnreadTotal(1 << 30, ManualClock()), lambda: None)
        self.queue = CallQueue(self.unread, MAX_UNSENT, self._continue_later)

    def _continue_later(self) -> None:
        self.turns += 1

    def turn(self, units: int) -> None:
        """The turn that ``continue_later`` asked for; none if it did not."""
        if self.turns:
            self.turns = 0
            self.queue.units = units
            self.queue.go_on()

    def asked(self, count: int, **more: bool) -> list[Call]:
        calls = [Call(self.queue, number, **more) for number in range(1, 2 * count, 2)]  # type: ignore[arg-type]
        for call in calls:
            call.go_on()
        return calls


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_calls_wait_for_units_in_order(connection: Connection) -> None:
    connection.queue.units = 2 * UNITS
    calls = connection.asked(5)
    assert [call.runs for call in calls] == [1, 1, 0, 0, 0]
    connection.turn(UNITS)
    assert [call.runs for call in calls] == [1, 1, 1, 0, 0]
    connection.turn(10 * UNITS)
    assert [call.runs for call in calls] == [1] * 5
    assert not connection.turns, "nobody waits any more"


def test_a_call_that_costs_more_than_a_turn_has_gets_a_whole_turn(connection: Connection) -> None:
    call = Call(connection.queue, 1, units=100 * SLICE_UNITS)
    call.go_on()
    connection.turn(SLICE_UNITS)
    assert call.runs == 1


def test_of_a_client_that_reads_nothing_one_unary_call_runs_at_a_time(connection: Connection) -> None:
    queue = connection.queue
    queue.units, connection.unread.count = 100 * UNITS, MAX_UNSENT
    calls = connection.asked(4)
    assert [call.runs for call in calls] == [1, 0, 0, 0]
    calls[0].gone = True
    queue.wake()
    connection.turn(100 * UNITS)
    assert [call.runs for call in calls] == [1, 1, 0, 0]
    connection.unread.count = 0
    queue.wake()
    connection.turn(100 * UNITS)
    assert [call.runs for call in calls] == [1] * 4


def test_messages_of_streams_do_not_wait_for_the_client_to_read(connection: Connection) -> None:
    """The limit of each stream ends a stream that is not read."""
    connection.queue.units, connection.unread.count = 100 * UNITS, MAX_UNSENT
    assert [call.runs for call in connection.asked(3, is_unary=False)] == [1, 1, 1]


@pytest.mark.parametrize("is_unary", [True, False])
def test_nothing_starts_while_too_much_is_being_decoded(connection: Connection, is_unary: bool) -> None:
    queue = connection.queue
    queue.units = 100 * UNITS
    sizes = [1, OCCUPIED_BYTES - SMALL_BYTES]
    for size in sizes:
        queue.occupy(size)
    assert queue.is_occupied
    calls = connection.asked(2, is_unary=is_unary)
    assert [call.runs for call in calls] == [0, 0]
    for size in sizes:
        queue.occupy(-size)
    connection.turn(100 * UNITS)
    assert [call.runs for call in calls] == [1, 1]


def test_what_ends_early_is_forgotten(connection: Connection) -> None:
    queue = connection.queue
    waiting = connection.asked(2)
    assert queue.waits_for_units(waiting[0])
    queue.remove(waiting[0])
    connection.turn(100 * UNITS)
    assert [call.runs for call in waiting] == [0, 1]
    connection.unread.count = MAX_UNSENT
    held = connection.asked(3)
    queue.remove(held[1])
    queue.clear()
    connection.unread.count = 0
    queue.wake()
    connection.turn(100 * UNITS)
    assert [call.runs for call in held] == [1, 0, 0]
    queue.release()
    connection.asked(1)
    assert not connection.turns


@pytest.mark.parametrize("seed", range(20))
def test_every_call_runs_once_whatever_happens(connection: Connection, seed: int) -> None:
    chance, queue = random.Random(seed), connection.queue
    calls: list[Call] = []
    occupied: list[int] = []
    for number in range(1, 600, 2):
        calls.append(Call(queue, number, is_unary=chance.random() < 0.7, units=chance.choice([1, UNITS, 50])))
        calls[-1].go_on()
        match chance.randrange(5):
            case 0:
                occupied.append(chance.choice([1, SMALL_BYTES, OCCUPIED_BYTES]))
                queue.occupy(occupied[-1])
            case 1 if occupied:
                queue.occupy(-occupied.pop())
            case 2:
                connection.unread.count = chance.choice([0, MAX_UNSENT])
                queue.wake()
            case 3:
                call = chance.choice(calls)
                call.gone = call.gone or call.runs > 0
                queue.wake()
            case _:
                connection.turn(chance.choice([1, SLICE_UNITS, 100]))
    for size in occupied:
        queue.occupy(-size)
    connection.unread.count = 0
    queue.wake()
    while connection.turns:
        connection.turn(SLICE_UNITS)
    assert {call.runs for call in calls} == {1}
