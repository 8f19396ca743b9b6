"""Pruning, low rank, weight sharing and coding: the bytes and milliseconds that they save, and the accuracy that they lose."""

from __future__ import annotations

import lzma
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.compression import data, nets
from benchmarks.compression.data import Split
from benchmarks.compression.losses import loss, points, score
from benchmarks.compression.train import TASKS, train, trained
from benchmarks.results import Row, claim, fact
from penstock.artifact import Artifact
from penstock.bundle.coded import decode, encode
from penstock.dataset import make_dataset
from penstock.measurement import Interval
from penstock.offline.compress.low_rank.factorize import FactorizeOptions, factorize
from penstock.offline.compress.pruning.iterative import IterativeOptions, prune_iteratively
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prunable_weights, prune
from penstock.offline.compress.pruning.structured.recovery import ShrinkOptions, shrink
from penstock.offline.compress.pruning.structured.search import NarrowOptions, narrow
from penstock.offline.compress.sharing.centroid_tuning import CentroidOptions, tune_centroids
from penstock.offline.compress.sharing.share import ShareOptions, share
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.race import race
from penstock.offline.optimize.model import load_model
from penstock.offline.optimize.optimizer import optimize
from penstock.perf.measure import speedup

MNIST = "PENSTOCK_MNIST"
"""Environment variable with a folder of MNIST's files. If it is set, the LeNet rows are also measured on MNIST."""

_PAPER = {
    "LeNet-300-100": "paper, on MNIST: 12x fewer weights, 40x smaller, error 1.64 → 1.58 %",
    "LeNet-5": "paper, on MNIST: 12x fewer weights, 39x smaller, error 0.80 → 0.74 %",
}
_SPARSITY = {"LeNet-300-100": 0.945, "LeNet-5": 0.945}
_CONTRACT = Contract(max_accuracy_loss=0.005)


def pruning(quick: bool) -> list[Row]:
    """Pruning of LeNet-300-100: iteratively with retraining, compared with pruning at once without retraining."""
    rows = []
    for title, model, split in _lenets(["LeNet-300-100"]):
        sparse = _pruned("LeNet-300-100", model, split, quick)
        before, after = score(model, split.test), score(sparse, split.test)
        factor = _fewer(sparse)
        at_once = prune(model, PruneOptions(GlobalRule(1 - 1 / factor)))
        naive, lost = score(at_once, split.test), points(loss(model, sparse, split.test))
        rows += [
            claim(f"{title}: times fewer weights", factor, "×", ">=", 12, note=_PAPER["LeNet-300-100"]),
            claim(f"{title}: points lost", lost, "", "<=", 0.5, note=f"{before:.2%} → {after:.2%}"),
            claim(
                f"{title}: points lost at once, without retraining",
                points(loss(model, at_once, split.test)),
                "",
                ">=",
                20,
                note=f"{before:.2%} → {naive:.2%} at the same sparsity: what retraining is for",
            ),
        ]
    return rows


def deep_compression(quick: bool) -> list[Row]:
    """Pruning, weight sharing and coding: the total bytes on disk, compared with zlib and lzma on the same weights."""
    rows = []
    for title, model, split in _lenets(["LeNet-300-100", "LeNet-5"]):
        name = "LeNet-5" if "LeNet-5" in title else "LeNet-300-100"
        sparse = _pruned(name, model, split, quick)
        shared = share(sparse, ShareOptions(conv_bits=8, fc_bits=5))
        options = CentroidOptions(FitOptions(epochs=2 if quick else 10, learning_rate=1e-4))
        shared = tune_centroids(shared, model, split.train, options)
        coded = encode(shared.data)
        before, after = score(model, split.test), score(shared, split.test)
        lost = points(loss(model, shared, split.test))
        sizes = {
            "pruned alone": len(encode(sparse.data)),
            "shared, zlib": len(zlib.compress(shared.data, 9)),
            "shared, lzma": len(lzma.compress(shared.data, preset=9)),
        }
        others = ", ".join(f"{way} {model.size_bytes / size:.1f}x" for way, size in sizes.items())
        note = f"{model.size_bytes:,d} → {len(coded):,d} bytes; {others}; {_PAPER[name]}"
        rows += [
            claim(f"{title}: times smaller", model.size_bytes / len(coded), "×", ">=", 40, note=note),
            claim(f"{title}: points lost", lost, "", "<=", 0.5, note=f"{before:.2%} → {after:.2%}"),
            claim(
                f"{title}: decoding", _decoding(coded, shared), "MB/s", ">=", 100, note="of dense weights, one thread"
            ),
        ]
    return rows


