"""A pipeline over pictures for tests: which corner of a picture is bright?"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.tensor import Array

LABELS = ("top left", "top right", "bottom left", "bottom right")
DECLARATION = """\
name: corners
description: Finds the bright corner of a picture.
inputs:
  image: {media: image}
models:
  classifier: corners.onnx
labels:
  corners: [top left, top right, bottom left, bottom right]
steps:
  - {step: decode_image, in: image, out: pixels, colour: grey}
  - {step: resize, in: pixels, out: small, size: [8, 8]}
  - {step: normalise, in: small, out: scaled}
  - {model: classifier, in: {x: scaled}, out: {y: logits}}
  - {step: softmax, in: logits, out: probabilities}
  - {step: top_k, in: probabilities, out: {labels: labels, scores: scores}, labels: corners, k: 2}
outputs: [labels, scores, probabilities]
examples: [{image: example.png}]
"""


def picture(corner: int, size: int = 64, format: str = "PNG") -> bytes:
    """A noisy picture whose quarter ``corner`` is bright."""
    pixels = np.random.default_rng(corner).integers(0, 100, (size, size, 3), np.uint8)
    half, (row, column) = size // 2, divmod(corner, 2)
    pixels[row * half :, column * half :][:half, :half] += 120
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def corner_model() -> bytes:
    """[-1, 8, 8, 1] to four logits: the mean of each quarter, times 20."""
    quarter = np.kron(np.eye(4).reshape(4, 2, 2), np.ones((1, 4, 4))).astype(np.float32)
    weight: Array = np.ascontiguousarray(quarter.reshape(4, 64).T * (20 / 16))
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8, 8, 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    graph = helper.make_graph(nodes, "corners", [x], [y], [numpy_helper.from_array(weight, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def pack_corners(folder: Path, declaration: str = DECLARATION) -> Path:
    """The bundle of the pipeline, packed below ``folder``."""
    (folder / "corners.onnx").write_bytes(corner_model())
    (folder / "example.png").write_bytes(picture(0))
    (folder / "pipeline.yaml").write_text(declaration)
    pack_pipeline(folder / "pipeline.yaml", target := folder / "corners.bundle", overwrite=True)
    return target
