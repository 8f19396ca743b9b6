"""Tests of penstock.perf.load against real servers that are slow, wrong, or gone."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from penstock.errors import InvalidArgument, Unavailable
from penstock.perf.http_client import Address
from penstock.perf.load import closed_loop, open_loop, run
from penstock.perf.loops import LoadWindow
from penstock.perf.oip_client import decode_answer, infer_request
from penstock.perf.pacing import poisson_arrivals
from penstock.perf.tally import ClosedLoopResult, OpenLoopResult
from servers import Request, answer, answering, double, serving

NOBODY = Address("127.0.0.1", 1)
QUESTION = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def few(count: int, timeout_s: float = 10.0) -> LoadWindow:
    """Exactly ``count`` requests, no warm-up."""
    return LoadWindow(duration_s=None, warmup_s=0.0, timeout_s=timeout_s, max_requests=count)


def closed(handle, concurrency: int, window: LoadWindow, **options) -> ClosedLoopResult:
    async def main() -> ClosedLoopResult:
        async with serving(handle) as address:
            return await closed_loop(address, [QUESTION], concurrency, window, **options)

    return run(main())


def opened(handle, rate: float, window: LoadWindow, **options) -> OpenLoopResult:
    async def main() -> OpenLoopResult:
        async with serving(handle) as address:
            return await open_loop(address, [QUESTION], rate, window, **options)

    return run(main())


def test_a_closed_loop_counts_each_request_once() -> None:
    seen: list[Request] = []

    async def handle(request, writer):
        seen.append(request)
        writer.write(answer())

    result = closed(handle, 4, few(100))
    assert (result.concurrency, result.requests, result.errors, len(seen)) == (4, 100, 0, 100)
    assert result.throughput == pytest.approx(100 / result.duration_s)
    assert 0 < result.p50_ms <= result.p95_ms <= result.p99_ms <= result.p999_ms <= result.max_ms
    assert seen[0].body == b"{}"


def test_a_closed_loop_keeps_all_connections_busy_and_none_twice() -> None:
    waiting, most = 0, 0
    everyone = asyncio.Event()

    async def handle(request, writer):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == 8:
            everyone.set()
        await everyone.wait()
        waiting -= 1
        writer.write(answer())

    assert closed(handle, 8, few(64)).errors == 0
    assert most == 8


def test_requests_are_sent_in_turn_and_answers_can_be_checked() -> None:
    rows = [np.full((1, 3), number, np.float32) for number in range(5)]
    checked: list[int] = []

    def check(index: int, body: bytes, json_size: int | None) -> bool:
        checked.append(index)
        return index != 3 and np.array_equal(decode_answer(body, json_size)["y"], rows[index] * 2)

    async def main() -> ClosedLoopResult:
        async with serving(double) as address:
            requests = [infer_request(address, "double", {"x": row}, binary=True) for row in rows]
            return await closed_loop(address, requests, 1, few(10), check)

    result = run(main())
    assert checked == [0, 1, 2, 3, 4] * 2
    assert result.errors_by_kind == {"wrong answer": 2}
    assert result.requests == 10


def test_statuses_are_errors_by_kind_and_have_no_latency() -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        number = next(numbers) % 4
        writer.write(answer(status=("200 OK", "200 OK", "503 Service Unavailable", "400 Bad Request")[number]))

    result = closed(handle, 1, few(40))
    assert result.errors_by_kind == {"HTTP 503": 10, "HTTP 400": 10}
    assert (result.requests, result.errors) == (40, 20)
    assert result.throughput == pytest.approx(20 / result.duration_s)


@pytest.mark.parametrize("piece", [b"", b"HTTP/1.1 200", answer(b"x" * 100)[:-50]], ids=["silent", "head", "body"])
def test_a_dropped_connection_is_an_error_and_comes_back(piece: bytes) -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        if next(numbers) % 5 == 4:
            writer.write(piece)
            writer.close()
        else:
            writer.write(answer())

    result = closed(handle, 2, few(50))
    assert (result.requests, result.errors_by_kind) == (50, {"connection dropped": 10})


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        answer() + b"more",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
    ids=["other protocol", "no length", "too much", "endless head"],
)
def test_what_is_not_an_answer_is_an_error(text: bytes) -> None:
    result = closed(answering(text), 1, few(3))
    assert result.errors_by_kind == {"unreadable answer": 3}
    assert np.isnan(result.p50_ms)
    assert result.throughput == 0


def test_a_server_that_closes_politely_causes_no_error() -> None:
    async def handle(request, writer):
        writer.write(answer(headers="Connection: close\r\n"))
        writer.close()

    assert closed(handle, 2, few(20)).errors == 0


def test_no_answer_is_a_time_out() -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        if next(numbers) == 1:
            await asyncio.Event().wait()
        writer.write(answer())

    result = closed(handle, 1, few(5, timeout_s=0.2))
    assert result.requests == 5
    assert set(result.errors_by_kind) == {"time-out"}


def test_a_server_that_goes_away_for_good_ends_a_counted_run() -> None:
    async def main() -> ClosedLoopResult:
        numbers = itertools.count()
        async with serving(answering(answer())) as elsewhere:
            port = elsewhere.port

        async def handle(reader, writer):
            server.close()
            if next(numbers) < 1:
                await reader.readuntil(b"{}")
                writer.write(answer())
                await reader.readuntil(b"{}")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", port)
        return await closed_loop(Address("127.0.0.1", port), [QUESTION], 1, few(4))

    result = run(main())
    assert (result.requests, result.errors_by_kind) == (4, {"connection dropped": 1, "no connection": 2})


def test_warm_up_does_not_count() -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        writer.write(answer(status="500 Internal Server Error" if next(numbers) < 3 else "200 OK"))

    result = closed(handle, 1, LoadWindow(duration_s=0.1, warmup_s=0.3))
    assert result.errors == 0
    assert 0 < result.requests < next(numbers) - 3


def test_an_open_loop_sends_every_arrival_of_its_seed() -> None:
    window = LoadWindow(duration_s=0.4, warmup_s=0.1)
    due = [at for at in itertools.takewhile(lambda at: at < 0.5, poisson_arrivals(1000, seed=7)) if at >= 0.1]
    result = opened(answering(answer()), 1000, window, seed=7)
    assert result.errors == 0
    assert abs(result.requests - len(due)) <= 1  # one that falls due at an edge, by rounding
    assert (result.rate, result.offered_rate) == (1000, pytest.approx(result.requests / 0.4))
    assert 0 < result.p50_ms <= result.p99_ms <= result.max_ms


def test_a_stall_is_charged_for_everyone_whom_it_kept_waiting() -> None:
    stall_s = 0.2
    numbers = itertools.count()
    gate = asyncio.Event()
    stalled: list[float] = []

    def release() -> None:
        stalled.append(time.perf_counter())
        gate.set()

    async def handle(request, writer):
        if next(numbers) == 50:
            stalled.append(time.perf_counter())
            asyncio.get_running_loop().call_later(stall_s, release)
        if stalled:
            await gate.wait()
        writer.write(answer())

    # Two connections: all but two of the requests that fell due in the stall were not even sent then.
    result = opened(handle, 500, LoadWindow(duration_s=0.5, warmup_s=0.0), max_connections=2)
    began, ended = stalled
    assert result.errors == 0
    assert result.connections == 2
    assert result.p99_ms > (ended - began) * 1e3 / 2  # a fifth and more of all fell due in the stall's first half
    assert result.mean_ms > stall_s * 1e3 / 20


def test_arrivals_are_never_skipped_and_those_left_at_the_end_time_out() -> None:
    async def handle(request, writer):
        await asyncio.Event().wait()

    due = list(itertools.takewhile(lambda at: at < 0.2, poisson_arrivals(500, seed=0)))
    result = opened(handle, 500, LoadWindow(duration_s=0.2, warmup_s=0.0, timeout_s=0.2), max_connections=2)
    assert abs(result.requests - len(due)) <= 1
    assert result.errors_by_kind == {"time-out": result.requests}
    assert result.throughput == 0


def test_late_answers_are_awaited_but_do_not_count_as_throughput() -> None:
    released = asyncio.Event()

    async def handle(request, writer):
        await released.wait()
        writer.write(answer())

    async def main() -> OpenLoopResult:
        async with serving(handle) as address:
            load = asyncio.create_task(open_loop(address, [QUESTION], 200, LoadWindow(duration_s=0.2, warmup_s=0.0)))
            asyncio.get_running_loop().call_later(0.8, released.set)
            return await load

    result = run(main())
    assert result.errors == 0
    assert result.requests > 0
    assert result.throughput == 0
    assert result.offered_rate > 0


def test_an_open_loop_survives_drops() -> None:
    numbers = itertools.count()

    async def handle(request, writer):
        if next(numbers) % 10 == 9:
            writer.close()
        else:
            writer.write(answer())

    result = opened(handle, 500, LoadWindow(duration_s=0.3, warmup_s=0.0))
    assert set(result.errors_by_kind) == {"connection dropped"}
    assert result.errors >= result.requests // 20


def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(Unavailable, match="cannot connect to http://127.0.0.1:1: .*penstock serve"):
        run(closed_loop(NOBODY, [QUESTION], 3))
    with pytest.raises(Unavailable, match="cannot connect"):
        run(open_loop(NOBODY, [QUESTION], 10))


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), 1e9])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(InvalidArgument, match="rate"):
        run(open_loop(NOBODY, [QUESTION], rate))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="concurrency must be at least 1, got 0"):
        run(closed_loop(NOBODY, [QUESTION], 0))
    with pytest.raises(InvalidArgument, match="no requests"):
        run(closed_loop(NOBODY, [], 1))
    with pytest.raises(InvalidArgument, match="no end"):
        run(closed_loop(NOBODY, [QUESTION], 1, LoadWindow(duration_s=None)))
    with pytest.raises(InvalidArgument, match="needs a duration"):
        run(open_loop(NOBODY, [QUESTION], 1, LoadWindow(max_requests=3)))
