"""Offloading over simulated links: ResNet-18 on a device that runs it six times per call, and so is about six times slower than the
server. The break-even speed, at which both sides take the same time, is measured first. At each link speed, calls that stay on the
device, that go to the server, and that Penstock places are then measured in turn.

An offloaded call is at most 1.1 times slower than the better side if it is so compared with either side. So both ratios have an
interval, and the worse upper end counts, which needs no choice of the better side from the same figures. The claim is about all
speeds at once. It fails if it fails at one speed, so each interval may have 95 % (R. L. Berger, "Multiparameter hypothesis testing and
acceptance sampling", 1982): the largest upper end bounds the largest ratio with at least that confidence.

A link that loses packets is measured three times as long, but only as a fact: about one call in fourteen waits for a lost packet, so
its interval stays too wide for a judgement. Noise and lost packets are judged in virtual time, where thousands of calls cost nothing.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.link import Link
from benchmarks.models import resnet18
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import interleave, mean_ratio
from benchmarks.servers import Server, penstock, pinned, split_cores
from benchmarks.simulated_links import changing_world, play, steady_world
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offloading.offloaded import OffloadedModel, OffloadOptions
from penstock.offloading.server import ServedModel
from penstock.runtime import Model
from penstock.tensor import Array

_ROUND_TRIP_S = 0.01
_FASTEST = 1000e6
_SHARES = (0.4, 0.8, 1.0, 1.25, 2.5)
"""Speeds to measure, as shares of the break-even speed."""
_JITTER_S, _LOSS = 0.005, 0.002
_SLOWER = 6
_LEARNING, _MOST_CALLS = 50, 400
"""Calls before the measurement, as in the simulation; and the most calls to wait for a change of side."""
_WITHIN = 1.1
_IMAGE = {"input": np.random.default_rng(0).random((1, 3, 224, 224), np.float32)}


class _SlowDevice:
    """The model of a device that is slower than this machine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for _ in range(_SLOWER - 1):
            self._loaded.forward(inputs)
        return self._loaded.forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)


class _Effort(msgspec.Struct, frozen=True):
    rounds: int
    calls: int
    """Calls of each side in a round. Their mean is one observation, because a choice lasts for some calls."""


class _PausedClock:
    """Time that stops while other sides are measured, so that the placed calls are probed as often as without them."""

    def __init__(self) -> None:
        self._passed, self._since = 0.0, time.monotonic()
        self._runs = True

    def __call__(self) -> float:
        return self._passed + (time.monotonic() - self._since if self._runs else 0.0)

    def pause(self) -> None:
        self._passed, self._runs = self(), False

    def go_on(self) -> None:
        self._since, self._runs = time.monotonic(), True


def rows(quick: bool) -> list[Row]:
    """The rows of all link speeds."""
    effort = _Effort(4, 2) if quick else _Effort(8, 4)
    server_core, own_core = split_cores()
    with tempfile.TemporaryDirectory() as folder, pinned(own_core):
        model = resnet18(Path(folder, "resnet18.onnx"))
        engine = get_engine("onnxruntime").load(Artifact.from_file(model), {"threads": 1})
        with penstock(model, server_core) as server, Model("resnet18", _SlowDevice(engine)) as device:
            break_even = _break_even(device, server)
            speeds = {
                f"{share:g} of the break-even speed": share * break_even for share in _SHARES[:: 2 if quick else 1]
            }
            found = []
            for name, speed in (speeds | {"1000 Mbit/s": _FASTEST}).items():
                with _linked(server, speed) as link:
                    found.append(_at_speed(name, device, link, effort))
            with _linked(server, break_even, _JITTER_S, _LOSS) as link:
                longer = _Effort(3 * effort.rounds, effort.calls)
                lossy, _ = _at_speed("the break-even speed with jitter and loss", device, link, longer)
            changes = _changes(device, server, break_even)
    worst = max((interval for _, interval in found), key=lambda interval: interval.high)
    about = f"the largest upper end of {len(found)} speeds; break-even at {break_even / 1e6:.0f} Mbit/s"
    rows = [row for row, _ in found]
    return [
        *rows,
        lossy,
        *changes,
        *_simulated(quick),
        claim("offloaded call / better side, worst speed", worst, "×", "<=", _WITHIN, note=about),
    ]


def _break_even(device: Model, server: Server) -> float:
    """The bits per second at which both sides take the same time."""
    with _linked(server, _FASTEST) as link, _served(link) as served:
        sides = {"device": partial(_device, device), "server": partial(_asked, served)}
        found: dict[str, list[float]] = interleave(sides, 8)
    spare_s = statistics.fmean(found["device"]) - statistics.fmean(found["server"])
    bits = 8 * sum(array.nbytes for array in _IMAGE.values())
    if spare_s <= 0:
        raise RuntimeError("the device is not slower than the server over a fast link, so no speed breaks even")
    return 1 / (1 / _FASTEST + spare_s / bits)


