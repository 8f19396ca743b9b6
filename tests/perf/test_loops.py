"""The loops on connections without a network: send times, and the outcome of each request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import InvalidArgument, Unavailable
from penstock.perf.http_client import Address, AnswerHead
from penstock.perf.loops import NO_CONNECTION, TIMED_OUT, WRONG, ClosedLoop, LoadWindow, Loop, OpenLoop, Target

ADDRESS = Address("host", 1)
REQUESTS = (b"0", b"1", b"2")


class Peer:
    """Opens connections; ``reply`` returns the reply to the n-th request: an AnswerHead, None for silence, or text for a lost
    connection."""

    def __init__(
        self, reply: Callable[[int], AnswerHead | str | None] = lambda _: AnswerHead(200, 0, None, False)
    ) -> None:
        self.reply = reply
        self.sent: list[bytes] = []
        self.opened = 0
        self.refuses = False

    async def connect(self, address: Address, on_answer: Any, on_lost: Any) -> Pipe:
        assert address == ADDRESS
        if self.refuses:
            raise Unavailable("nobody listens")
        self.opened += 1
        return Pipe(self, on_answer, on_lost)


class Pipe:
    """A connection whose answer arrives in the next iteration of the event loop."""

    def __init__(self, peer: Peer, on_answer: Any, on_lost: Any) -> None:
        self.busy = False
        self.started = self.sent = 0.0
        self.index = 0
        self._peer, self._on_answer, self._on_lost = peer, on_answer, on_lost

    def send(self, request: bytes, index: int, started: float, now: float) -> None:
        assert not self.busy, "a request was sent while another was in flight"
        self.busy, self.index, self.started, self.sent = True, index, started, now
        outcome = self._peer.reply(len(self._peer.sent))
        self._peer.sent.append(request)
        if isinstance(outcome, str):
            asyncio.get_running_loop().call_soon(self.drop, outcome)
        elif outcome is not None:
            asyncio.get_running_loop().call_soon(self._answer, outcome)

    def body(self) -> bytes:
        return b"said"

    def drop(self, why: str) -> None:
        self._on_lost(self, why)

    def _answer(self, head: AnswerHead) -> None:
        self.busy = False
        self._on_answer(self, head)


def figures(make: Callable[[Target], Loop], peer: Peer) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        loop = make(Target(ADDRESS, REQUESTS, peer.connect))
        await loop.run()
        return loop.tally.figures()

    return asyncio.run(main())


def closed(peer: Peer, connections: int = 1, count: int = 6, check: Any = None) -> dict[str, Any]:
    window = LoadWindow(None, 0.0, 30.0, count)
    return figures(lambda target: ClosedLoop(target, connections, window, check), peer)


def test_a_closed_loop_sends_the_requests_in_turn_and_no_more_than_asked_for() -> None:
    peer = Peer()
    assert closed(peer, count=7)["errors_by_kind"] == {}
    assert (peer.sent, peer.opened) == ([b"0", b"1", b"2", b"0", b"1", b"2", b"0"], 1)


def test_a_closed_loop_opens_every_connection_before_it_sends() -> None:
    opened = []
    peer = Peer(lambda _: opened.append(peer.opened) or AnswerHead(200, 0, None, False))
    closed(peer, connections=4, count=8)
    assert opened == [4] * 8


def test_errors_are_told_apart_by_kind() -> None:
    heads = [
        AnswerHead(200, 0, None, False),
        AnswerHead(503, 0, None, False),
        AnswerHead(13, 0, None, False, "gRPC"),
        "connection lost",
    ]
    found = closed(Peer(lambda number: heads[number % 4]), count=8)
    assert found["errors_by_kind"] == {"HTTP 503": 2, "gRPC 13": 2, "connection lost": 2}
    assert (found["requests"], found["first_errors"]["HTTP 503"]) == (8, "said")


def test_an_answer_that_is_not_right_is_an_error() -> None:
    found = closed(Peer(), count=6, check=lambda index, body, _: (index, body) != (1, b"said"))
    assert found["errors_by_kind"] == {WRONG: 2}


def test_a_connection_that_was_lost_or_closed_is_replaced() -> None:
    outcomes = itertools.cycle([AnswerHead(200, 0, None, True), "lost"])
    peer = Peer(lambda _: next(outcomes))
    assert closed(peer, count=6)["errors_by_kind"] == {"lost": 3}
    assert (len(peer.sent), peer.opened) == (6, 6)


def test_a_peer_that_goes_away_for_good_fails_what_was_left() -> None:
    def reply(number: int) -> str:
        peer.refuses = True
        return "lost"

    peer = Peer(reply)
    assert closed(peer, count=3)["errors_by_kind"] == {"lost": 1, NO_CONNECTION: 2}


def test_nobody_at_the_start_and_nothing_to_send_are_said() -> None:
    peer = Peer()
    peer.refuses = True
    with pytest.raises(Unavailable, match="nobody listens"):
        closed(peer)
    with pytest.raises(InvalidArgument, match="no requests to send"):
        ClosedLoop(Target(ADDRESS, (), peer.connect), 1, LoadWindow(), None)


def opened(peer: Peer, arrivals: list[float], connections: int, timeout_s: float = 30.0) -> dict[str, Any]:
    """An open loop whose window ends immediately after the last of ``arrivals``, all of which are late."""
    due = itertools.chain(arrivals, itertools.repeat(1e9))
    window = LoadWindow(0.01, 0.0, timeout_s)
    return figures(lambda target: OpenLoop(target, connections, window, None, due), peer)


def test_an_open_loop_sends_every_arrival_though_all_are_due_at_once() -> None:
    peer = Peer()
    assert opened(peer, [0.0] * 20, 4)["errors_by_kind"] == {}
    assert len(peer.sent) == 20
    assert peer.opened <= 4


def test_requests_that_no_connection_is_left_for_time_out() -> None:
    peer = Peer(lambda _: None)
    found = opened(peer, [0.0] * 5, 2, timeout_s=0.01)
    assert sum(found["errors_by_kind"].values()) == 5
    assert set(found["errors_by_kind"]) == {TIMED_OUT}
