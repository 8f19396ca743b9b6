"""Pictures, and bundles of a pipeline that classifies them with a network like ResNet-18."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from benchmarks import models
from benchmarks.scenarios.int8 import quantize_by_default
from penstock.artifact import Artifact
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.dataset import make_dataset
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.optimize.optimizer import optimize
from penstock.resources import machine_facts
from penstock.tensor import Array

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
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


def jpegs(count: int, width: int, height: int) -> list[bytes]:
    """Photo-like pictures: smooth shapes and a little noise."""
    rng, found = np.random.default_rng(0), list[bytes]()
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


def compressed(original: Path) -> Path:
    """The network in INT8 as Penstock's quantiser writes it for this machine, which `penstock build` would try, too.

    The parts of a build that choose among candidates are left out, so that the model is the same in each run. The weights are
    random, so there is no accuracy to lose.
    """
    optimised, _ = optimize(Artifact.from_file(original))
    recipe = PtqRecipe(RangeMethod.MIN_MAX, equalize=False, reconstruct=False, correct_biases=False)
    data = make_dataset(_sample(0, 8), None)
    made = quantize_with(recipe, optimised, data, integer_scheme(machine_facts()))
    (path := original.with_name("penstock.onnx")).write_bytes(made.data)
    return path


def pack(folder: Path, model: Path) -> Path:
    """The bundle of the pipeline with ``model``, which is a model file or a bundle in ``folder``."""
    declaration = folder / f"{model.stem}.yaml"
    declaration.write_text(classifier("classify", model.name, SIDE))
    pack_pipeline(declaration, bundle := folder / f"pipeline-{model.stem}.bundle", overwrite=True)
    return bundle


def _sample(seed: int, rows: int) -> dict[str, Array]:
    return {"input": np.random.default_rng(seed).standard_normal((rows, 3, SIDE, SIDE), np.float32)}
