"""Pictures, and bundles of a pipeline that classifies them with a network like ResNet-18."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from benchmarks import models
from benchmarks.pipelines.by_hand import SIDE, opened, tensor
from benchmarks.results import Row, fact
from benchmarks.scenarios.int8 import quantize_by_default
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.offline.build import BuildResult, Recipe, build
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.judge.contract import Contract
from penstock.tensor import Array

_BUDGET_S = 300.0
_SIMILAR = Contract(max_accuracy_loss=0.01, metric="cosine", max_output_error=float("inf"))
_DECLARATION = """\
name: NAME
inputs:
  image: {media: image}
models:
  net: MODEL
steps:
  - {step: decode_image, in: image, out: pixels}
  - {step: resize, in: pixels, out: small, size: [SIDE, SIDE]}
  - {step: normalise, in: small, out: scaled, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}
  - {step: layout, in: scaled, out: tensor}
  - {model: net, in: {input: tensor}, out: {output: logits}}
  - {step: softmax, in: logits, out: scores}
  - {step: top_k, in: scores, out: {labels: labels, scores: best}, k: 5}
outputs: [labels, best, scores]
"""


def classifier(name: str, model: str, side: int) -> str:
    """The declaration of a pipeline that classifies pictures, which it resizes to ``side`` × ``side``."""
    return _DECLARATION.replace("NAME", name).replace("MODEL", model).replace("SIDE", str(side))


def jpegs(count: int, width: int, height: int, seed: int = 0) -> list[bytes]:
    """Photo-like pictures: smooth shapes and a little noise."""
    rng, found = np.random.default_rng(seed), list[bytes]()
    for _ in range(count):
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        noisy = (picture + rng.integers(-6, 7, picture.shape)).clip(0, 255).astype(np.uint8)
        found.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return found


def network(folder: Path) -> Path:
    """A network like ResNet-18 with random weights, in FP32, as it is exported."""
    return models.resnet18(folder / "resnet18.onnx")


def quantised(original: Path) -> Path:
    """The network in INT8, by ONNX Runtime's own quantiser."""
    return quantize_by_default(original, _sample(0, 4))


def built(original: Path, samples: int, timing_s: float, *, calibrate: bool = True) -> BuildResult:
    """The bundle that ``penstock build --objective throughput`` makes of the network for one thread. The build chooses the engine, the
    precision and the largest batch. It judges on ``samples`` pictures. To try INT8, it calibrates on as many others.

    The weights are random, so there is no accuracy to lose. The contract therefore limits the angle between the outputs and the
    original's: the cosine may fall by 0.01 at most, as in the scenario ``rivals``. Errors have no other limit. In particular, the
    contract ignores the default limit relative to the spread of each output, because the outputs for different pictures are almost
    equal. Only one way to find ranges is tried, because it affects the accuracy of INT8 but not its speed.
    """
    tensors = np.concatenate([tensor(opened(one)) for one in jpegs(2 * samples, SIDE, SIDE, seed=1)])
    recipe = Recipe(
        _SIMILAR,
        threads=(1,),
        methods=(RangeMethod.MIN_MAX,),
        careful=False,
        objective="throughput",
        budget_s=_BUDGET_S,
        timing_s=timing_s,
    )
    target = original.with_name(f"{original.stem}-built.bundle")
    calibration = {"input": tensors[samples:]} if calibrate else None
    return build(original, target, calibration, {"input": tensors[:samples]}, recipe)


def pack(folder: Path, model: Path) -> Path:
    """The bundle of the pipeline with ``model``, which is a model file or a bundle in ``folder``."""
    declaration = folder / f"{model.stem}.yaml"
    declaration.write_text(classifier("classify", model.name, SIDE))
    pack_pipeline(declaration, bundle := folder / f"pipeline-{model.stem}.bundle", overwrite=True)
    return bundle


def build_row(made: BuildResult) -> Row:
    """What the build chose, and the error of the outputs."""
    error = made.chosen.accuracy.relative_error if made.chosen.accuracy else float("inf")
    note = f"chosen: {made.chosen.name}; the norm of the difference by the norm of the original's outputs"
    return fact("error of the built model's outputs", error, "", note=note)


def _sample(seed: int, rows: int) -> dict[str, Array]:
    return {"input": np.random.default_rng(seed).standard_normal((rows, 3, SIDE, SIDE), np.float32)}
