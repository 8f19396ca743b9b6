"""Compares servers under the same load, in turn and round by round, so that a disturbance affects all servers alike."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.requests import grpc_request
from benchmarks.results import Row, claim, fact
from benchmarks.servers import Server, pinned, split_cores
from penstock.measurement import Interval, student
from penstock.perf.grpc_client import GrpcConnector
from penstock.perf.http_client import Address, connect
from penstock.perf.load import closed_loop, run
from penstock.perf.loops import Connect, LoadWindow
from penstock.perf.measure import Timings, speedup
from penstock.perf.oip_client import infer_request
from penstock.tensor import Array

T = TypeVar("T")

_SATURATED = 0.95
_RESAMPLES = 1000


class Side(msgspec.Struct, frozen=True):
    """A server under load, and the requests that are sent to it in rotation."""

    server: Server
    requests: list[bytes]
    address: Address
    connector: Callable[[], Connect] = lambda: connect
    """Creates the function that opens the connections of one burst."""


class Round(msgspec.Struct, frozen=True):
    """One burst of load on one server."""

    throughput: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    per_cpu_second: float
    """Requests answered per second of CPU time that the server process used."""


Pick = Callable[[Round], float]


def side(server: Server, model: str, inputs: Sequence[Mapping[str, Array]], *, binary: bool = False) -> Side:
    """A side that sends ``inputs`` as HTTP requests to ``model`` on ``server``."""
    return http_side(server, [infer_request(server.address, model, one, binary=binary) for one in inputs])


def http_side(server: Server, requests: list[bytes]) -> Side:
    """A side that sends complete HTTP ``requests`` to ``server``."""
    return Side(server, requests, server.address)


def grpc_side(server: Server, model: str, inputs: Sequence[Mapping[str, Array]]) -> Side:
    """A side that sends ``inputs`` as gRPC calls to ``model`` on ``server``, with 16 streams per connection. Raises RuntimeError
    if the server has no gRPC address.
    """
    if server.grpc is None:
        raise RuntimeError(f"{server.address.url} says nothing of gRPC")
    return Side(server, [grpc_request(model, one) for one in inputs], server.grpc, GrpcConnector)


def measure(sides: Mapping[str, Side], connections: int, rounds: int, seconds: float) -> dict[str, list[Round]]:
    """Load every side in turn for ``seconds`` seconds, ``rounds`` times. Raises RuntimeError if a request fails."""
    return interleave({name: partial(burst, side, connections, seconds) for name, side in sides.items()}, rounds)


def interleave(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call each of ``runs`` once in every round, and return the results of ``rounds`` rounds. Every second round has the reverse
    order. An additional first round is dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 1):
        for name in names if number % 2 else names[::-1]:
            found[name].append(runs[name]())
    return {name: results[1:] for name, results in found.items()}


def burst(side: Side, connections: int, seconds: float, warmup_s: float = 0.0) -> Round:
    """Load ``side`` once, from another core than the server's if there is one. Raises RuntimeError if a request fails.

    With a warm-up, ``per_cpu_second`` is too low, because the CPU time includes the requests of the warm-up.
    """
    before = side.server.cpu_seconds()
    with pinned(split_cores()[1]):
        window = LoadWindow(seconds, warmup_s)
        load = run(closed_loop(side.address, side.requests, connections, window, connect=side.connector()))
    used = side.server.cpu_seconds() - before
    if load.errors or not load.requests:
        raise RuntimeError(
            f"{load.errors} of {load.requests} requests to {side.address.url} failed: {load.errors_by_kind} {load.first_errors}"
        )
    tick = 1 / os.sysconf("SC_CLK_TCK")
    return Round(load.throughput, load.p50_ms, load.p99_ms, load.client_cpu, load.requests / max(used, tick))


def ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Geometric mean of ``over`` by ``under``, which are paired by round, with its 95 % interval."""
    return speedup(_timings(over), _timings(under))


def mean_ratio(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Arithmetic mean of ``over`` by that of ``under``, which are paired by round, with its 95 % interval by the delta method. Unlike
    the geometric mean of ``ratio``, it counts rare slow rounds by the time that they take.
    """
    ours, theirs = np.array(over), np.array(under)
    value = ours.mean() / theirs.mean()
    error = (ours - value * theirs).std(ddof=1) / (theirs.mean() * len(ours) ** 0.5)
    reach = student(0.975, len(ours) - 1) * error
    return Interval(float(value), float(value - reach), float(value + reach))


def _timings(values: Sequence[float]) -> Timings:
    return Timings(np.array(values)[:, None])


def difference(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The median of ``over`` minus the median of ``under``, with its 95 % block-bootstrap interval. The values are paired by
    round.
    """
    picks = np.random.default_rng(0).integers(0, len(over), (_RESAMPLES, len(over)))
    found = [np.median(np.array(values)[picks], axis=1) for values in (over, under)]
    low, high = np.quantile(found[0] - found[1], (0.025, 0.975))
    return Interval(statistics.median(over) - statistics.median(under), float(low), float(high))


def throughput_claim(name: str, ours: Sequence[Round], theirs: Sequence[Round], goal: float | None) -> Row:
    """A row that claims that our throughput is at least ``goal`` times theirs. Without a goal, the row is only for information."""
    found = ratio([one.throughput for one in ours], [one.throughput for one in theirs])
    busy = max(one.client_cpu for one in ours) > _SATURATED
    figures = " : ".join(f"{median(rounds, lambda one: one.throughput):,.0f}" for rounds in (ours, theirs))
    note = f"{figures} requests/s" + ("; the load tool had no time left: the server may be faster" if busy else "")
    if goal is None:
        return fact(name, found.value, "×", interval=found, note=note)
    return claim(name, found, "×", ">=", goal, note=note)


def latency_facts(where: str, ours: Sequence[Round], theirs: Sequence[Round]) -> list[Row]:
    """Rows with the ratio of their p50 and p99 latencies to ours."""
    rows = []
    picks: dict[str, Pick] = {"p50": lambda one: one.p50_ms, "p99": lambda one: one.p99_ms}
    for name, pick in picks.items():
        found = ratio([pick(one) for one in theirs], [pick(one) for one in ours])
        note = f"{median(ours, pick):.3g} : {median(theirs, pick):.3g} ms"
        rows.append(fact(f"{name} ratio at {where}", found.value, "×", interval=found, note=note))
    return rows


def median(rounds: Sequence[Round], pick: Pick) -> float:
    """Median of one figure over rounds."""
    return statistics.median(pick(one) for one in rounds)
