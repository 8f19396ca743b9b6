"""Calibration and judging take the same memory for any amount of data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = '''
import resource
import sys

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.offline.compress.functions import compress

rng = np.random.default_rng(0)
weights = {"a": rng.standard_normal((64, 128)) / 8, "b": rng.standard_normal((128, 10)) / 8}
graph = helper.make_graph(
    [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y"]),
    ],
    "mean",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "length", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
    [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
model = Artifact.from_bytes(model.SerializeToString())
count, sizes = int(sys.argv[1]), int(sys.argv[2])


def samples():
    """Samples of 4 MiB or, with several sizes, of up to 140 KiB."""
    block = rng.standard_normal((1, 1 << 14, 64)).astype(np.float32)
    for number in range(count // 2):
        block[0, number % 100] = rng.standard_normal(64)
        yield {"x": block[:, : 64 + number * 37 % sizes] if sizes > 1 else block}


compress.quantize(model, samples(), samples(), budget_s=0.5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
'''


def peak(folder: Path, count: int, sizes: int) -> int:
    """Peak memory of a process that quantises and judges a model on ``count`` samples of so many sizes."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(count), str(sizes)],
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert os.listdir(folder) == []
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("few", "many", "sizes"), [(256, 1024, 1), (2_500, 10_000, 500)])
def test_four_times_the_data_take_the_same_memory(tmp_path: Path, few: int, many: int, sizes: int) -> None:
    assert peak(tmp_path, many, sizes) <= 1.1 * peak(tmp_path, few, sizes)
