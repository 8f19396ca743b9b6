"""Write a request, and a model repository with a network, Python code that prepares the network's input, and an ensemble of both."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

DIGITS = Path(__file__).parent.parent / "digits"

PREPARE = """\
import penstock
from penstock import Tensor


@penstock.model
def prepare(pixels: Tensor["UINT8", -1, 8, 8]) -> Tensor["FP32", -1, 1, 8, 8]:
    return pixels[:, None].astype("float32") / 16
"""

# The network needs a configuration only for the names of its classes. Python code with type hints needs none.
NETWORK = 'output { name: "logits" label_filename: "labels.txt" }\n'

ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 64
input { name: "PIXELS" data_type: TYPE_UINT8 dims: [ 8, 8 ] }
output { name: "LOGITS" data_type: TYPE_FP32 dims: [ 10 ] }
ensemble_scheduling {
  step {
    model_name: "prepare"
    model_version: -1
    input_map { key: "pixels" value: "PIXELS" }
    output_map { key: "output" value: "image" }
  }
  step {
    model_name: "network"
    model_version: -1
    input_map { key: "image" value: "image" }
    output_map { key: "logits" value: "LOGITS" }
  }
}
"""
LABELS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def write(repository: Path, request: Path) -> int:
    """Write all files, and overwrite existing ones. Returns the digit in the image of the request."""
    for name in ("prepare", "network", "read"):
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / "prepare" / "1" / "model.py").write_text(PREPARE)
    shutil.copy(DIGITS / "model.onnx", repository / "network" / "1" / "model.onnx")
    (repository / "network" / "labels.txt").write_text("\n".join(LABELS))
    (repository / "network" / "config.pbtxt").write_text(NETWORK)
    (repository / "read" / "config.pbtxt").write_text(ENSEMBLE)
    with np.load(DIGITS / "evaluate.npz") as data:
        pixels, digit = (data["image"][0, 0] * 16).astype(int), int(data["labels"][0])
    tensor = {"name": "PIXELS", "datatype": "UINT8", "shape": [1, 8, 8], "data": pixels.ravel().tolist()}
    best = {"name": "LOGITS", "parameters": {"classification": 1}}
    request.write_text(json.dumps({"inputs": [tensor], "outputs": [best]}))
    return digit


if __name__ == "__main__":
    print(f"request.json shows a {write(Path(sys.argv[1]), Path('request.json'))}")
