"""Offloading in virtual time: the decisions of Penstock in generated worlds, each with its own speeds, noise and lost packets."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from penstock.offloading.choice import Side, latest_s
from penstock.offloading.side_choice import SideChoice

_SIZE = 1000
_ITERATIONS = 20
_LEARNING = 50
"""Calls that are not counted, because both sides are still unknown."""


class World(msgspec.Struct, frozen=True):
    """The distributions of a call on both sides. Times are in seconds, noise is a coefficient of variation."""

    device_s: float
    device_noise: float
    server_s: float
    server_noise: float
    loss: float = 0.0
    """Share of the calls to the server that lose a packet."""
    resend_s: float = 0.0
    """Time that a lost packet adds."""
    later_s: float | None = None
    """Mean time of the server in every second period; None if the link does not change."""
    period: int = 500
    """Calls per period of a link that changes."""

    def device(self, rng: random.Random) -> float:
        return _noisy(self.device_s, self.device_noise, rng)

    def server(self, rng: random.Random, call: int) -> float:
        lost = self.resend_s if rng.random() < self.loss else 0.0
        return _noisy(self._server_s(call), self.server_noise, rng) + lost

    def better(self, call: int) -> float:
        """The mean time of the side that is better at this call."""
        return min(self.device_s, self._server_s(call) + self.loss * self.resend_s)

    def _server_s(self, call: int) -> float:
        return self.later_s if self.later_s is not None and call // self.period % 2 else self.server_s


class Outcome(msgspec.Struct, frozen=True):
    """The mean seconds of a call, and what the probes took."""

    placed: float
    better: float
    """The mean of the better side in the same calls; of a link that changes, of the side that is better in each period."""
    hedged: float
    """The mean of the better side in the same calls, if the device also starts whenever the server is late."""
    sides: tuple[Side, ...]
    """The side of each call, also of those that are not counted."""
    probe_shares: dict[Side, float]
    """The time of the probes of each side, as a share of the whole time."""

    @property
    def ratio(self) -> float:
        return self.placed / self.better

    @property
    def hedged_ratio(self) -> float:
        return self.placed / self.hedged


def steady_world(rng: random.Random) -> World:
    """A world near its break-even point: the server takes 0.25 to 4 times the device's time, and varies by up to its mean."""
    loss = rng.choice((0.0, rng.uniform(0, 0.15)))
    ratio, resend_s = math.exp(rng.uniform(math.log(0.25), math.log(4))), rng.choice((0.2, 1.0))
    return World(0.05, rng.uniform(0, 0.5), 0.05 * ratio, rng.uniform(0, 1), loss, resend_s)


def changing_world(rng: random.Random) -> World:
    """A world with a server that changes between two means, each from a tenth to ten times the device's."""
    first, second = (0.05 * 10 ** rng.uniform(-1, 1) for _ in range(2))
    return World(0.05, rng.uniform(0, 0.2), first, rng.uniform(0, 0.4), later_s=second)


def play(world: World, calls: int, seed: int) -> Outcome:
    """Place ``calls`` calls, one after another, and measure the other side in the background as ``OffloadedModel`` does."""
    rng, choice = random.Random(seed), SideChoice()
    now, sums, sides = 0.0, [0.0] * 4, list[Side]()
    pairs: list[tuple[float, float]] = []
    probing: list[tuple[float, Side, float]] = []
    probes = dict.fromkeys(Side, 0.0)

    def settle(until: float) -> None:
        while probing and probing[0][0] <= until:
            at, side, seconds = heapq.heappop(probing)
            choice.measured(side, _SIZE, seconds, at)

    def probe(side: Side, draw: Callable[[], float]) -> None:
        if not probing and choice.is_probe_due(side, now):
            choice.started(side, now)
            seconds = draw()
            probes[side] += seconds
            heapq.heappush(probing, (now + seconds, side, seconds))

    for call in range(calls):
        device, server = world.device(rng), world.server(rng, call)
        plan = choice.plan(_SIZE)
        sides.append(plan.first)
        if plan.first is Side.DEVICE:
            probe(Side.SERVER, lambda call=call: world.server(rng, call))  # type: ignore[misc]
        waited = device if plan.first is Side.DEVICE else min(server, plan.device_after_s + device)
        now += waited
        settle(now)
        if plan.first is Side.SERVER:
            choice.measured(Side.SERVER, _SIZE, waited, now)
        if plan.first is Side.DEVICE or waited < server:
            choice.measured(Side.DEVICE, _SIZE, device, now)
        if plan.first is Side.SERVER and server <= plan.device_after_s:
            probe(Side.DEVICE, lambda: world.device(rng))
        if call >= _LEARNING:
            pairs.append((device, server))
            sums = [total + one for total, one in zip(sums, (waited, device, server, world.better(call)), strict=True)]
    counted = calls - _LEARNING
    placed, device, server, better = (total / counted for total in sums)
    if world.later_s is None:
        better = min(device, server)
    hedged = min(device, _hedged(pairs))
    return Outcome(placed, better, hedged, tuple(sides), {side: one / now for side, one in probes.items()})


def _hedged(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of calls that all go to the server, and start on the device if it is late. ``latest_s`` depends on this mean itself."""
    mean = fmean(server for _, server in pairs)
    for _ in range(_ITERATIONS):
        mean = fmean(min(server, latest_s(mean) + device) for device, server in pairs)
    return mean


def _noisy(mean: float, noise: float, rng: random.Random) -> float:
    """A log-normal value."""
    variance = math.log1p(noise**2)
    return mean * math.exp(rng.gauss(-variance / 2, math.sqrt(variance)))
