"""Runs a target on mutated messages and watches that no run takes long, raises, or leaves anything behind."""

from __future__ import annotations

import gc
import math
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from penstock.errors import bounded
from tests.fuzz.corpus import Corpus
from tests.fuzz.coverage import Coverage
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Target

_TARGETS = Path(__file__).parent / "targets"
TARGETS = {path.stem: path.parent.name for path in sorted(_TARGETS.glob("*/*.py"))}
"""The folder of each target by name. ``<name>.py`` has the class ``<Name>Target`` and is imported only when it is run."""

_CPU_S = 10.0
"""Most that one message may cost; a thousand times what any does."""
_PEAK_BYTES = 64 << 20
"""Most by which one message may raise the process's peak memory, for most targets."""
_GROWTH_BYTES = 8 << 20
_GROWTH_OBJECTS = 5000
_PAGE = 4096
_TRACED = 4
"""One in so many messages of a guided campaign is traced."""
_MINIMISE_S = 20.0
_SHOWN = 2000


class Finding(AssertionError):
    """A message that did harm."""

    def __init__(self, name: str, seed: int, index: int, data: bytes, error: BaseException) -> None:
        shown = bounded(f"{type(error).__name__}: {error}", _SHOWN), bounded(repr(data), _SHOWN)
        super().__init__(f"{name}, seed {seed}, message {index}: {shown[0]}\n{shown[1]}")
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
    reached: int
    """Lines of the package that traced messages reached; 0 if none was traced."""

    def __str__(self) -> str:
        rate = self.runs / self.cpu_s if self.cpu_s else 0.0
        return (
            f"{self.target:<16}{self.runs:>9} messages{rate:>8.0f}/s of CPU, slowest{self.slowest_s * 1e3:>7.1f} ms,"
            f"{self.grown_bytes / 1024:>+7.0f} KiB and{self.grown_objects:>+5d} objects in the second half"
            + (f",{self.reached:>5} lines" if self.reached else "")
        )

    def check(self, factor: int = 1) -> None:
        """Raise AssertionError if the second half has left something behind; ``factor`` multiplies what it may leave."""
        assert self.grown_bytes < factor * _GROWTH_BYTES, f"memory grows: {self}"
        assert self.grown_objects < factor * _GROWTH_OBJECTS, f"the number of objects grows: {self}"


def make_target(name: str) -> Target:
    """The target called ``name``."""
    module = import_module(f"tests.fuzz.targets.{TARGETS[name]}.{name}")
    kind = "".join(map(str.capitalize, name.split("_")))
    target: Target = getattr(module, f"{kind}Target")()
    return target


def run_slice(name: str, day: int) -> Report:
    """A short run, whose seed is the target's own or ``day``. Raises Finding."""
    with closing(make_target(name)) as target:
        seed = day if target.slice_seed is None else target.slice_seed
        print(f"repeat: python -m tests.fuzz {name} --runs {target.slice_runs} --seed {seed}")
        return Campaign(name, target, seed).run(target.slice_runs)


def run(name: str, runs: int, seed: int) -> Report:
    """Raises Finding for the first message that did harm."""
    with closing(make_target(name)) as target:
        return Campaign(name, target, seed).run(runs)


class Campaign:
    """Messages for one target; all of them follow from ``seed`` unless coverage guides it."""

    def __init__(self, name: str, target: Target, seed: int, limit_s: float = _CPU_S) -> None:
        """No message may cost more than ``limit_s`` of CPU time."""
        self._name, self._target, self._seed, self._limit_s = name, target, seed, limit_s
        self._random = Random(seed)
        self._mutator = Mutator(target.seeds, target.tokens, self._random)
        self._index = 0
        self._slowest_s = 0.0
        self._coverage = Coverage()
        self.watch: Callable[[bytes], None] = lambda data: None
        """Called with each message before it is tried."""

    def run(self, runs: int = sys.maxsize, seconds: float = math.inf, corpus: Corpus | None = None) -> Report:
        """Try messages until ``runs`` or ``seconds`` are over. With a ``corpus`` coverage guides it, and adds to the corpus.

        Raises Finding.
        """
        began, began_cpu = time.monotonic(), time.process_time()
        memory = objects = 0
        is_late = False
        with _limited():
            if corpus is not None:
                self._learn(corpus)
            for self._index in range(runs):
                passed = time.monotonic() - began
                if not is_late and (2 * self._index >= runs or 2 * passed >= seconds):
                    is_late, memory, objects = True, resident_bytes(), _objects()
                if passed >= seconds:
                    break
                parts = self._mutator.draw()
                data = self._target.join(parts, self._random)
                if corpus is not None and self._index % _TRACED == 0:
                    if self._coverage.run(partial(self.try_out, data)):
                        self._mutator.learn(parts)
                        corpus.offer(data)
                else:
                    self.try_out(data)
        cpu_s = time.process_time() - began_cpu
        grown = resident_bytes() - memory, _objects() - objects
        return Report(self._name, self._index + 1, cpu_s, self._slowest_s, *grown, self._coverage.reached)

    def try_out(self, data: bytes) -> None:
        """Raises Finding."""
        self.watch(data)
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)
        before, peak = time.thread_time(), _peak_bytes()
        try:
            self._target.run(data)
            grown = _peak_bytes() - peak
            assert grown < self._target.peak_factor * _PEAK_BYTES, f"it took {grown >> 20} MiB of memory"
        except Exception as error:
            raise Finding(self._name, self._seed, self._index, data, error) from error
        self._slowest_s = max(self._slowest_s, time.thread_time() - before)

    def _learn(self, corpus: Corpus) -> None:
        """Find what the seeds and the corpus reach, and mutate the corpus, too."""
        for seed in self._target.seeds:
            self._coverage.run(partial(self.try_out, self._target.join(seed, self._random)))
        for data in corpus.messages():
            self._coverage.run(partial(self.try_out, data))
            self._mutator.learn(self._target.split(data))


def replay(name: str, messages: Sequence[bytes]) -> None:
    """Try ``messages``. Raises Finding."""
    with closing(make_target(name)) as target, _limited():
        campaign = Campaign(name, target, 0)
        for data in messages:
            campaign.try_out(data)


def minimise(name: str, finding: Finding) -> bytes:
    """A part of the message of ``finding`` that does the same harm to a fresh target; the whole if only a series of messages does."""
    end = time.monotonic() + _MINIMISE_S

    def fails(data: bytes) -> bool:
        try:
            replay(name, [data])
        except Finding as other:
            return _cause(other) == _cause(finding)
        return False

    data = finding.data
    if not fails(data):
        return data
    size = len(data) // 2
    while size:
        at = 0
        while at < len(data) and time.monotonic() < end:
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


def _cause(finding: Finding) -> tuple[object, ...]:
    error = finding.__cause__
    assert error is not None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), frame.filename, frame.lineno


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@contextmanager
def _limited() -> Iterator[None]:
    """Raise in whatever runs when its timer of CPU time ends."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("it took too much CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
