"""Runs a target on mutated messages and watches that no run takes long, raises, or leaves anything behind."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Target

TARGETS = {
    "http": ("tests.fuzz.http", "HttpTarget"),
    "h2": ("tests.fuzz.h2", "H2Target"),
    "oip": ("tests.fuzz.oip", "OipTarget"),
    "protobuf": ("tests.fuzz.protobuf", "ProtobufTarget"),
    "stored": ("tests.fuzz.stored", "StoredTarget"),
    "peers": ("tests.fuzz.peers", "PeersTarget"),
    "coded": ("tests.fuzz.coded", "CodedTarget"),
}
"""By name where each target is; imported only when it is run."""

_CPU_S = 10.0
"""Most that one message may cost; a thousand times what any does."""
_PAGE = 4096


class Finding(AssertionError):
    """A message that did harm."""

    def __init__(self, name: str, seed: int, index: int, data: bytes, error: BaseException) -> None:
        super().__init__(f"{name}, seed {seed}, message {index}: {type(error).__name__}: {error}\n{data!r}")
        self.data = data


class Report(msgspec.Struct):
    """What a campaign did."""

    target: str
    runs: int
    cpu_s: float
    slowest_s: float
    grown_bytes: int
    """By how much the process grew in the second half, when caches are full."""
    grown_objects: int

    def __str__(self) -> str:
        rate = self.runs / self.cpu_s if self.cpu_s else 0.0
        return (
            f"{self.target}: {self.runs} messages, {rate:.0f}/s of CPU time, slowest {self.slowest_s * 1e3:.1f} ms, "
            f"memory {self.grown_bytes / 1024:+.0f} KiB and {self.grown_objects:+d} objects in the second half"
        )


def make_target(name: str) -> Target:
    """The target called ``name``."""
    module, kind = TARGETS[name]
    target: Target = getattr(import_module(module), kind)()
    return target


def run(name: str, runs: int, seed: int) -> Report:
    """Raises Finding for the first message that did harm."""
    target = make_target(name)
    try:
        return run_target(name, target, runs, seed)
    finally:
        target.close()


def run_target(name: str, target: Target, runs: int, seed: int, limit_s: float = _CPU_S) -> Report:
    """As ``run``; no message may cost more than ``limit_s`` of CPU time."""
    random = Random(seed)
    mutator = Mutator(target.seeds, target.tokens, random)
    memory = objects = 0
    slowest = 0.0
    began = time.process_time()
    with _limited(limit_s):
        for index in range(runs):
            if index == runs // 2:
                memory, objects = resident_bytes(), _objects()
            data = target.join(mutator.draw(), random)
            signal.setitimer(signal.ITIMER_PROF, limit_s)
            before = time.thread_time()
            try:
                target.run(data)
            except Exception as error:
                raise Finding(name, seed, index, data, error) from error
            slowest = max(slowest, time.thread_time() - before)
    cpu_s = time.process_time() - began
    return Report(name, runs, cpu_s, slowest, resident_bytes() - memory, _objects() - objects)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise in whatever runs once it has used more CPU time than it may."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took more than {limit_s:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
