"""Counts the bytes of intermediate results, so that a burst of large pictures does not fill the memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np

from penstock.pipeline.executor import Told
from penstock.tensor import Array

_SHARE, _LEAST_BYTES = 8, 64 << 20
SMALL_BYTES = 64 << 10
"""Smaller results are not counted. Requests are limited in number, so that these results take little memory."""


def default_limit(memory_bytes: int) -> int:
    """Bytes of intermediate results that one function may hold on a machine with ``memory_bytes``, of which 0 means unknown."""
    return max(_LEAST_BYTES, memory_bytes // _SHARE)


class Memory:
    """The results of steps that are in memory. An array is counted until it is freed or ``forget`` is called. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arrays: dict[int, tuple[weakref.ref[Array], int]] = {}
        """The arrays by id, and their bytes. A lock would not do, because any thread may free an array at any time."""

    @property
    def is_full(self) -> bool:
        """True if the results take more bytes than the limit."""
        return bool(self._arrays) and sum(size for _, size in list(self._arrays.values())) > self._limit

    def add(self, told: Told) -> None:
        """Count the values of ``told``."""
        for array in _arrays(told):
            if array.nbytes >= SMALL_BYTES:
                key = id(array)
                self._arrays[key] = weakref.ref(array, partial(_drop, self._arrays, key)), array.nbytes

    def forget(self, told: Told) -> None:
        """Count the values of ``told`` no longer, because the caller holds them."""
        for array in _arrays(told):
            self._arrays.pop(id(array), None)


def _drop(arrays: dict[int, tuple[weakref.ref[Array], int]], key: int, _: object) -> None:
    arrays.pop(key, None)


def _arrays(told: Told) -> Iterator[Array]:
    """The arrays whose memory the values of ``told`` use."""
    if isinstance(told, Exception):
        return
    for value in told.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, np.ndarray):
                yield _owner(one)


def _owner(value: Array) -> Array:
    """The array that owns the memory of the view ``value``."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value
