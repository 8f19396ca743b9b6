import ml_dtypes
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
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import DataType

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


SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")


def int8(original: Artifact) -> onnx.ModelProto:
    return proto(quantize(original, ranges(collect(original, DATA), RangeMethod.MIN_MAX, SCHEME), SCHEME))


def differing(one: onnx.ModelProto, other: onnx.ModelProto) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    before, after = arrays(one), arrays(other)
    return {name: (before[name], after[name]) for name in before if before[name].tobytes() != after[name].tobytes()}


@pytest.mark.parametrize(("widened", "least", "most"), [(False, 1.1, 1.25), (True, 3.5, 4.0)])
def test_ranges_become_wider_and_integers_move_by_one(widened, least, most):
    original = mlp(32)
    made = int8(original)
    ratios = []
    for draw in range(12):
        found = perturbed(made, proto(original), draw, widened=widened)
        for name, (before, after) in differing(made, found).items():
            if before.dtype.kind == "f":
                ratios.append(float(after / before))
            else:
                assert np.abs(after.astype(np.int64) - before).max() == 1, name
    scales = {node.input[1] for node in made.graph.node if node.op_type == "QuantizeLinear"}
    assert len(ratios) == 12 * len(scales)
    assert least <= min(ratios) < least + 0.2 * (most - least)
    assert most - 0.2 * (most - least) < max(ratios) <= most


def network(weight: np.ndarray, *, shared: bool = False) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A product with ``weight`` and its original; the weight has the scale of the input if ``shared``."""
    columns = weight.shape[1]
    n = Network()
    n.op("MatMul", "x", n.normal(*weight.shape), name="y")
    original = n.artifact({"x": ["N", len(weight)]}, {"y": ["N", columns]})
    n = Network()
    scale, zero, own = n.weight(np.float32(0.5)), n.weight(np.uint8(128)), n.weight(np.float32(0.25))
    x = n.op("DequantizeLinear", n.op("QuantizeLinear", "x", scale, zero), scale, zero)
    w = n.op("DequantizeLinear", n.weight(weight), scale if shared else own)
    n.op("MatMul", x, w, name="y")
    return proto(n.artifact({"x": ["N", len(weight)]}, {"y": ["N", columns]})), proto(original)


def test_integers_at_a_limit_stay_within_it():
    for limit in (-128, 127):
        made, original = network(np.full((40, 40), limit, np.int8))
        for draw in range(3):
            _, after = differing(made, perturbed(made, original, draw))["w3"]
            assert set(np.unique(after)) == {limit, limit + (1 if limit < 0 else -1)}


def test_of_few_integers_three_move():
    for shape, count in (((2, 2), 3), ((1, 2), 2), ((6, 6), 3), ((6, 7), 4)):
        made, original = network(np.zeros(shape, np.int8))
        _, after = differing(made, perturbed(made, original, 0))["w3"]
        assert np.count_nonzero(after) == count


def test_a_scale_that_weights_use_too_stays():
    for shared, names in ((True, ["w3"]), (False, ["w0", "w3"])):
        made, original = network(np.zeros((4, 4), np.int8), shared=shared)
        assert list(differing(made, perturbed(made, original, 0))) == names


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_move_to_a_neighbour_but_not_from_zero_nor_to_infinity(dtype):
    largest = ml_dtypes.finfo(dtype).max
    for value, places in ((0.0, ()), (float(largest), (1,)), (-1.0, (1, 2))):
        n = Network()
        weight = np.full((30, 30), value, np.float32)
        weight[0, 0] = 0.1  # Rounding changes this one.
        wide = n.op("Cast", n.weight(weight.astype(dtype)), to=1)
        n.op("MatMul", "x", wide, name="y")
        made = proto(n.artifact({"x": ["N", 30]}, {"y": ["N", 30]}))
        n = Network()
        n.op("MatMul", "x", n.weight(weight), name="y")
        original = proto(n.artifact({"x": ["N", 30]}, {"y": ["N", 30]}))
        moved = [differing(made, perturbed(made, original, draw)).get("w0") for draw in range(2)]
        for pair in filter(None, moved):
            before, after = (array.astype(np.float64).ravel()[1:] for array in pair)
            assert np.isfinite(after).all()
            assert len(set(after[after != before])) == len(places)


def test_both_numbers_in_a_byte_move_and_stay_within_four_bits():
    original = mlp(32)
    made = proto(METHODS["int4-weights"](original))
    packed = next(node.input[1] for node in made.graph.node if node.op_type == "MatMulNBits")
    for byte in (0x00, 0xFF):
        for tensor in made.graph.initializer:
            if tensor.name == packed:
                tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), byte, np.uint8), packed))
        _, after = differing(made, perturbed(made, proto(original), 0))[packed]
        steps = _integers(after, is_packed=True)
        assert set(np.unique(steps)) == ({0, 1} if byte == 0 else {14, 15})
        assert all((part != byte & 15).any() for part in steps)
        assert ((steps[0] != byte & 15) != (steps[1] != byte & 15)).any()


def test_numbers_in_constants_of_the_original_stay():
    n = Network()
    value = np.arange(16, dtype=np.float32).reshape(4, 4) + np.float32(0.1)
    n.op(
        "MatMul",
        "x",
        n.op("Constant", value=numpy_helper.from_array(value.astype(np.float16).astype(np.float32))),
        name="y",
    )
    original = proto(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))
    n = Network()
    n.op("MatMul", "x", n.op("Cast", n.weight(value.astype(np.float16)), to=1), name="y")
    made = proto(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))
    assert perturbed(made, original, 0) is None
