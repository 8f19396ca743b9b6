"""Whether the build's timing can be trusted: an identical model under two names must not differ, and the verdict on a candidate
must not depend on the other candidates, on their order, or silently on another process. The model is a residual network of
0.7 M weights for 64×64 images, at one thread. The candidate of the verdicts is the model in OpenVINO, against the model in ONNX
Runtime."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import models
from benchmarks.results import Row, claim, fact
from penstock.artifact import Artifact
from penstock.bundle.evidence import CandidateRecord
from penstock.dataset import make_dataset
from penstock.engines.registry import available_engines
from penstock.measurement import Interval
from penstock.offline.judge.contract import FASTER, is_faster
from penstock.offline.judge.judge import Judge
from penstock.offline.judge.race import race
from penstock.offline.tune.space import Candidate, originals
from penstock.offline.tune.tuner import Tuner, TuneResult, TuningLimits
from penstock.perf.measure import FEWEST_LOADS, LOADS, speedup
from penstock.resources import machine_facts

_SAMPLE = {"input": np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)}
_FIELDS = 3, 13, 45
_SUBJECT = "subject"


def run(quick: bool) -> list[Row]:
    """The rows of this scenario."""
    return [row for part in PARTS.values() for row in part(quick)]


def identical(quick: bool) -> list[Row]:
    """Compare a model with itself, with as many loads as a screening has at least, and with those of a confirmation."""
    ways = [(engine, loads) for engine in available_engines() for loads in (FEWEST_LOADS, LOADS)]
    count, same = (16 if quick else 200) // len(ways), model()
    found = {way: [compare(same, way[1], way[0]) for _ in range(count)] for way in ways}
    return [
        differing("identical models that differ", [one for some in found.values() for one in some]),
        *(width(f"interval with {loads} loads in {engine}", some) for (engine, loads), some in found.items()),
    ]


def field(quick: bool) -> list[Row]:
    """Tune the same candidate among few and among many others, and among the same in another order."""
    sizes = _FIELDS[:2] if quick else _FIELDS
    found = {f"among {size} candidates": verdict(tune(size, quick)) for size in sizes}
    found["among 13 candidates in reverse order"] = verdict(tune(13, quick, backwards=True))
    return [*map(shown, found, found.values()), overlap("pairs of these intervals that overlap", list(found.values()))]


def neighbour(quick: bool) -> list[Row]:
    """Tune the same candidate beside a process that computes, and compare a model with itself beside it."""
    alone = verdict(tune(3, quick))
    with busy_process():
        beside = verdict(tune(3, quick))
        found = [compare(model(), LOADS) for _ in range(10 if quick else 50)]
    says = "the machine was busy" in beside.reason
    return [
        shown("alone", alone),
        shown("beside a neighbour", beside),
        claim("the verdict beside a neighbour names it", float(says), "", ">=", 1, note=beside.reason),
        differing("identical models that differ beside a neighbour", found),
    ]


PARTS = {"identical": identical, "field": field, "neighbour": neighbour}


def model(version: int = 0) -> Artifact:
    """The model. Each ``version`` computes the same from other bytes."""
    with tempfile.TemporaryDirectory() as folder:
        proto = onnx.load(models.small_cnn(Path(folder) / "model.onnx"))
    # Candidates of the same structure would be timed once.
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(version + 1, np.float32), "unused"))
    return Artifact.from_bytes(proto.SerializeToString())


def compare(artifact: Artifact, loads: int, engine: str = "onnxruntime") -> Interval:
    """The speed-up of a model over itself."""
    found = race({"one": artifact, "other": artifact}, _SAMPLE, 0.06 * loads, engine=engine, loads=loads)
    return speedup(found["one"], found["other"])


def tune(size: int, quick: bool, backwards: bool = False) -> TuneResult:
    """Tune ``size`` candidates, of which one is the subject."""
    engines = available_engines()
    tried = [candidate(_SUBJECT, 0, engines[-1])]
    tried += [candidate(f"other{number}", number, engines[number % len(engines)]) for number in range(1, size)]
    data = make_dataset(_SAMPLE, None)
    tuner = Tuner(
        originals(model(), [1]),
        tried[::-1] if backwards else tried,
        Judge(model(), data),
        TuningLimits(3 if quick else 8),
    )
    return tuner.run(machine_facts().cores)


def candidate(name: str, version: int, engine: str) -> Candidate:
    return Candidate(model(version), name=name, engine=engine, threads=1, options={"threads": 1})


def verdict(result: TuneResult) -> CandidateRecord:
    """The record of the subject; its reason is that of the chosen candidate if the machine was busy."""
    return next(record for record in result.records if record.name == _SUBJECT)


def shown(name: str, record: CandidateRecord) -> Row:
    assert record.speedup is not None
    return fact(
        f"{record.engine} over ONNX Runtime {name}",
        record.speedup.value,
        "×",
        interval=record.speedup,
        note=f"{record.latency_ms:.3g} ms, {record.calls} calls; {record.status}: {record.reason}",
    )


def overlap(name: str, records: Sequence[CandidateRecord]) -> Row:
    found = [record.speedup for record in records if record.speedup]
    pairs = [(one, other) for number, one in enumerate(found) for other in found[:number]]
    count = sum(one.low <= other.high and other.low <= one.high for one, other in pairs)
    return claim(name, count / len(pairs), "", ">=", 1, note=f"{count} of {len(pairs)}")


def differing(name: str, found: Sequence[Interval]) -> Row:
    """The share of comparisons of identical models with a verdict, that one is faster or that it is slower."""
    count = sum(is_faster(one) or one.high < 1 / FASTER for one in found)
    excluded = sum(not one.low <= 1 <= one.high for one in found)
    note = f"{count} of {len(found)} have a verdict; {excluded} intervals of 95 % exclude 1"
    return claim(name, count / len(found), "", "<=", 0.05, note=note)


def width(name: str, found: Sequence[Interval]) -> Row:
    return fact(name, 100 * float(np.median([(one.high - one.low) / 2 for one in found])), "%", note="± median")


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes for the duration of the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
