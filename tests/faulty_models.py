"""ONNX models with one fault each, and a check that they run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper

from benchmarks.zoo.onnx import model
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.convert.repairs import repair
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded
from penstock.tensor import Array

X = np.random.default_rng(0).normal(size=(2, 3, 6, 8)).astype(np.float32)


def runs(artifact: Artifact) -> Array:
    """The output of a model that the checker and ONNX Runtime accept. Raises PenstockError."""
    read_proto(artifact)
    with loaded(artifact, as_written=True) as loaded_model:
        (output,) = loaded_model.forward({"x": X}).values()
    return output


def relu_tanh(*changes: Callable[[onnx.ModelProto], object]) -> Artifact:
    """x -> Relu -> a -> Tanh -> y, changed."""
    proto = model([helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])], 17)
    for change in changes:
        change(proto)
    return Artifact.from_bytes(proto.SerializeToString())


def check_repaired(broken: Artifact) -> str:
    """Check that a model of ``relu_tanh`` is refused, and that it runs after one repair. Returns what was repaired."""
    with pytest.raises(PenstockError):
        runs(broken)
    repaired, (done,) = repair(broken)
    np.testing.assert_allclose(runs(repaired), np.tanh(np.maximum(X, 0)), atol=1e-6, strict=True)
    assert repaired.digest != broken.digest
    assert repair(repaired) == (repaired, ())
    return done
