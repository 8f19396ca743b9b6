"""The second tier of the response cache: a Redis server that several Penstock servers may share.

For clients, a failure of Redis is only a cache miss. Look-ups have a short timeout, and responses are written in the background.
After several failures, a circuit breaker pauses the use of Redis. Each further failure doubles the pause. Responses from Redis are
checked, and their size is limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.clock import Clock
from penstock.errors import IntegrityError, InvalidConfig
from penstock.online.cache.answer import CachedAnswer, from_bytes
from penstock.online.scheduler.base import Cancellable

_log = logging.getLogger(__name__)

KEY_PREFIX = b"penstock:1:"
"""The prefix of all keys in Redis. The number is the version of the algorithm that computes the keys."""

_GET_S = 0.05
"""Maximum seconds that a request waits for Redis: about the time to connect to a nearby server."""
_SET_S = 1.0
_MAX_LOOKUPS = 64
_MAX_UNWRITTEN = 256
_MAX_UNWRITTEN_BYTES = 32 << 20


class Breaker:
    """A circuit breaker without I/O. The breaker opens after ``tolerance`` consecutive failures. An open breaker allows one attempt
    after each pause. The first pause lasts ``first_s`` seconds. Each further pause is twice as long, up to ``last_s``.
    """

    def __init__(self, tolerance: int = 3, first_s: float = 0.25, last_s: float = 30.0) -> None:
        self.is_open = False
        """True from ``tolerance`` consecutive failures until the next success."""
        self._tolerance, self._first_s, self._last_s = tolerance, first_s, last_s
        self._failures = 0
        self._pause_s = first_s
        self._until = 0.0

    def allows(self, now: float) -> bool:
        if not self.is_open:
            return True
        if now < self._until:
            return False
        # This caller makes the attempt. If it never reports the outcome, another caller may try after another pause.
        self._until = now + self._pause_s
        return True

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.is_open:
            self._pause_s = min(2 * self._pause_s, self._last_s)
            self._until = now + self._pause_s
        elif self._failures >= self._tolerance:
            self.is_open = True
            self._until = now + self._pause_s

    def succeeded(self) -> None:
        self.is_open = False
        self._failures = 0
        self._pause_s = self._first_s


class RedisTier:
    """A ``SecondTier`` that uses the Redis server at ``url`` (``redis://``, ``rediss://`` or ``unix://``). Used only on the event
    loop.

    Redis keeps a response for ``ttl_s`` seconds. If ``ttl_s`` is 0, the response does not expire. A response larger than
    ``max_value_bytes`` is not stored. A look-up that takes longer than ``timeout_s`` is a miss. The first look-up opens the
    connection. Raises InvalidConfig. Errors and logs never contain the credentials in ``url``.
    """

    def __init__(self, url: str, ttl_s: float, max_value_bytes: int, clock: Clock, timeout_s: float = _GET_S) -> None:
        self._ttl_ms = max(1, round(ttl_s * 1000)) if ttl_s else None
        self._max_value_bytes = max_value_bytes
        self._clock = clock
        self._timeout_s = timeout_s
        try:
            # RESP2, because older servers reject the handshake of RESP3.
            self._redis = Redis.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=_SET_S,
                socket_connect_timeout=_SET_S,
                max_connections=_MAX_LOOKUPS + 1,
                decode_responses=False,
            )
        except (ValueError, TypeError):
            raise InvalidConfig("'cache_redis' is not a valid Redis URL", "e.g. redis://127.0.0.1:6379/0") from None
        arguments = self._redis.connection_pool.connection_kwargs
        self._secrets = [str(arguments[name]) for name in ("password", "username") if arguments.get(name)]
        self._breaker = Breaker()
        self._lookups: set[asyncio.Task[None]] = set()
        self._unwritten: deque[tuple[bytes, CachedAnswer]] = deque()
        self._unwritten_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._warned = False

    def get(self, key: bytes, done: Callable[[CachedAnswer | None], None]) -> Cancellable | None:
        if len(self._lookups) >= _MAX_LOOKUPS or not self._breaker.allows(self._clock.now()):
            done(None)
            return None
        task = asyncio.get_running_loop().create_task(self._get(key, done))
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)
        return task

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        """Queue ``answer`` for writing, unless the breaker is open or the queue is full."""
        if self._breaker.is_open or len(self._unwritten) >= _MAX_UNWRITTEN:
            return
        if self._unwritten_bytes + answer.size_bytes > _MAX_UNWRITTEN_BYTES:
            return
        self._unwritten.append((key, answer))
        self._unwritten_bytes += answer.size_bytes
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Cancel everything in progress, and drop queued responses."""
        tasks = [*self._lookups, *([self._writer] if self._writer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _get(self, key: bytes, done: Callable[[CachedAnswer | None], None]) -> None:
        answer = None
        try:
            async with asyncio.timeout(self._timeout_s):
                # GETRANGE bounds the bytes that are read into memory; a missing key reads as empty.
                stored = await self._redis.getrange(KEY_PREFIX + key.hex().encode(), 0, self._max_value_bytes)
        except Exception as error:  # noqa: BLE001 - the client library raises arbitrary exceptions for a malformed reply
            self._failed(error)
        else:
            self._succeeded()
            if isinstance(stored, bytes) and 0 < len(stored) <= self._max_value_bytes:
                try:
                    answer = from_bytes(stored)
                except IntegrityError as error:
                    self._warn(f"{error}; it is ignored")
        done(answer)

    async def _write(self) -> None:
        try:
            while self._unwritten:
                key, answer = self._unwritten.popleft()
                self._unwritten_bytes -= answer.size_bytes
                if not self._breaker.is_open:
                    await self._set(key, answer)
        finally:
            self._writer = None

    async def _set(self, key: bytes, answer: CachedAnswer) -> None:
        try:
            stored = answer.to_bytes()
            if len(stored) > self._max_value_bytes:
                return
            async with asyncio.timeout(_SET_S):
                await self._redis.set(KEY_PREFIX + key.hex().encode(), stored, px=self._ttl_ms)
        except IntegrityError as error:
            self._warn(str(error))
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
        else:
            self._succeeded()

    def _failed(self, error: Exception) -> None:
        was_open = self._breaker.is_open
        self._breaker.failed(self._clock.now())
        if self._breaker.is_open and not was_open:
            reason = str(error)
            if any(secret in reason for secret in self._secrets):
                reason = ""
            _log.warning("Redis failed; the response cache continues without it: %s %s", type(error).__name__, reason)

    def _succeeded(self) -> None:
        if self._breaker.is_open:
            _log.info("Redis is available again; the response cache uses it")
        self._breaker.succeeded()

    def _warn(self, message: str) -> None:
        """Log only the first warning about stored responses, so that other programs that write to Redis cannot flood the log."""
        if not self._warned:
            self._warned = True
            _log.warning("Redis: %s", message)
