"""The ladder: from torch's own eager execution of a torch module to what all of Penstock's steps make of it, rung by rung."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import models
from benchmarks.compression.eager import eager
from benchmarks.compression.losses import loss
from benchmarks.compression.train import TASKS, trained
from benchmarks.kept import kept
from benchmarks.pairs import Load, geometric_mean, versus
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.measurement import Interval
from penstock.offline.compress.pruning.structured.recovery import ShrinkOptions, shrink
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.torch import torch
from penstock.offline.judge.contract import Contract
from penstock.offline.optimize.optimizer import optimize
from penstock.resources import machine_facts
from penstock.tensor import Array

LARGE: dict[str, tuple[Callable[[Path], Path], tuple[int, ...]]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224)),
    "MobileNet-v2-like": (models.mobilenet, (3, 224, 224)),
    "6-layer encoder": (models.encoder, (128, 384)),
}
SMALL = ("residual", "depthwise", "encoder", "MLP")
_STRUCTURE_S = 120.0
"""Seconds for cutting a network; a round that has begun is finished."""
_MAX_LOSS = 0.01


class Climb(msgspec.Struct, frozen=True):
    """The rungs of one network, and the data that its accuracy is judged by; large ones have none."""

    name: str
    original: Artifact
    rungs: dict[str, Artifact]
    sample: Mapping[str, Array]
    validate: Dataset | None = None
    test: Dataset | None = None
    problems: list[str] = []
    """Why rungs are missing."""


def ladder(quick: bool) -> list[Row]:
    """Times calls of single samples, with one thread and with all threads. Large networks have random weights, so there is no
    accuracy to lose, and their structure is not changed. Small networks are trained, and pruned as long as they lose at most half
    a point of accuracy.
    """
    rows, totals = [], []
    for name in (*LARGE, *(SMALL[:1] if quick else SMALL)):
        climb = _kept(name, quick)
        rows += [*(skipped(f"{name}: structure", why) for why in climb.problems), *_measure(climb, totals, quick)]
    best = max(totals, key=lambda gain: gain.low)
    note = "over eager torch on the torch module, at one thread or at all, whichever is faster"
    return [
        claim("all models, geometric mean", geometric_mean(totals), "×", ">=", 5, note=note),
        claim("the best", best, "×", ">=", 9),
        *rows,
    ]


def prepared(quick: bool) -> list[Row]:
    """Make every rung, so that a later run only measures."""
    climbs = [_kept(name, quick) for name in (*LARGE, *SMALL)]
    return [fact(f"{climb.name}: rungs", len(climb.rungs), "", note=", ".join(climb.rungs)) for climb in climbs]


def _kept(name: str, quick: bool) -> Climb:
    return kept(f"ladder-{name}", f"{quick}", lambda _: _large(name) if name in LARGE else _small(name, quick))


def _large(name: str) -> Climb:
    make, shape = LARGE[name]
    with tempfile.TemporaryDirectory() as folder:
        original = Artifact.from_file(make(Path(folder) / "model.onnx"))
    samples = make_dataset({"input": np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)}, None)
    fp32, _ = optimize(original, [samples.rows(0, 1)])
    statistics = collect(fp32, samples.inputs, batch_size=4)
    int8 = fastest_placement(fp32, statistics, samples, [integer_scheme(machine_facts())])[0].artifact
    return Climb(name, original, {"graph": fp32, "INT8": int8}, samples.rows(0, 1))


def _small(name: str, quick: bool) -> Climb:
    original, split, problems = trained(name), TASKS[name].data(), []
    fp32, _ = optimize(original, [split.train.rows(0, 1)])
    rungs = {"graph": fp32, "INT8": _careful(fp32, split.calibrate)}
    end = time.monotonic() + _STRUCTURE_S
    try:
        options = ShrinkOptions(speedup=1.5, contract=Contract(0.005), fit=FitOptions(epochs=5 if quick else 15))
        thin = shrink(fp32, split.train, options, is_over=partial(_is_past, end))
        rungs |= {"structure": thin, "structure, INT8": _careful(thin, split.calibrate)}
    except PenstockError as error:
        problems.append(error.message)
    return Climb(name, original, rungs, split.test.rows(0, 1), split.validate, split.test, problems)


def _measure(climb: Climb, totals: list[Interval], quick: bool) -> list[Row]:
    """The rung that is fastest among those accurate enough on the validation data, over eager; timed anew after the choice."""
    cores = sorted({1, machine_facts().cores})
    rungs = {
        rung: model
        for rung, model in climb.rungs.items()
        if climb.validate is None or loss(climb.original, model, climb.validate).value <= _MAX_LOSS
    }
    bases = {f"eager, {_threads(n)}": partial(_eager, climb, n) for n in cores}
    loads: dict[str, Load] = {
        f"{rung}, {_threads(n)}": partial(_engine, model, climb.sample, n)
        for rung, model in rungs.items()
        for n in cores
    }
    first = next(iter(bases))
    brief = {way: versus(bases[first], load, 0.3 if quick else 1.5, loads=3) for way, load in (bases | loads).items()}
    base, best = (max(ways, key=lambda way: brief[way].value) for ways in (bases, loads))
    gain = versus(bases[base], loads[best], 1.0 if quick else 6.0)
    totals.append(gain)
    steps = "; ".join(f"{way} {brief[way].value / brief[base].value:.2f}x" for way in loads)
    rows = [fact(f"{climb.name}: over eager", gain.value, "×", interval=gain, note=f"{best}, over {base}. {steps}")]
    if climb.test is not None:
        lost = loss(climb.original, rungs[best.rpartition(", ")[0]], climb.test)
        title = f"{climb.name}: loss of that rung"
        rows.append(claim(title, lost, "", "<=", _MAX_LOSS, note=f"{climb.test.count} test samples"))
    return rows


@contextlib.contextmanager
def _eager(climb: Climb, threads: int) -> Iterator[Callable[[], object]]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    network, tensor = eager(climb.name, climb.original), torch.from_numpy(climb.sample["input"])

    def run() -> object:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            return network(tensor)

    try:
        yield run
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _engine(model: Artifact, sample: Mapping[str, Array], threads: int) -> Iterator[Callable[[], object]]:
    loaded = get_engine("onnxruntime").load(model, {"threads": threads, "spinning": False})
    try:
        yield lambda: loaded.forward(sample)
    finally:
        loaded.unload()


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _is_past(end: float) -> bool:
    return time.monotonic() > end


def _careful(model: Artifact, samples: Dataset) -> Artifact:
    return quantize_with(PtqRecipe(), model, samples, integer_scheme(machine_facts()))
