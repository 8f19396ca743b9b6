import numpy as np
import pytest

import models
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.apart import Apart
from row_graphs import parsed


@pytest.fixture
def apart():
    found = Apart()
    yield found
    found.close()


def contracts() -> Artifact:
    """A contraction over an axis that may be empty, for which ONNX Runtime 1.31 divides by the axis's size."""
    return parsed('y = Einsum<equation = "ia...,ja...->ij...">(x, x)', "float[N,M,K] x", "float[N,P,Q] y")


def test_outputs_are_those_of_the_model(apart):
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(apart.forward(parsed("y = Neg(x)"), {"x": x})["y"], -x)


def test_a_model_that_ends_its_process_is_an_error_and_the_next_call_works(apart):
    x = np.ones((2, 4, 3), np.float32)
    assert apart.forward(contracts(), {"x": x})["y"].shape == (2, 2, 3)
    with pytest.raises(PenstockError, match="ended its process with status -"):
        apart.forward(contracts(), {"x": x[:, :0, :0]})
    assert apart.forward(contracts(), {"x": x})["y"].shape == (2, 2, 3)


def test_a_model_that_fails_is_an_error(apart):
    with pytest.raises(PenstockError, match="the model failed"):
        apart.forward(parsed("y = Reshape(x, s)", weights="int64[1] s = {3}"), {"x": np.ones((2, 4), np.float32)})
    with pytest.raises(PenstockError, match="rubbish|refuses"):
        apart.forward(models.unknown_operator(), {"x": np.ones((2, 4), np.float32)})
