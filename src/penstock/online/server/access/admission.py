"""Who is let in, and how much of it: rights, rates, concurrency, bytes. Decisions without waiting, on a clock that is passed in."""

from __future__ import annotations

import math

import msgspec

from penstock.clock import Clock
from penstock.errors import PermissionDenied, ResourceExhausted, Unavailable
from penstock.online.server.access.auth import Access, Client
from penstock.request import Done, InferRequest, InferResponse, Outcome

_BUSY_S = 1.0


class TokenBucket(msgspec.Struct):
    """Lets at most ``burst + rate × t`` (rate > 0, burst >= 1) through in any span of ``t`` seconds. Pure."""

    rate: float
    """Tokens per second."""
    burst: float
    """Most tokens that gather."""
    tokens: float
    at: float
    """When ``tokens`` was counted."""

    @classmethod
    def full(cls, rate: float, burst: float, now: float) -> TokenBucket:
        return cls(rate, burst, burst, now)

    def take(self, now: float) -> float:
        """Take one token and return 0; or return in how many seconds there will be one."""
        self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        if self.tokens >= 1:
            self.tokens -= 1
            return 0.0
        return (1 - self.tokens) / self.rate

    def change(self, rate: float, burst: float, now: float) -> None:
        """Other limits from now on."""
        self.tokens = min(burst, self.tokens + (now - self.at) * self.rate)
        self.rate, self.burst, self.at = rate, burst, now


class ByteBudget:
    """Bytes of requests that may be held at once, by all connections together; a ``limit`` of 0 is none.

    Take bytes as they arrive and not as they are announced, else a few clients that announce much and send nothing keep all
    others out; give them back when the request has been answered.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit

    def take(self, count: int) -> bool:
        """Whether there was room for ``count`` more bytes; if so they are taken."""
        if self._limit and self.used + count > self._limit:
            return False
        self.used += count
        return True

    def give(self, count: int) -> None:
        """Bytes that were taken are free again."""
        self.used -= count

    def refusal(self) -> Unavailable:
        """What to answer where ``take`` said no."""
        return Unavailable("the server holds as many bytes of requests as it may", "try again later", _BUSY_S)


class _Usage(msgspec.Struct):
    running: int = 0
    bucket: TokenBucket | None = None


class Admission:
    """Holds each client to what the keys file says of it. Belongs to the event loop."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def check(self, client: str, model: str) -> None:
        """Raise PermissionDenied unless ``client`` may use ``model``, whether or not there is such a model."""
        self._access.check(client, model)

    def admit(self, request: InferRequest, done: Done) -> Done:
        """Let ``request`` in; its answers, an error too, must be given to what is returned, which passes them on to ``done``.

        Raises PermissionDenied (model, priority), ResourceExhausted (rate, concurrency; the former says when to come again), and
        Unauthenticated if the client has been removed.
        """
        access = self._access
        if not access.enabled:
            return done
        client = access.client(request.client)
        self.check(request.client, request.model_name)
        if 0 < request.priority < client.highest_priority:
            raise PermissionDenied(
                f"client '{request.client}' may not ask for priority {request.priority}",
                f"the most urgent that it may ask for is {client.highest_priority}",
            )
        if client.max_concurrent is None and client.requests_per_second is None:
            return done
        usage = self._usage.get(request.client)
        if usage is None:
            usage = self._usage[request.client] = _Usage()
        if client.max_concurrent is not None and usage.running >= client.max_concurrent:
            raise ResourceExhausted(
                f"client '{request.client}' has {usage.running} requests unanswered, as many as it may",
                "wait for an answer",
                _BUSY_S,
            )
        self._take_token(request.client, client, usage)
        return _counted(usage, done)

    def _take_token(self, name: str, client: Client, usage: _Usage) -> None:
        rate, now = client.requests_per_second, self._clock.now()
        if rate is None:
            usage.bucket = None
            return
        burst = float(client.burst or max(1, math.floor(rate)))
        bucket = usage.bucket
        if bucket is None:
            bucket = usage.bucket = TokenBucket.full(rate, burst, now)
        elif (bucket.rate, bucket.burst) != (rate, burst):
            bucket.change(rate, burst, now)
        wait_s = bucket.take(now)
        if wait_s:
            raise ResourceExhausted(
                f"client '{name}' sends more than {rate:g} requests per second", "send fewer, or wait", wait_s
            )


def _counted(usage: _Usage, done: Done) -> Done:
    """``done``, counted as running until its last answer."""
    usage.running += 1
    is_over = False

    def end(outcome: Outcome) -> None:
        nonlocal is_over
        if not is_over and not (isinstance(outcome, InferResponse) and not outcome.final):
            is_over = True
            usage.running -= 1
        done(outcome)

    return end
