from __future__ import annotations

import numpy as np
import pytest

from benchmarks.zoo.onnx import group_norm_18
from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.convert.repairs import repair
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded


def test_group_normalization_of_opset_18() -> None:
    broken = Artifact.from_bytes(group_norm_18().SerializeToString())
    with pytest.raises(InvalidModel, match="deprecated"):
        read_proto(broken)
    array = np.random.default_rng(0).normal(size=(2, 4, 5, 6)).astype(np.float32)
    rows = array.reshape(2, 2, -1)
    rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    expected = rows * [[[1], [2]]] + [[[0.5], [-1]]]
    with loaded(repair(broken)[0]) as loaded_model:
        found = loaded_model.forward({"x": array})["y"]
    np.testing.assert_allclose(found.reshape(2, 2, -1), expected, atol=1e-5)
