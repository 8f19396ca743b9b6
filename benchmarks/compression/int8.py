"""Compares INT8 with FP32: speed on large networks with random weights, and accuracy on small trained networks."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from benchmarks import models
from benchmarks.compression import data, nets
from benchmarks.compression.train import TASKS, trained
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.mixed import recovery
from penstock.offline.compress.precision.sensitivity import SensitivityOptions, measure_sensitivity
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.fastest import fastest_placement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.optimizer import optimize
from penstock.perf.measure import feed, interleave, speedup
from penstock.resources import machine_facts

_LARGE: dict[str, tuple[Callable[[Path], Path], tuple[int, ...], float]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224), 3),
    "ResNet-50": (models.resnet50, (3, 224, 224), 3),
    "MobileNet-v2-like": (models.mobilenet, (3, 224, 224), 1.5),
    "6-layer encoder": (models.encoder, (128, 384), 2),
}
SIX = ("plain", "depthwise", "residual", "MLP", "encoder", "autoencoder")


def speed(quick: bool) -> list[Row]:
    """The speed of INT8 relative to FP32 in ONNX Runtime, for calls of one sample, with one thread and with all threads. Also
    compares with NNCF's INT8 in OpenVINO.
    """
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
        best = ranked[0]
        for threads in sorted({1, machine.cores}):
            engine = get_engine("onnxruntime")
            before, after = (engine.load(model, {"threads": threads}) for model in (original, best.artifact))
            timings = interleave(
                {"fp32": feed(before, samples.rows(0, 1)), "int8": feed(after, samples.rows(0, 1))},
                2.0 if quick else 10.0,
            )
            gain = speedup(timings["fp32"], timings["int8"])
            title = f"{name}: INT8 over FP32, {threads} thread{'s' if threads > 1 else ''}"
            note = f"{timings['fp32'].p50_ms:.3g} → {timings['int8'].p50_ms:.3g} ms, {best.placement.value}"
            rows.append(
                claim(title, gain, "×", ">=", goal, note=note)
                if threads == 1
                else fact(title, gain.value, "×", interval=gain, note=note)
            )
        ours = {one.placement.value: one.artifact for one in ranked}
        rows.append(_against_nncf(name, fp32, ours, samples, quick))
    return rows


def six_nets(quick: bool) -> list[Row]:
    """The accuracy that INT8 loses after calibration with 100 samples, without labels and without training."""
    scheme, rows, losses = integer_scheme(machine_facts()), [], {}
    for name in SIX[:3] if quick else SIX:
        model, split = trained(name), TASKS[name].data()
        int8 = quantize_with(PtqRecipe(), model, _unlabelled(split.calibrate), scheme)
        before, after = score(model, split.test), score(int8, split.test)
        losses[name] = 100 * (before - after)
        note = f"{before:.2%} → {after:.2%} {'top-1' if split.test.labels is not None else 'of the pixels given back'}"
        rows.append(fact(f"{name}: points lost by INT8", losses[name], "", note=f"{note}, {split.test.count} samples"))
    within = sum(loss <= 1 for loss in losses.values())
    rows.append(claim("networks within 1 point", within, f"of {len(losses)}", ">=", len(losses) - 1))
    rows.append(claim("points lost, mean", float(np.mean(list(losses.values()))), "", "<=", 0.2))
    model, split = trained("depthwise"), data.digits()
    naive = by_default(model, split.calibrate)
    loss = 100 * (score(model, split.test) - score(naive, split.test))
    rows.append(
        claim(
            "depthwise: points lost by min-max, one scale a tensor", loss, "", ">=", 1, note="what the methods rescue"
        )
    )
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
            recipe = PtqRecipe(method=method, equalize=False, correct_biases=False)
            found[way] = 100 * score(quantize_with(recipe, model, dirty, scheme), split.test)
        gains.append(found["KL"] - found["min-max"])
        note = ", ".join(f"{way} {value:.2f} %" for way, value in found.items())
        rows.append(
            fact(f"{name}: points, KL over min-max", gains[-1], "", note=f"{note}; FP32 {score(model, split.test):.2%}")
        )
    return [*rows, claim("points, KL over min-max, mean", float(np.mean(gains)), "", ">=", 0.5)]


def sensitivity(_quick: bool) -> list[Row]:
    """The fraction of the lost accuracy that is recovered if the most harmful tenth of the groups stays in float."""
    split, scheme = data.digits(), integer_scheme(machine_facts())
    model = nets.with_outliers(trained("deep"), 100.0, 4, only=5)
    statistics = collect(model, split.calibrate.inputs)
    trials = Trials(MixedModel(model, statistics, scheme, method=RangeMethod.MIN_MAX), Judge(model, split.test))
    report = measure_sensitivity(trials, SensitivityOptions(budget_s=0))
    back = recovery(trials, report)
    note = (
        f"{back.groups} of {len(report.groups)} groups; INT8 by min-max loses {report.int8.loss.value:.2%}, "
        f"KL {back.divergence or 0:.0%} won back"
    )
    if back.accuracy is None:
        return [skipped("share of the loss won back", f"INT8 loses nothing: {note}")]
    return [claim("share of the loss won back by the worst tenth", back.accuracy, "", ">=", 0.8, note=note)]


def score(model: Artifact, samples: Dataset) -> float:
    """The fraction of correct labels. Without labels: 1 minus the norm of the reconstruction error divided by the norm of the
    input.
    """
    found = answers(get_engine("onnxruntime").load(model, {"threads": 1}), samples)["output"]
    if samples.labels is not None:
        return float((found.argmax(axis=1) == samples.labels).mean())
    wanted = samples.inputs["input"]
    return 1 - float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def by_default(model: Artifact, samples: Dataset) -> Artifact:
    """Quantise with ONNX Runtime's own quantiser: min-max ranges, and one scale per tensor for activations and for weights."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model.data)
        logging.disable(logging.WARNING)  # it logs advice on the root logger
        try:
            quantize_static(source, target, _Reader(samples), per_channel=False)
        finally:
            logging.disable(logging.NOTSET)
        return Artifact.from_bytes(target.read_bytes())


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """Yields one sample at a time."""

    def __init__(self, samples: Dataset) -> None:
        self._rows: Iterator[dict[str, np.ndarray]] = iter([samples.rows(n, n + 1) for n in range(samples.count)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._rows, None)


def _unlabelled(samples: Dataset) -> Dataset:
    return make_dataset(samples.inputs, None)


def _against_nncf(name: str, fp32: Artifact, ours: Mapping[str, Artifact], samples: Dataset, quick: bool) -> Row:
    """Compare the INT8 model and engine that a build would choose with NNCF's model in OpenVINO, all with one thread."""
    title = f"{name}: our INT8 over NNCF's in OpenVINO, 1 thread"
    try:
        import nncf  # noqa: PLC0415 - a peer, measured only if it is installed
        import openvino  # noqa: PLC0415
    except ImportError as error:
        return skipped(title, error)
    logging.disable(logging.WARNING)
    core = openvino.Core()
    source = core.read_model(fp32.data, b"")
    calibration = nncf.Dataset([samples.rows(n, n + 1) for n in range(samples.count)])
    compiled = core.compile_model(nncf.quantize(source, calibration), "CPU", {"INFERENCE_NUM_THREADS": 1})
    logging.disable(logging.NOTSET)
    request, sample = compiled.create_infer_request(), samples.rows(0, 1)
    runs = {
        f"{engine}, {placement}": feed(get_engine(engine).load(model, {"threads": 1}), sample)
        for engine in ("onnxruntime", "openvino")
        for placement, model in ours.items()
    }
    timings = interleave({"nncf": lambda: request.infer(sample), **runs}, 3.0 if quick else 15.0)
    best = min(runs, key=lambda way: timings[way].p50_ms)
    gain = speedup(timings["nncf"], timings[best])
    note = f"{timings['nncf'].p50_ms:.3g} ms against {timings[best].p50_ms:.3g} ms on {best}"
    return claim(title, gain, "×", ">=", 1, note=note)
