"""A data set of 20 GB, made while it is read: `penstock build --calibrate module:function` with 1,000 and with 10,000 samples of 500
different sizes, 2 MB each on average. Memory must not grow with the number of samples. Needs 20 GB in the folder for temporary files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.packaged.builds import run_build
from benchmarks.results import Row, claim, fact

_FEW, _MANY = 1_000, 10_000
_GROWTH = 1.1


def run(quick: bool) -> list[Row]:
    """The rows of this scenario."""
    part = 20 if quick else 1
    peaks, rows = [], list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.onnx").write_bytes(_model())
        for count in (_FEW // part, _MANY // part):
            Path(folder, "data.py").write_text(_SOURCE.format(count=count))
            options = ["--calibrate", "data:samples", *(["--budget", "30s"] if quick else [])]
            seconds, peak = run_build(["build", "model.onnx", *options, "-o", "made.bundle"], Path(folder))
            peaks.append(peak)
            rows += [
                fact(f"{count} samples: peak memory of the build", peak / 2**20, "MiB"),
                fact(f"{count} samples: build time", seconds, "s"),
            ]
    return [*rows, claim("growth of the peak from few to many samples", peaks[1] / peaks[0], "×", "<=", _GROWTH)]


_SOURCE = """
import numpy as np


def samples():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((64, 4_096 + 500 * 16), np.float32)
    for number in range({count}):
        yield {{"x": noise[:, : 4_096 + number * 7_919 % 500 * 16] + np.float32(rng.standard_normal())}}
"""
"""Imports nothing else, because all that it imports counts as memory of the build."""


def _model() -> bytes:
    """A convolution over time, averaged, and a linear layer."""
    rng = np.random.default_rng(1)
    weights = {
        "kernel": rng.standard_normal((32, 64, 9), np.float32) * 0.05,
        "matrix": rng.standard_normal((32, 10), np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["filtered"], strides=[8], kernel_shape=[9]),
        helper.make_node("Relu", ["filtered"], ["positive"]),
        helper.make_node("GlobalAveragePool", ["positive"], ["averaged"]),
        helper.make_node("Flatten", ["averaged"], ["features"]),
        helper.make_node("MatMul", ["features", "matrix"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "streamed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64, "t"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