def structured(quick: bool) -> list[Row]:
    """Removal of channels: the speed of a ResNet-18 with random weights, and the speed and accuracy of trained networks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        original = Artifact.from_file(models.resnet18(Path(folder) / "model.onnx"))
    sample = {"input": np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)}
    fp32, _ = optimize(original, [sample])
    for width, goal in ((0.75, 1.6), (0.5, 3.0)):
        gain = _gain(fp32, narrow(fp32, NarrowOptions(width=width)), sample, 3.0 if quick else 10.0)
        rows.append(claim(f"ResNet-18 at {width:.0%} of its width", gain, "×", ">=", goal, note="one thread, batch 1"))
    for name in ("residual",) if quick else ("plain", "residual", "deep"):
        model, split = trained(name), TASKS[name].data()
        options = ShrinkOptions(speedup=1.8, contract=Contract(0.01), fit=FitOptions(epochs=5 if quick else 15))
        thin = shrink(model, split.train, options)
        before, after = score(model, split.test), score(thin, split.test)
        lost = points(loss(model, thin, split.test))
        gain = _gain(model, thin, split.test.rows(0, 1), 3.0 if quick else 10.0)
        note = f"{before:.2%} → {after:.2%} of {split.test.count} images"
        rows += [
            claim(f"{name}, channels cut and trained again: speed", gain, "×", ">=", 1.5),
            claim(f"{name}, channels cut and trained again: points lost", lost, "", "<=", 1, note=note),
        ]
    return rows


def low_rank(quick: bool) -> list[Row]:
    """Matrix products of 1024 by 4096, factorised into two products of rank r. The weights are random; one thread."""
    rows = []
    model = nets.gemm_stack()
    rng = np.random.default_rng(0)
    samples = make_dataset({"input": rng.standard_normal((64, 1024)).astype(np.float32)}, None)
    for rank, goal in ((512, 1.4), (256, 2.5), (128, 5.0)):
        thin = factorize(model, samples, FactorizeOptions(rank=rank))
        for batch in (1, 32):
            gain = _gain(model, thin, samples.rows(0, batch), 3.0 if quick else 10.0)
            title = f"1024 ↔ 4096 at rank {rank}, batch {batch}"
            rows.append(
                claim(title, gain, "×", ">=", goal) if batch == 1 else fact(title, gain.value, "×", interval=gain)
            )
    return rows


def _lenets(names: list[str]) -> list[tuple[str, Artifact, Split]]:
    """Title, trained network and data of each LeNet: on upscaled digits, and on MNIST if the environment variable is set."""
    found = [(f"{name}, digits", trained(name), TASKS[name].data()) for name in names]
    if folder := os.environ.get(MNIST):
        split = data.mnist(Path(folder))
        tasks = {name: TASKS[name] for name in names}
        found += [
            (f"{name}, MNIST", train(task.make(), split.train, task.options), split) for name, task in tasks.items()
        ]
    return found


def _pruned(name: str, model: Artifact, split: Split, quick: bool) -> Artifact:
    options = IterativeOptions(
        goal=PruneOptions(GlobalRule(_SPARSITY[name])),
        levels=6,
        contract=_CONTRACT,
        retrain=FitOptions(epochs=4 if quick else 12, learning_rate=3e-3),
    )
    return prune_iteratively(model, split.train, options)


def _fewer(model: Artifact) -> float:
    weights = prunable_weights(load_model(model)).values()
    return sum(array.size for array in weights) / sum(int(np.count_nonzero(array)) for array in weights)


def _decoding(coded: bytes, model: Artifact) -> float:
    """Decoded megabytes of the model per second: the median of several runs."""
    seconds = [_seconds(lambda: decode(coded)) for _ in range(15)]
    return model.size_bytes / float(np.median(seconds)) / 1e6


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _gain(before: Artifact, after: Artifact, sample: dict[str, np.ndarray], budget_s: float) -> Interval:
    timings = race({"before": before, "after": after}, sample, budget_s)
    return speedup(timings["before"], timings["after"])
