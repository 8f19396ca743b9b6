"""Admission: enforces each client's rights, rate and concurrency, and limits the bytes of all requests. No method waits.

``enter`` is called when a request's headers arrive, before any part of its message is stored or decoded. ``admit`` is called once
the request is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from penstock.clock import Clock
from penstock.errors import PermissionDenied, ResourceExhausted, Unavailable
from penstock.online.server.access.auth import Access, Client
from penstock.online.server.access.gate import Gate
from penstock.request import Done, InferRequest, InferResponse, Outcome

_BUSY_S = 1.0
LARGE_BYTES = 8 << 20
"""If usage peaks at this number of bytes or more, freed memory is returned to the system once usage falls to a quarter of the peak."""


class TokenBucket(msgspec.Struct):
    """Admits at most ``burst + rate × t`` requests in any ``t`` seconds. Pure."""

    rate: float
    """Tokens added per second (> 0) since ``at``."""
    tokens: float
    at: float
    """The time at which ``tokens`` was computed."""

    def take(self, rate: float, burst: float, now: float) -> float:
        """Take a token and return 0, or return the seconds until a token is available. The limits may differ between calls."""
        self.tokens = min(burst, self.tokens + (now - self.at) * self.rate)
        self.rate, self.at = rate, now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / rate


class ByteBudget:
    """Limits the memory for all requests and unread responses, in bytes. A limit of 0 means no limit.

    Callers take bytes when the bytes arrive, not when a header announces them. Otherwise, a client could lock out all other clients
    by announcing large bodies and sending nothing. Callers give the bytes back once the request is answered.
    """

    def __init__(self, limit: int, on_fall: Callable[[], None] = lambda: None) -> None:
        """``on_fall`` is called when usage falls to a small part of its peak. The C library may still hold the freed memory."""
        self.used = 0
        self._limit = limit
        self.gate = Gate()
        """Limits the memory that large requests hold at the same time. Further large requests wait until they may be decoded."""
        self.on_fall = on_fall
        self._peak = 0

    def take(self, count: int) -> bool:
        """Take ``count`` bytes. Returns False, and takes nothing, if this would exceed the limit."""
        if self._limit and self.used + count > self._limit:
            return False
        self.used += count
        return True

    def give(self, count: int) -> None:
        """Give back ``count`` bytes."""
        before = self.used
        self.used = before - count
        if before >= LARGE_BYTES or self._peak:
            self._peak = max(self._peak, before)
            if self.used <= self._peak // 4:
                self._peak = 0
                self.on_fall()

    def refusal(self) -> Unavailable:
        """The error for a request that would exceed the limit."""
        return Unavailable("the server's request memory limit is reached", "try again later", _BUSY_S)


class Reservation:
    """The bytes that one request has taken from a budget."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._size = 0

    def take(self, count: int) -> None:
        """Take ``count`` more bytes. Raises Unavailable."""
        if not self._budget.take(count):
            raise self._budget.refusal()
        self._size += count

    def release(self) -> None:
        """Give all bytes back. Idempotent."""
        self._budget.give(self._size)
        self._size = 0


class _Usage(msgspec.Struct):
    running: int = 0
    bucket: TokenBucket | None = None


class Admission:
    """Enforces the limits that the keys file sets for each client. Used only on the event loop."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self.access = access
        """Identifies the clients."""
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def check(self, client: str, model: str) -> None:
        """Raise PermissionDenied unless ``client`` may use ``model``. The model need not exist."""
        self.access.check(client, model)

    def enter(self, client: str) -> None:
        """Count a request of ``client`` before its message is read. Raises ResourceExhausted (too many requests), Unauthenticated."""
        access = self.access
        if access.enabled:
            limits = access.client(client)
            if limits.max_concurrent is not None or limits.requests_per_second is not None:
                usage = self._usage.setdefault(client, _Usage())
                _check_running(client, limits, usage)
                self._take_token(client, limits, usage)

    def admit(self, request: InferRequest, done: Done) -> Done:
        """Admit ``request``. Call ``enter`` first. Returns a callback. Use it instead of ``done`` for every response or error.

        Raises PermissionDenied (model or priority), ResourceExhausted (too many requests), and Unauthenticated if the client has been
        removed from the keys file.
        """
        access = self.access
        if not access.enabled:
            return done
        client = access.client(request.client)
        self.check(request.client, request.model_name)
        if 0 < request.priority < client.highest_priority:
            raise PermissionDenied(
                f"client '{request.client}' may not request priority {request.priority}",
                f"the highest priority that it may request is {client.highest_priority}",
            )
        if client.max_concurrent is None:
            return done
        usage = self._usage.setdefault(request.client, _Usage())
        _check_running(request.client, client, usage)
        return _counted(usage, done)

    def _take_token(self, name: str, client: Client, usage: _Usage) -> None:
        rate, now = client.requests_per_second, self._clock.now()
        if rate is None:
            usage.bucket = None
            return
        burst = float(client.burst or max(1, math.floor(rate)))
        if usage.bucket is None:
            usage.bucket = TokenBucket(rate, burst, now)
        wait_s = usage.bucket.take(rate, burst, now)
        if wait_s:
            raise ResourceExhausted(
                f"client '{name}' sends more than {rate:g} requests per second", "send requests more slowly", wait_s
            )


def _check_running(name: str, client: Client, usage: _Usage) -> None:
    if client.max_concurrent is not None and usage.running >= client.max_concurrent:
        raise ResourceExhausted(
            f"client '{name}' has too many requests in flight ({usage.running})", "wait for a response", _BUSY_S
        )


def _counted(usage: _Usage, done: Done) -> Done:
    """Wrap ``done`` so that the request counts as running until its last response."""
    usage.running += 1
    is_over = False

    def end(outcome: Outcome) -> None:
        nonlocal is_over
        if not is_over and not (isinstance(outcome, InferResponse) and not outcome.final):
            is_over = True
            usage.running -= 1
        done(outcome)

    return end
