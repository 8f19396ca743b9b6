"""Fuzzing in slices: some hundred messages for each target, and many more where there is time."""

from __future__ import annotations

import multiprocessing
import resource
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.fuzz.campaign import TARGETS, Campaign, Finding, make_target, minimise, resident_bytes, run, run_slice
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Target

_MANY = 100_000
_TODAY = datetime.now(UTC).toordinal()
"""Each day has other messages. A finding names the seed, so that it can be repeated on another day."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_slice(name: str) -> None:
    run_slice(name, _TODAY)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["http", "h2", "oip", "protobuf", "queue", "response_cache"])
def test_many_messages_leave_nothing_behind(name: str) -> None:
    # In a process of its own, so that nothing else takes or gives back memory.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(run, (name, _MANY, 1))
    report.check()


def test_the_same_seed_makes_the_same_messages() -> None:
    with closing(make_target("oip")) as target:
        drawn = [
            [target.join(mutator.draw(), mutator.random) for _ in range(300)]
            for mutator in (Mutator(target.seeds, target.tokens, Random(7)) for _ in range(2))
        ]
    assert drawn[0] == drawn[1]
    valid = {b"".join(seed) for seed in target.seeds}
    assert len(set(drawn[0]) - valid) > 250


class _BadTarget(Target):
    """A target with a bug."""

    seeds = ((b"valid",),)

    def run(self, data: bytes) -> None:
        if not data.startswith(b"va"):
            raise KeyError("a bug")


def test_a_finding_names_what_repeats_it() -> None:
    with pytest.raises(Finding, match=r"bad, seed 3, message \d+: KeyError: 'a bug'") as found:
        Campaign("bad", _BadTarget(), 3).run(1000)
    with pytest.raises(KeyError):
        _BadTarget().run(found.value.data)


def test_a_message_that_never_ends_is_a_finding() -> None:
    class Endless(_BadTarget):
        def run(self, data: bytes) -> None:
            while True:
                pass

    with pytest.raises(Finding, match="TimeoutError"):
        Campaign("endless", Endless(), 0, limit_s=0.05).run(1)


def test_a_message_that_takes_much_memory_is_a_finding() -> None:
    class Greedy(_BadTarget):
        def run(self, data: bytes) -> None:
            # Above the most that this process has had since the peak was set back.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            assert np.ones(peak - resident_bytes() + (80 << 20), np.uint8).all()

    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

    with pytest.raises(Finding, match="MiB of memory"):
        Campaign("greedy", Greedy(), 0).run(1)


def test_a_message_that_does_no_harm_alone_is_kept_whole() -> None:
    finding = Finding("raw_tensor", 0, 0, b"0 2\nmuch too short", ValueError())
    assert minimise("raw_tensor", finding) == finding.data


def test_coverage_adds_messages_to_the_corpus(tmp_path: Path) -> None:
    with closing(make_target("raw_tensor")) as target:
        report = Campaign("raw_tensor", target, 0).run(1000, corpus=Corpus("raw_tensor", tmp_path))
    assert report.reached
    assert Corpus("raw_tensor", tmp_path).paths()
