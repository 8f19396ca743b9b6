"""Cache of parsed and loaded models for the duration of a build, so that each model is parsed and loaded once.

A build runs in a ``with keep_models`` block. Within it, ``remembered`` returns the earlier result for a key, and ``borrowed`` returns
a session that is already loaded. Outside the block, nothing is cached. The store has a limit in bytes; it drops the least recently
used entries first. At the end of the block, it drops all entries. Only one thread uses the store.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from penstock.engines.base import LoadedModel

T = TypeVar("T")


class ModelStore:
    """Caches objects by kind and key, within ``limit_bytes``. Objects in use are never dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self.made: Counter[str] = Counter()
        """For each kind, the number of calls of ``make``."""
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[tuple[str, Hashable], _Kept] = OrderedDict()
        self._bytes = 0

    def take(self, kind: str, key: Hashable, make: Callable[[], Any], size_bytes: int) -> _Kept:
        """The object with this ``kind`` and ``key``, made now if it is not cached. The object is in use until ``give_back``."""
        kept = self._kept.get((kind, key))
        if kept is None:
            value = make()
            self.made[kind] += 1
            kept = self._kept[kind, key] = _Kept(value, size_bytes)
            self._bytes += size_bytes
        self._kept.move_to_end((kind, key))
        kept.users += 1
        return kept

    def give_back(self, kept: _Kept) -> None:
        """Mark an object as no longer in use."""
        kept.users -= 1
        for key, one in list(self._kept.items()):
            if self._bytes <= self._limit_bytes:
                break
            if not one.users:
                self._drop(key, one)

    def close(self) -> None:
        """Drop everything and unload the sessions."""
        for key, one in list(self._kept.items()):
            self._drop(key, one)

    def _drop(self, key: tuple[str, Hashable], kept: _Kept) -> None:
        del self._kept[key]
        self._bytes -= kept.size_bytes
        if key[0] == SESSION:
            kept.value.unload()


class _Kept:
    def __init__(self, value: Any, size_bytes: int) -> None:
        self.value, self.size_bytes, self.users = value, size_bytes, 0


SESSION = "session"
_current: ContextVar[ModelStore | None] = ContextVar("penstock_model_store", default=None)


@contextlib.contextmanager
def keep_models(limit_bytes: int) -> Iterator[ModelStore]:
    """Cache models within this block. An inner block uses the store of the outer block."""
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    store = ModelStore(limit_bytes)
    token = _current.set(store)
    try:
        yield store
    finally:
        _current.reset(token)
        store.close()


def remembered(kind: str, key: Hashable, make: Callable[[], T], size_bytes: int) -> T:
    """The result of ``make``, or the result cached under ``key``. Callers share the result and must not change it."""
    store = _current.get()
    if store is None:
        return make()
    kept = store.take(kind, key, make, size_bytes)
    store.give_back(kept)
    value: T = kept.value
    return value


def is_keeping() -> bool:
    """True within a ``keep_models`` block, in which results are shared."""
    return _current.get() is not None


@contextlib.contextmanager
def borrowed(key: Hashable, load: Callable[[], LoadedModel], size_bytes: int) -> Iterator[LoadedModel]:
    """The session from ``load``, or the session cached under ``key``. Without a store, the session is unloaded after the block."""
    store = _current.get()
    if store is None:
        model = load()
        try:
            yield model
        finally:
            model.unload()
        return
    kept = store.take(SESSION, key, load, size_bytes)
    try:
        yield kept.value
    finally:
        store.give_back(kept)
