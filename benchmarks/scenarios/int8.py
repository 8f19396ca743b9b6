"""What INT8 gains at one thread: networks like ResNet-18 and MobileNet-v2 at 224, and a 6-layer encoder of width 384 over 128
tokens, built by `penstock build` for one thread, against the untouched FP32 model on ONNX Runtime; beside it ONNX Runtime's
own quantiser with its default types (signed activations and weights, one scale a tensor), run as its guide says. The weights
are random, so there is no accuracy to lose: the contract allows any loss, and the error of the outputs is shown. The goals
are those of CPUs with integer dot products."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from benchmarks import models
from benchmarks.results import Row, claim, fact
from penstock import runtime
from penstock.artifact import Artifact
from penstock.bundle.evidence import CandidateRecord
from penstock.engines.registry import get_engine
from penstock.measurement import Interval
from penstock.offline.build import BuildResult, Recipe, build
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.judge.contract import Contract
from penstock.perf.measure import LOADS, interleave, repeat, speedup
from penstock.resources import machine_facts
from penstock.tensor import Array

_GOALS = {"ResNet-18": 2.0, "MobileNet-v2": 1.5, "encoder": 2.0}
_MODELS: dict[str, tuple[Callable[[Path], Path], tuple[int, ...]]] = {
    "ResNet-18": (models.resnet18, (3, 224, 224)),
    "MobileNet-v2": (models.mobilenet, (3, 224, 224)),
    "encoder": (models.encoder, (128, 384)),
}


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    machine = machine_facts()
    dot_product = fact(
        "integer dot product in this CPU", int(machine.has_integer_dot_product), "", note=f"of {', '.join(machine.isa)}"
    )
    rows = [dot_product]
    for name, (make, shape) in _MODELS.items():
        rng = np.random.default_rng(0)
        size = (4 if quick else 16, *shape)
        calibration, evaluation = ({"input": rng.standard_normal(size).astype(np.float32)} for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            model = make(Path(folder) / "model.onnx")
            built = build(model, Path(folder) / "model.bundle", calibration, evaluation, _recipe(quick))
            default = quantize_by_default(model, calibration)
            sample = {"input": evaluation["input"][:1]}
            rows += compare(name, model, built, default, sample, 2.0 if quick else 30.0)
    return rows


def compare(
    name: str, original: Path, built: BuildResult, default: Path, sample: Mapping[str, Array], budget_s: float
) -> list[Row]:
    """Compare the times of one call of the original, of the bundle, and of the default quantiser's model."""
    engine = get_engine("onnxruntime")

    def load(number: int) -> dict[str, Array]:
        before, after = (engine.load(Artifact.from_file(path), {"threads": 1}) for path in (original, default))
        with runtime.open(built.bundle) as bundle:
            timed = interleave(
                {
                    "original": lambda: before.forward(sample),
                    "built": lambda: bundle.infer(sample),
                    "default": lambda: after.forward(sample),
                },
                budget_s / LOADS,
                number,
            )
        before.unload()
        after.unload()
        return {name: np.concatenate(found.seconds) for name, found in timed.items()}

    timings = repeat(load, LOADS, budget_s)
    ours, theirs = (speedup(timings["original"], timings[way]) for way in ("built", "default"))
    chosen, best = built.chosen, best_int8(built)
    note = f"{timings['original'].p50_ms:.3g} → {timings['built'].p50_ms:.3g} ms, {chosen.name}"
    if best is not chosen:
        ours, note = best.speedup or Interval(0, 0, 0), f"not chosen: {best.reason}; the build chose {chosen.name}"
    error = best.accuracy.relative_error if best.accuracy else float("inf")
    title = f"{name}: INT8 of the build over FP32"
    return [
        claim(title, ours, "×", ">=", _GOALS[name], note=note)
        if machine_facts().has_integer_dot_product
        else fact(title, ours.value, "×", interval=ours, note=note),
        fact(f"{name}: ONNX Runtime's quantiser by default", theirs.value, "×", interval=theirs),
        fact(f"{name}: error of our outputs", error, "", note="norm of the difference by norm of FP32's outputs"),
    ]


def best_int8(built: BuildResult) -> CandidateRecord:
    """The chosen candidate if it is INT8. Otherwise the fastest INT8 candidate, which the build did not choose."""
    if built.chosen.precision == "int8":
        return built.chosen
    found = [record for record in built.evidence.candidates if record.precision == "int8"]
    if not found:
        raise RuntimeError(f"the build made no INT8 candidate: {built.evidence.notes}")
    return max(found, key=lambda record: record.speedup.value if record.speedup else 0.0)


def quantize_by_default(model: Path, calibration: Mapping[str, Array]) -> Path:
    """ONNX Runtime's static quantisation with preprocessing and default settings."""
    prepared, quantized = model.with_name("prepared.onnx"), model.with_name("default.onnx")
    logging.disable(logging.WARNING)  # it logs advice on the root logger
    try:
        quant_pre_process(model, prepared, skip_symbolic_shape=True)
        quantize_static(prepared, quantized, _Samples(calibration))
    finally:
        logging.disable(logging.NOTSET)
    return quantized


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    """Yields one row at a time."""

    def __init__(self, inputs: Mapping[str, Array]) -> None:
        self._rows: Iterator[dict[str, Array]] = iter(
            [{name: array[row : row + 1] for name, array in inputs.items()} for row in range(len(inputs["input"]))]
        )

    def get_next(self) -> dict[str, Array] | None:
        return next(self._rows, None)


def _recipe(quick: bool) -> Recipe:
    # The range method affects the accuracy but not the speed, so one method is enough.
    return Recipe(
        Contract(1.0, max_output_error=float("inf")),
        threads=(1,),
        methods=(RangeMethod.MIN_MAX,),
        careful=False,
        timing_s=4.0 if quick else 60.0,
    )
