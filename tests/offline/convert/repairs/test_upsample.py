from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from benchmarks.zoo.onnx import model
from faulty_models import runs
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.convert.repairs import repair


def test_upsample_of_an_opset_without_it() -> None:
    nodes = [helper.make_node("Upsample", ["x", "s"], ["y"], mode="linear")]
    weights = {"s": np.array([1, 1, 2, 3], np.float32)}
    expected = runs(Artifact.from_bytes(model(nodes, 9, weights=weights).SerializeToString()))
    for opset in (11, 13, 21):
        broken = Artifact.from_bytes(model(nodes, opset, weights=weights).SerializeToString())
        with pytest.raises(PenstockError):
            runs(broken)
        np.testing.assert_array_equal(runs(repair(broken)[0]), expected)
