from __future__ import annotations

import numpy as np
import pytest

from benchmarks.zoo.onnx import outer_value
from faulty_models import X, runs
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.convert.repairs import repair


def test_branches_that_return_or_hide_tensors_from_outside() -> None:
    broken = Artifact.from_bytes(outer_value().SerializeToString())
    with pytest.raises(PenstockError):
        runs(broken)
    repaired, done = repair(broken)
    expected = np.tanh(X) + (X if X.sum() > 0 else np.abs(X))
    np.testing.assert_allclose(runs(repaired), expected, atol=1e-6)
    assert "'a', 'x'" in done[0]
