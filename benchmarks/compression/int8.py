"""Compares INT8 with FP32: speed on large networks with random weights, and accuracy on small trained networks."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from benchmarks import models
from benchmarks.compression import data, nets
from benchmarks.compression.losses import loss, mean, points, score, scores
from benchmarks.compression.train import TASKS, trained
from benchmarks.pairs import versus
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.intervals import rate_bound
from penstock.offline.judge.judge import Judge
from penstock.offline.judge.race import race
from penstock.offline.optimize.optimizer import optimize
from penstock.perf.measure import feed, speedup
from penstock.resources import machine_facts

_LARGE: dict[str, tuple[Callable[[Path], Path], tuple[int, ...], float]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224), 3),
    "ResNet-50": (models.resnet50, (3, 224, 224), 3),
    "MobileNet-v2-like": (models.mobilenet, (3, 224, 224), 1.5),
    "6-layer encoder": (models.encoder, (128, 384), 2),
}
SIX = ("plain", "depthwise", "residual", "MLP", "encoder", "autoencoder")


def speed(quick: bool) -> list[Row]:
    """One call of one sample, INT8 over FP32 in the same engine; ONNX Runtime at one thread and at all. The goals are those of
    CPUs with integer dot products."""
    rows: list[Row] = []
    machine = machine_facts()
    for name, (make, shape, goal) in _LARGE.items():
        with tempfile.TemporaryDirectory() as folder:
            original = Artifact.from_file(make(Path(folder) / "model.onnx"))
        samples = make_dataset(
            {"input": np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)}, None
        )
        fp32, _ = optimize(original, [samples.rows(0, 1)])
        statistics = collect(fp32, samples.inputs, batch_size=4)
        budget_s = 2.0 if quick else 8.0
        ranked = fastest_placement(fp32, statistics, samples, [integer_scheme(machine)], budget_s=budget_s)
        best, linear = ranked[0], next(one for one in ranked if one.placement is QdqPlacement.LINEAR)
        for threads in sorted({1, machine.cores}):
            timings = race(
                {"fp32": original, "int8": best.artifact}, samples.rows(0, 1), 2.0 if quick else 10.0, threads
            )
            gain = speedup(timings["fp32"], timings["int8"])
            title = f"{name}: INT8 over FP32, {threads} thread{'s' if threads > 1 else ''}"
            note = f"{timings['fp32'].p50_ms:.3g} → {timings['int8'].p50_ms:.3g} ms, {best.placement.value}"
            rows.append(
                claim(title, gain, "×", ">=", goal, note=note)
                if threads == 1 and machine.has_integer_dot_product
                else fact(title, gain.value, "×", interval=gain, note=note)
            )
        loads = [partial(_in_openvino, one, samples.rows(0, 1)) for one in (fp32, linear.artifact)]
        gain = versus(loads[0], loads[1], 1.0 if quick else 8.0, loads=4 if quick else 8)
        title = f"{name}: INT8 over FP32, both in OpenVINO, 1 thread"
        rows.append(fact(title, gain.value, "×", interval=gain, note=linear.placement.value))
    return rows


@contextlib.contextmanager
def _in_openvino(model: Artifact, sample: dict[str, np.ndarray]) -> Iterator[Callable[[], object]]:
    loaded = get_engine("openvino").load(model, {"threads": 1})
    try:
        yield feed(loaded, sample)
    finally:
        loaded.unload()


def six_nets(quick: bool) -> list[Row]:
    """The accuracy that INT8 loses after calibration with 100 samples, without labels and without training."""
    scheme, rows, losses = integer_scheme(machine_facts()), [], {}
    for name in SIX[:3] if quick else SIX:
        model, split = trained(name), TASKS[name].data()
        int8 = quantize_with(PtqRecipe(), model, _unlabelled(split.calibrate), scheme)
        losses[name] = points(loss(model, int8, split.test))
        of = "top-1" if split.test.labels is not None else "of the pixels given back"
        note = f"{score(model, split.test):.2%} → {score(int8, split.test):.2%} {of}, {split.test.count} samples"
        rows.append(fact(f"{name}: points lost by INT8", losses[name].value, "", interval=losses[name], note=note))
    within = sum(lost.high <= 1 for lost in losses.values())
    rows.append(claim("networks within 1 point", within, f"of {len(losses)}", ">=", len(losses) - 1))
    rows.append(claim("points lost, mean", mean(list(losses.values())), "", "<=", 0.2))
    model, split = trained("depthwise"), data.digits()
    lost = points(loss(model, by_default(model, split.calibrate), split.test))
    title = "depthwise: points lost by min-max, one scale a tensor"
    rows.append(claim(title, lost, "", ">=", 1, note="what the methods rescue"))
    return rows


def contaminated(_quick: bool) -> list[Row]:
    """The accuracy after calibration by each range method, if a tenth of the calibration samples is 40 times too large."""
    scheme, rows, gains = integer_scheme(machine_facts()), [], []
    ways = {"min-max": RangeMethod.MIN_MAX, "KL": RangeMethod.ENTROPY, "best per tensor": None}
    for name in ("plain", "residual", "deep"):
        model, split = trained(name), data.digits()
        dirty = _unlabelled(data.contaminated(split.calibrate))
        found = {}
        for way, method in ways.items():
            recipe = PtqRecipe(method=method, equalize=False, reconstruct=False, correct_biases=False)
            found[way] = quantize_with(recipe, model, dirty, scheme)
        gains.append(points(loss(found["KL"], found["min-max"], split.test)))
        note = ", ".join(f"{way} {score(int8, split.test):.2%}" for way, int8 in found.items())
        note = f"{note}; FP32 {score(model, split.test):.2%}"
        rows.append(fact(f"{name}: points, KL over min-max", gains[-1].value, "", interval=gains[-1], note=note))
    return [*rows, claim("points, KL over min-max, mean", mean(gains), "", ">=", 0.5)]


def sensitivity(_quick: bool) -> list[Row]:
    """What comes back on test samples when the tenth of the groups that costs most on validation samples is float again."""
    split, scheme = data.digits(), integer_scheme(machine_facts())
    model = nets.with_outliers(trained("deep"), 100.0, 4, only=5)
    statistics = collect(model, split.calibrate.inputs)
    mixed = MixedModel(model, statistics, scheme, method=RangeMethod.MIN_MAX)
    report = measure_sensitivity(Trials(mixed, Judge(model, split.validate)), SensitivityOptions(budget_s=0))
    worst = [one.group.name for one in report.groups[: math.ceil(0.1 * len(report.groups))]]
    fp32, int8, back = (scores(one, split.test) for one in (model, mixed.with_float(()), mixed.with_float(worst)))
    lost = fp32 > int8
    count, title = int(lost.sum()), "share of the lost samples won back by the worst tenth"
    if not count:
        return [skipped(title, "INT8 loses nothing")]
    still = count - int(back[lost].sum())
    share = Interval(1 - still / count, 1 - rate_bound(still, count, 0.025), rate_bound(count - still, count, 0.025))
    note = (
        f"{len(worst)} of {len(report.groups)} groups; INT8 by min-max gets {count} of {split.test.count} samples wrong"
    )
    return [claim(title, share, "", ">=", 0.8, note=note)]


def by_default(model: Artifact, samples: Dataset) -> Artifact:
    """Quantise with ONNX Runtime's own quantiser: min-max ranges, and one scale per tensor for activations and for weights."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model.data)
        logging.disable(logging.WARNING)  # it logs advice on the root logger
        try:
            quantize_static(source, target, CalibrationRows(samples), per_channel=False)
        finally:
            logging.disable(logging.NOTSET)
        return Artifact.from_bytes(target.read_bytes())


class CalibrationRows(CalibrationDataReader):  # type: ignore[misc]
    """One sample at a time."""

    def __init__(self, samples: Dataset) -> None:
        self._rows: Iterator[dict[str, np.ndarray]] = iter([samples.sample(n) for n in range(samples.count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rows, None)


def _unlabelled(samples: Dataset) -> Dataset:
    return make_dataset(samples.inputs, None)
