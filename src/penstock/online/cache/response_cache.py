"""The response cache for deterministic models, bounded in bytes.

request → key → cached?              → respond at once
                equal request runs?  → share its response                      (single flight, flight.py)
                in second tier?      → respond, and cache it here too          (optional, redis.py)
                otherwise            → run the model and cache the response    (errors are not cached)
"""

from __future__ import annotations

import importlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from penstock.clock import Clock
from penstock.errors import InvalidConfig, Unavailable
from penstock.online.cache.answer import CachedAnswer
from penstock.online.cache.flight import Flight, Submit, Waiter
from penstock.online.cache.key import cache_key, model_prefix
from penstock.online.scheduler.answers import tell
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest
from penstock.telemetry.statistics import Failure, ModelStatistics

_LARGEST_SHARE = 4
"""A response larger than 1/4 of the cache is not cached, because it would evict too many other responses."""


class SecondTier(Protocol):
    """A larger, slower cache behind the response cache, which several servers may share. Failures count as misses."""

    def get(self, key: bytes, done: Callable[[CachedAnswer | None], None]) -> Cancellable | None:
        """Look up ``key`` and call ``done`` once, unless the result is cancelled. Returns None if ``done`` was already called."""

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        """Store ``answer`` in the background, if possible."""

    async def close(self) -> None:
        """Cancel everything in progress."""


def open_cache(cache_bytes: int, cache_redis: str, cache_ttl_s: float, clock: Clock) -> ResponseCache | None:
    """The cache that the server's settings describe; None if it is disabled.

    Raises InvalidConfig. Raises Unavailable if the Python package ``redis`` is not installed.
    """
    if not cache_bytes:
        if cache_redis:
            raise InvalidConfig("'cache_redis' requires 'cache_bytes'", "set 'cache_bytes', e.g. 268435456")
        return None
    if not cache_redis:
        return ResponseCache(cache_bytes, clock)
    try:
        redis = importlib.import_module("penstock.online.cache.redis")
    except ImportError as error:
        raise Unavailable(f"Redis is not available: {error}", "pip install 'penstock[redis]'") from None
    second = redis.RedisTier(cache_redis, cache_ttl_s, cache_bytes // _LARGEST_SHARE, clock)
    return ResponseCache(cache_bytes, clock, second)


class ResponseCache:
    """The cached responses of all models, at most ``max_bytes`` (> 0), with LRU eviction. Used only on the event loop."""

    def __init__(self, max_bytes: int, clock: Clock, second: SecondTier | None = None) -> None:
        self.clock = clock
        self.second = second
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[CachedAnswer, ModelCache]] = OrderedDict()

    @property
    def max_answer_bytes(self) -> int:
        """The maximum size of a cached response."""
        return self._max_bytes // _LARGEST_SHARE

    def of(
        self, identity: str | Callable[[], str], version: str, statistics: ModelStatistics, max_waiting: int
    ) -> ModelCache:
        """The cache of one model version. The model must be neither decoupled nor stateful.

        ``identity`` identifies the model's content, so that a changed model does not find old responses here or in the second tier.
        For an ensemble, ``identity`` is a function that is called on each request, because the ensemble's models may change. At most
        ``max_waiting`` requests may wait for responses to equal requests.
        """
        if isinstance(identity, str):
            prefix = model_prefix(identity, version)
            return ModelCache(self, lambda: prefix, statistics, max_waiting)
        return ModelCache(self, lambda: model_prefix(identity(), version), statistics, max_waiting)

    def get(self, key: bytes) -> CachedAnswer | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, answer: CachedAnswer, owner: ModelCache) -> None:
        """Cache ``answer``, unless it is too large, and evict other responses to make room."""
        self._remove(key)
        if answer.size_bytes > self.max_answer_bytes:
            return
        self._entries[key] = answer, owner
        owner.keys.add(key)
        self.size_bytes += answer.size_bytes
        while self.size_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def forget(self, owner: ModelCache) -> None:
        """Remove all responses of ``owner``."""
        for key in list(owner.keys):
            self._remove(key)

    async def close(self) -> None:
        """Close the second tier."""
        if self.second is not None:
            await self.second.close()

    def __len__(self) -> int:
        return len(self._entries)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            answer, owner = entry
            self.size_bytes -= answer.size_bytes
            owner.keys.discard(key)


class ModelCache:
    """The cache of one model version. ``ResponseCache.of`` creates it. Used only on the event loop."""

    def __init__(
        self, cache: ResponseCache, prefix: Callable[[], bytes], statistics: ModelStatistics, max_waiting: int
    ) -> None:
        self.keys: set[bytes] = set()
        """Keys of the cached responses; only ``ResponseCache`` changes them."""
        self._cache = cache
        self._prefix = prefix
        self._statistics = statistics
        self._max_waiting = max_waiting
        # A request does not wait for an equal request of another priority, because a less urgent request could delay it.
        self._flights: dict[tuple[bytes, int], Flight] = {}
        self._waiting = 0
        self._is_open = True

    def answer(self, request: InferRequest, done: Done, submit: Submit) -> Cancellable | None:
        """Answer the valid ``request`` from the cache, from an equal request in progress, or by ``submit(done)``.

        ``submit`` passes the request to the scheduler, and may be called later. ``done`` is called once. If ``done`` is called
        immediately, the result is None. Outputs from the cache are read-only. Raises Unavailable.
        """
        arrived_ns = time.monotonic_ns()
        key = cache_key(self._prefix(), request)
        if key is None:
            return submit(done)
        answer = self._cache.get(key)
        if answer is not None:
            now_ns = time.monotonic_ns()
            self._statistics.cache_hit(arrived_ns, now_ns - arrived_ns, now_ns)
            tell(done, answer.to(request))
            return None
        waiter = Waiter(request, done, submit, arrived_ns, time.monotonic_ns() - arrived_ns)
        flight = self._flights.get((key, request.priority))
        if flight is not None:
            if self._waiting >= self._max_waiting:
                self._statistics.failed(Failure.REJECTED, arrived_ns, time.monotonic_ns())
                raise Unavailable(f"the queue of model '{request.model_name}' is full", "try again later", 1)
            self._waiting += 1
            return flight.join(waiter, self._left)
        return self._fly(key, waiter)

    def forget(self) -> None:
        """Remove all responses and stop caching. Called when the model version is unloaded."""
        self._is_open = False
        self._cache.forget(self)

    def _fly(self, key: bytes, waiter: Waiter) -> Cancellable | None:
        place = key, waiter.request.priority
        flight = Flight(
            self._cache.clock,
            self._statistics,
            self._cache.max_answer_bytes,
            keep=lambda answer, is_new: self._keep(key, answer, is_new),
            ended=lambda: self._flights.pop(place, None),
        )
        self._flights[place] = flight
        second = self._cache.second
        lookup = None if second is None else lambda found: second.get(key, found)
        return flight.start(waiter, lookup)

    def _keep(self, key: bytes, answer: CachedAnswer, is_new: bool) -> None:
        if self._is_open:
            self._cache.put(key, answer, self)
            if is_new and self._cache.second is not None:
                self._cache.second.put(key, answer)

    def _left(self) -> None:
        self._waiting -= 1
