import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.offline.compress.perturb import perturbed
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights

DATA = make_dataset({"x": np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)}, None)
METHODS = {
    "int8-dynamic": lambda a: quantize_dynamic(a, DATA, DynamicOptions(least_weights=1)),
    "int8-weights": lambda a: quantize_weights(a, None, WeightOnlyOptions(8, 16, least_weights=1)),
    "int4-weights": lambda a: quantize_weights(a, None, WeightOnlyOptions(4, 16, least_weights=1)),
    "fp16-weights": lambda a: halve_weights(a, HalfOptions("fp16", least_weights=1)),
    "bf16-weights": lambda a: halve_weights(a, HalfOptions("bf16", least_weights=1)),
}


def proto(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load_model_from_string(artifact.data)


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("method", METHODS)
def test_a_twelfth_of_the_rounded_weights_moves_by_one_step(method):
    original = mlp(128)
    made = proto(METHODS[method](original))
    found = perturbed(made, proto(original), 0)
    assert found is not None
    before, after = arrays(made), arrays(found)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    weights = {name for name in changed if before[name].size > 1000}
    assert weights
    for name in weights:
        one, other = (_integers(part[name], is_packed=method.startswith("int4")) for part in (before, after))
        assert np.abs(other - one).max() == 1
        assert 0.05 < (other != one).mean() < 0.12
    assert perturbed(made, proto(original), 0) == found
    assert perturbed(made, proto(original), 1) != found


def _integers(array: np.ndarray, *, is_packed: bool) -> np.ndarray:
    if is_packed:
        return np.stack([array & 15, array >> 4]).astype(np.int64)
    return (array.view(np.uint16) if array.dtype.itemsize == 2 else array).astype(np.int64)


def test_a_model_without_rounded_numbers_cannot_be_perturbed():
    assert perturbed(proto(mlp()), proto(mlp()), 0) is None


def test_numbers_of_the_original_stay():
    made = proto(METHODS["int8-weights"](mlp()))
    assert perturbed(made, made, 0) is None


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_weights_that_rounding_has_not_changed_stay(kind):
    """Moved by one step, they would be no integers any more, and a shape computed from them would be another one."""
    n = Network()
    size = n.op("Cast", n.op("Mul", n.op("Cast", n.op("Shape", "x"), to=1), n.weight(np.ones(2, np.float32))), to=7)
    n.op("Reshape", n.op("MatMul", "x", n.normal(16, 16)), size, name="y")
    original = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    made = proto(halve_weights(original, HalfOptions(kind, least_weights=1)))
    found = perturbed(made, proto(original), 0)
    assert found is not None
    before, after = arrays(made), arrays(found)
    assert [name for name in before if before[name].tobytes() != after[name].tobytes()] == [f"w1_{kind}"]
