"""Load generation with a closed or an open loop.

In a *closed* loop, each connection sends its next request when its last request is answered. An *open* loop sends requests on
schedule, as a Poisson process of a given rate. If no connection is free, a request waits and is never skipped. Latency is measured
from the scheduled time. Latencies therefore include all waiting that a stalled server causes, which avoids "coordinated omission" (Gil
Tene, "How NOT to Measure Latency").
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from penstock.errors import InvalidArgument
from penstock.perf.http_client import Address, connect
from penstock.perf.loops import Check, ClosedLoop, Connect, LoadWindow, OpenLoop, Target
from penstock.perf.pacing import poisson_arrivals
from penstock.perf.tally import ClosedLoopResult, OpenLoopResult

_T = TypeVar("_T")
_WINDOW = LoadWindow()
_MAX_RATE = 1_000_000


async def closed_loop(
    address: Address,
    requests: Sequence[bytes],
    concurrency: int,
    window: LoadWindow = _WINDOW,
    check: Check | None = None,
    *,
    connect: Connect = connect,
) -> ClosedLoopResult:
    """Send ``requests`` in rotation over ``concurrency`` connections. Raises InvalidArgument, Unavailable.

    ``connect`` opens HTTP/1.1 connections by default. For gRPC, pass a ``GrpcConnector``.
    """
    if concurrency < 1:
        raise InvalidArgument(f"concurrency must be at least 1, got {concurrency}")
    if window.duration_s is None and window.max_requests is None:
        raise InvalidArgument("the load window has no end", "give a duration or a number of requests")
    loop = ClosedLoop(Target(address, requests, connect), concurrency, window, check)
    await loop.run()
    return ClosedLoopResult(concurrency=concurrency, **loop.tally.figures())


async def open_loop(
    address: Address,
    requests: Sequence[bytes],
    rate: float,
    window: LoadWindow = _WINDOW,
    *,
    check: Check | None = None,
    max_connections: int = 256,
    seed: int = 0,
) -> OpenLoopResult:
    """Send HTTP ``requests`` in rotation, as a Poisson process of ``rate`` per second. Raises InvalidArgument, Unavailable.

    At most ``max_connections`` connections are opened; further requests wait.
    """
    if not 0 < rate <= _MAX_RATE:
        raise InvalidArgument(f"the rate must be above 0 and at most {_MAX_RATE:,} requests per second, got {rate:g}")
    if window.duration_s is None or window.max_requests is not None:
        raise InvalidArgument("an open loop needs a duration instead of a number of requests", "set the duration only")
    loop = OpenLoop(Target(address, requests, connect), max_connections, window, check, poisson_arrivals(rate, seed))
    await loop.run()
    figures = loop.tally.figures()
    offered = figures["requests"] / window.duration_s
    return OpenLoopResult(rate=rate, offered_rate=offered, connections=loop.most_connections, **figures)


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on uvloop if it is installed, else on asyncio's event loop."""
    try:
        import uvloop  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
