"""Pictures, and the bundle of a pipeline that classifies them with a network like ResNet-18 in INT8."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from benchmarks import models
from benchmarks.scenarios.int8 import quantize_by_default
from penstock.bundle.pack_pipeline import pack_pipeline

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
_DECLARATION = """\
name: classify
inputs:
  image: {media: image}
models:
  net: default.onnx
steps:
  - {step: decode_image, in: image, out: pixels}
  - {step: resize, in: pixels, out: small, size: [224, 224]}
  - {step: normalise, in: small, out: scaled, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}
  - {step: layout, in: scaled, out: tensor}
  - {model: net, in: {input: tensor}, out: {output: logits}}
  - {step: softmax, in: logits, out: scores}
  - {step: top_k, in: scores, out: {labels: labels, scores: best}, k: 5}
outputs: [labels, best, scores]
"""


def jpegs(count: int, width: int, height: int) -> list[bytes]:
    """Photo-like pictures: smooth shapes and a little noise."""
    rng, found = np.random.default_rng(0), list[bytes]()
    for _ in range(count):
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        noisy = (picture + rng.integers(-6, 7, picture.shape)).clip(0, 255).astype(np.uint8)
        found.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes())
    return found


def pack(folder: Path) -> tuple[Path, Path]:
    """The bundle of the pipeline, and the model that it contains."""
    original = models.resnet18(folder / "resnet18.onnx")
    sample = {"input": np.random.default_rng(0).standard_normal((4, 3, SIDE, SIDE), np.float32)}
    model = quantize_by_default(original, sample)
    (folder / "pipeline.yaml").write_text(_DECLARATION)
    pack_pipeline(folder / "pipeline.yaml", bundle := folder / "classify.bundle", overwrite=True)
    return bundle, model