def _at_speed(name: str, device: Model, link: Link, effort: _Effort) -> tuple[Row, Interval]:
    """The row of one link, and the interval that the claim judges."""
    clock = _PausedClock()
    with _served(link) as served, _served(link) as own:
        placed = OffloadedModel(device, own, OffloadOptions(timeout_s=60), clock)
        for _ in range(_LEARNING):
            placed.infer(_IMAGE)
        _settle(placed)

        def placed_calls() -> float:
            clock.go_on()
            mean = _mean(lambda: placed.infer(_IMAGE), effort.calls)
            _settle(placed)
            clock.pause()
            return mean

        clock.pause()
        times = interleave(
            {
                "device": lambda: _mean(lambda: device.infer(_IMAGE), effort.calls),
                "server": lambda: _mean(lambda: served.infer(_IMAGE).result(), effort.calls),
                "placed": placed_calls,
            },
            effort.rounds,
        )
    ratios = [mean_ratio(times["placed"], times[side]) for side in ("device", "server")]
    interval = Interval(*(max(each) for each in zip(*map(msgspec.structs.astuple, ratios), strict=True)))
    device_ms, server_ms = (statistics.fmean(times[side]) * 1e3 for side in ("device", "server"))
    note = f"{link.bits_per_s / 1e6:.0f} Mbit/s: device {device_ms:.0f} ms, server {server_ms:.0f} ms"
    return fact(f"offloaded call / better side at {name}", interval.value, "×", interval=interval, note=note), interval


def _changes(device: Model, server: Server, break_even: float) -> list[Row]:
    """How many calls run on the wrong side after the link has changed."""
    rows = []
    slow, fast = 0.25 * break_even, _FASTEST
    with _linked(server, fast) as link, _served(link) as served:
        placed = OffloadedModel(device, served, OffloadOptions(timeout_s=60))
        _followed(placed, "server")
        for name, speed, side in (("slow", slow, "device"), ("fast", fast, "server")):
            link.bits_per_s = speed
            start = time.perf_counter()
            calls = _followed(placed, side)
            note = f"{time.perf_counter() - start:.1f} s, at {speed / 1e6:.0f} Mbit/s"
            rows.append(fact(f"calls until offloading follows a link that becomes {name}", calls, "", note=note))
        _settle(placed)
    return rows


def _simulated(quick: bool) -> list[Row]:
    """The decisions alone in virtual time. The same on every machine."""
    worlds, calls = (10, 500) if quick else (100, 1000)
    steady, changing = (
        [play(kind(random.Random(seed)), calls, seed) for seed in range(worlds)]
        for kind in (steady_world, changing_world)
    )
    about = f"{worlds} worlds, {calls} calls each; mean"
    hedged, ratios, followed = (
        [one.hedged_ratio for one in steady],
        [one.ratio for one in steady],
        [one.ratio for one in changing],
    )
    return [
        claim(
            "offloaded call / better side, worst of the simulated worlds with noise and lost packets",
            max(ratios),
            "×",
            "<=",
            _WITHIN,
            note=f"{about} {statistics.fmean(ratios):.3g}×",
        ),
        fact(
            "the same against the better side with the same hedge, worst",
            max(hedged),
            "×",
            note=f"if the server is late, the device starts too; mean {statistics.fmean(hedged):.3g}×",
        ),
        fact(
            "offloaded call / better side of each period, if the server's time changes every 500 calls, worst",
            max(followed),
            "×",
            note=f"{about} {statistics.fmean(followed):.3g}×",
        ),
    ]


def _followed(placed: OffloadedModel, side: str) -> int:
    """Call until ``side`` has answered five calls in a row, and return how many calls there were before."""
    in_a_row = calls = 0
    while in_a_row < 5:
        if calls == _MOST_CALLS:
            raise RuntimeError(f"{calls} calls, and the {side} still does not answer")
        before = getattr(placed.counts, side) - placed.counts.fallbacks * (side == "device")
        placed.infer(_IMAGE)
        after = getattr(placed.counts, side) - placed.counts.fallbacks * (side == "device")
        in_a_row, calls = (in_a_row + 1 if after > before else 0), calls + 1
    return calls - in_a_row


def _settle(placed: OffloadedModel) -> None:
    """Wait until no call runs in the background."""
    placed._probing.acquire()  # noqa: SLF001 - nothing else needs to know
    placed._probing.release()  # noqa: SLF001


@contextmanager
def _linked(server: Server, bits_per_s: float, jitter_s: float = 0.0, loss: float = 0.0) -> Iterator[Link]:
    """A link that runs beside the server, because a real one does not compete with the device for its core."""
    link = Link(server.address, bits_per_s, _ROUND_TRIP_S, jitter_s=jitter_s, loss=loss)
    with ExitStack() as stack:
        with pinned(os.sched_getaffinity(server.pid)):
            stack.enter_context(link)
        yield link


@contextmanager
def _served(link: Link) -> Iterator[ServedModel]:
    served = ServedModel(link.address, "resnet18", 60)
    served.start()
    try:
        yield served
    finally:
        served.close()


def _device(device: Model) -> float:
    return _seconds(lambda: device.infer(_IMAGE))


def _asked(served: ServedModel) -> float:
    return _seconds(lambda: served.infer(_IMAGE).result())


def _mean(call: Callable[[], object], calls: int) -> float:
    return statistics.fmean(_seconds(call) for _ in range(calls))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
