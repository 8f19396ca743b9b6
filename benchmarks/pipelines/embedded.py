"""A call of an embedded pipeline, from pixels to a label, against the bare session of ONNX Runtime on a tensor that is ready."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.results import Row, claim, fact
from benchmarks.rounds import difference
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.runtime import Pipeline

_GOAL_US = 50.0
MODEL = Path(__file__).parents[2] / "examples" / "digits" / "model.onnx"
DECLARATION = """\
name: digits
inputs:
  image: {media: image}
models:
  net: model.onnx
labels: {digits: [zero, one, two, three, four, five, six, seven, eight, nine]}
steps:
  - {step: decode_image, in: image, out: pixels, colour: grey}
  - {step: normalise, in: pixels, out: scaled}
  - {step: layout, in: scaled, out: tensor}
  - {model: net, in: {image: tensor}, out: {logits: logits}}
  - {step: softmax, in: logits, out: scores}
  - {step: top_k, in: scores, out: {labels: label, scores: score}, labels: digits}
outputs: [label, score]
"""


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    rounds, calls = (20, 50) if quick else (100, 100)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        declaration = Path(folder, "pipeline.yaml")
        declaration.write_text(DECLARATION)
        shutil.copy(MODEL, folder)
        pack_pipeline(declaration, bundle := Path(folder, "digits.bundle"))
        with Pipeline.open(bundle, threads=1) as ours:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(MODEL, options)
            tensor = {"image": np.ascontiguousarray(pixels[None, None], np.float32) / np.float32(255)}
            times: dict[str, list[float]] = {"engine": [], "pipeline": []}
            for _ in range(rounds):
                times["engine"].append(_p50(lambda: session.run(None, tensor), calls))
                times["pipeline"].append(_p50(lambda: ours(pixels), calls))
    extra = difference(times["pipeline"], times["engine"])
    return [
        claim("p50 of a call beyond the engine's, from pixels to a label", extra, "µs", "<=", _GOAL_US),
        *(fact(f"p50 of a call: {name}", float(np.median(values)), "µs") for name, values in times.items()),
    ]


def _p50(call: Callable[[], object], calls: int) -> float:
    """The median of the microseconds of a call."""
    found = np.empty(calls)
    for number in range(calls):
        start = time.perf_counter_ns()
        call()
        found[number] = time.perf_counter_ns() - start
    return float(np.median(found)) / 1e3
