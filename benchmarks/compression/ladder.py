"""The ladder: the speed of a model after each of Penstock's steps, beginning with the eager execution of the framework."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.compression.int8 import score
from benchmarks.compression.train import TASKS, trained
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.offline.compress.pruning.structured.recovery import ShrinkOptions, shrink
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.contract import Contract
from penstock.offline.optimize.optimizer import optimize
from penstock.perf.measure import feed, interleave, speedup
from penstock.resources import machine_facts
from penstock.tensor import Array

_LARGE: dict[str, tuple[Callable[[Path], Path], tuple[int, ...]]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224)),
    "MobileNet-v2-like": (models.mobilenet, (3, 224, 224)),
    "6-layer encoder": (models.encoder, (128, 384)),
}
_STRUCTURE_S = 120.0
"""Seconds for pruning a network. A round that has begun is finished."""
_SMALL = ("residual", "depthwise", "encoder", "MLP")


def ladder(quick: bool) -> list[Row]:
    """Times calls of single samples, with one thread and with all threads. Large networks have random weights, so there is no
    accuracy to lose, and their structure is not changed. Small networks are trained, and pruned as long as they lose at most half
    a point of accuracy.
    """
    rows, totals = [], []
    for name, (make, shape) in _LARGE.items():
        with tempfile.TemporaryDirectory() as folder:
            original = Artifact.from_file(make(Path(folder) / "model.onnx"))
        samples = make_dataset(
            {"input": np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)}, None
        )
        fp32, _ = optimize(original, [samples.rows(0, 1)])
        int8 = _fastest(fp32, samples)
        rows += _climb(name, original, {"graph": fp32, "INT8": int8}, samples.rows(0, 1), totals, quick)
    for name in _SMALL[:1] if quick else _SMALL:
        original, split = trained(name), TASKS[name].data()
        fp32, _ = optimize(original, [split.test.rows(0, 1)])
        rungs = {"graph": fp32, "INT8": _careful(fp32, split.calibrate)}
        end = time.monotonic() + _STRUCTURE_S
        try:
            options = ShrinkOptions(speedup=1.5, contract=Contract(0.005), fit=FitOptions(epochs=5 if quick else 15))
            thin = shrink(fp32, split.train, options, is_over=partial(_is_past, end))
            rungs |= {"structure": thin, "structure, INT8": _careful(thin, split.calibrate)}
        except PenstockError as error:
            rows.append(skipped(f"{name}: structure", error.message))
        allowed = {
            rung: model
            for rung, model in rungs.items()
            if score(original, split.test) - score(model, split.test) <= 0.01
        }
        rows += _climb(name, original, allowed, split.test.rows(0, 1), totals, quick)
    mean = float(np.exp(np.mean(np.log(totals))))
    return [
        claim(
            "all models, geometric mean",
            mean,
            "×",
            ">=",
            5,
            note="over torch, eager, at one thread or at all, whichever is faster; at most 1 % lost",
        ),
        claim("the best", max(totals), "×", ">=", 9),
        *rows,
    ]


def _climb(
    name: str,
    original: Artifact,
    rungs: Mapping[str, Artifact],
    sample: Mapping[str, Array],
    totals: list[float],
    quick: bool,
) -> list[Row]:
    """One row per step, with its speed relative to eager execution. The total is the fastest step."""
    eager = TrainableModel(original).eval()
    tensors = {key: torch.from_numpy(array) for key, array in sample.items()}
    engine, cores = get_engine("onnxruntime"), machine_facts().cores

    def run_eager(threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            eager(tensors)

    # By default, torch uses all cores, which does not pay off for small networks. The better setting counts.
    bases = {f"eager, {threads}": partial(run_eager, threads) for threads in sorted({1, cores})}
    runs: dict[str, Callable[[], object]] = {**bases}
    for rung, model in rungs.items():
        for threads in sorted({1, cores}):
            loaded = engine.load(model, {"threads": threads, "spinning": False})
            runs[f"{rung}, {threads} thread{'s' if threads > 1 else ''}"] = feed(loaded, sample)
    timings = interleave(runs, 3.0 if quick else 10.0)
    base = min(bases, key=lambda way: timings[way].p50_ms)
    gains = {rung: speedup(timings[base], timings[rung]) for rung in runs if rung not in bases}
    best = max(gains, key=lambda rung: gains[rung].value)
    totals.append(gains[best].value)
    steps = "; ".join(f"{rung} {gain.value:.2f}x" for rung, gain in gains.items())
    note = f"{timings[base].p50_ms:.3g} ms {base} thread(s) → {timings[best].p50_ms:.3g} ms, {best}. {steps}"
    return [fact(f"{name}: over eager", gains[best].value, "×", interval=gains[best], note=note)]


def _is_past(end: float) -> bool:
    return time.monotonic() > end


def _fastest(fp32: Artifact, samples: Dataset) -> Artifact:
    statistics = collect(fp32, samples.inputs, batch_size=4)
    return fastest_placement(fp32, statistics, samples, [integer_scheme(machine_facts())])[0].artifact


def _careful(model: Artifact, samples: Dataset) -> Artifact:
    return quantize_with(PtqRecipe(), model, samples, integer_scheme(machine_facts()))
