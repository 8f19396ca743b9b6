"""Every defect below changes a single number or connection of a model whose error stays far below that of rounding."""

import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import WrongResult
from penstock.offline.compress.precision.dynamic import DynamicOptions, quantize_dynamic
from penstock.offline.compress.precision.half import HalfOptions, halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.restored.unrounded import constants, unrounded, with_float_products
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

SCHEMES = [
    IntegerScheme(DataType.UINT8, DataType.INT8, True, "test"),
    IntegerScheme(DataType.INT8, DataType.INT8, False, "test"),
]
NETWORKS: dict[str, tuple[Artifact, Dataset]] = {
    "cnn": (cnn(8), make_dataset({"x": images(16)}, None)),
    "mlp": (mlp(32), make_dataset({"x": np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)}, None)),
    "attention": (
        attention(16),
        make_dataset({"x": np.random.default_rng(0).standard_normal((16, 5, 16)).astype(np.float32)}, None),
    ),
}
WEIGHTS: dict[str, Callable[[Artifact], Artifact]] = {
    "dynamic": lambda a: quantize_dynamic(a, NETWORKS["mlp"][1], DynamicOptions(least_weights=1)),
    "int8": lambda a: quantize_weights(a, None, WeightOnlyOptions(8, 16, least_weights=1)),
    "int4": lambda a: quantize_weights(a, None, WeightOnlyOptions(4, 16, least_weights=1)),
    "fp16": lambda a: halve_weights(a, HalfOptions("fp16", least_weights=1)),
    "bf16": lambda a: halve_weights(a, HalfOptions("bf16", least_weights=1)),
}


def int8(name: str, placement=QdqPlacement.LINEAR, scheme=SCHEMES[0]) -> Artifact:
    artifact, data = NETWORKS[name]
    return quantize(artifact, ranges(collect(artifact, data), RangeMethod.MIN_MAX, scheme), scheme, placement)


def proto(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load_model_from_string(artifact.data)


def run(model: onnx.ModelProto, name: str) -> np.ndarray:
    with loaded(Artifact.from_bytes(model.SerializeToString()), as_written=True) as running:
        return running.forward(dict(NETWORKS[name][1].inputs))["y"]


def tensor_of(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def put(model: onnx.ModelProto, name: str, array: np.ndarray) -> None:
    tensor_of(model, name).CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), name))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_int8_without_rounding_gives_the_answers_of_the_original(name, placement, scheme):
    made, original = proto(int8(name, placement, scheme)), NETWORKS[name][0]
    found = unrounded(made, original)
    assert not {node.op_type for node in found.graph.node} & {"QuantizeLinear", "DequantizeLinear"}
    want = run(proto(original), name)
    np.testing.assert_allclose(run(found, name), want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("method", WEIGHTS)
def test_weights_of_any_type_are_put_back(method):
    original = NETWORKS["mlp"][0]
    want = run(proto(original), "mlp")
    found = run(unrounded(proto(WEIGHTS[method](original)), original), "mlp")
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def _off_by_one(array: np.ndarray, place: int) -> np.ndarray:
    """``array`` with the number at ``place`` moved to its neighbour."""
    flat = np.array(array).reshape(-1)
    if array.dtype.itemsize == 2:
        flat.view(np.uint16)[place] += 1
    else:
        flat[place] += np.where(flat[place] == np.iinfo(array.dtype).max, -1, 1).astype(array.dtype)
    return flat.reshape(array.shape)


@pytest.mark.parametrize("method", ["linear", *WEIGHTS])
def test_an_integer_that_is_off_by_one_is_found(method):
    original = NETWORKS["mlp"][0]
    made = proto(int8("mlp") if method == "linear" else WEIGHTS[method](original))
    names = [
        tensor.name
        for tensor in made.graph.initializer
        if tensor.data_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.INT64) and len(tensor.dims) > 1
    ]
    assert len(names) == 3
    rng = np.random.default_rng(0)
    for name in names:
        array = numpy_helper.to_array(tensor_of(made, name))
        # Any larger weight rounds to an integer at a limit.
        is_inner = (array != array.max()) & (array != array.min())
        inner = np.flatnonzero(is_inner) if array.dtype.itemsize == 1 else np.arange(array.size)
        for place in rng.choice(inner, 5):
            wrong = proto(Artifact.from_bytes(made.SerializeToString()))
            put(wrong, name, _off_by_one(array, place))
            with pytest.raises(WrongResult, match="is no rounded weight of the original"):
                unrounded(wrong, original)


def test_a_bias_that_is_off_by_a_step_is_found():
    made = proto(int8("cnn"))
    biases = [tensor for tensor in made.graph.initializer if tensor.data_type == onnx.TensorProto.INT32]
    put(made, biases[0].name, numpy_helper.to_array(biases[0]) + np.int32(1))
    with pytest.raises(WrongResult, match=f"weight '{biases[0].name}' .* is no rounded weight"):
        unrounded(made, NETWORKS["cnn"][0])


@pytest.mark.parametrize("place", [1, 2])
def test_another_scale_or_zero_point_than_that_of_rounding_is_found(place):
    made = proto(int8("mlp"))
    weights = {tensor.name for tensor in made.graph.initializer}
    node = next(one for one in made.graph.node if one.op_type == "DequantizeLinear" and one.input[0] not in weights)
    other = numpy_helper.to_array(tensor_of(made, node.input[place]))
    other = np.asarray(other + (1 if place == 2 else 1e-6), other.dtype)
    made.graph.initializer.append(numpy_helper.from_array(other, "other"))
    node.input[place] = "other"
    with pytest.raises(WrongResult, match="is quantised and dequantised differently"):
        unrounded(made, NETWORKS["mlp"][0])


def test_a_range_that_does_not_replace_its_relu_is_found():
    made = proto(int8("cnn"))
    zeros = [one for one in made.graph.initializer if one.name.endswith("_zero_point") and not len(one.dims)]
    absorbed = [one for one in zeros if one.data_type == onnx.TensorProto.UINT8 and not numpy_helper.to_array(one)]
    assert absorbed
    put(made, absorbed[0].name, np.array(1, np.uint8))
    with pytest.raises(WrongResult, match="exceeds the bounds of Relu"):
        unrounded(made, NETWORKS["cnn"][0])


def test_a_connection_remains_in_the_result():
    """A lost bias is not found here but changes the answers."""
    made, original = proto(int8("cnn")), NETWORKS["cnn"][0]
    node = next(one for one in made.graph.node if one.op_type == "Conv")
    del node.input[2:]
    want = run(proto(original), "cnn")
    assert np.abs(run(unrounded(made, original), "cnn") - want).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_of_the_original_stay(dtype):
    n = Network()
    x = n.op("MatMul", "x", n.op("Cast", n.weight(np.full((16, 16), 0.5).astype(dtype)), to=1))
    n.op("MatMul", x, n.normal(16, 16), name="y")
    original = n.artifact({"x": ["N", 16]}, {"y": ["N", 16]})
    found = unrounded(proto(halve_weights(original, HalfOptions("fp16", least_weights=1))), original)
    assert [node.op_type for node in found.graph.node] == ["Cast", "MatMul", "MatMul"]


def test_of_constants_that_were_clipped_the_nearest_is_put_back():
    """A constant that is quantised like an activation fills its range, so any larger one would be clipped to its integers."""
    n = Network()
    x = n.op("MatMul", "x", n.normal(8, 8))
    x = n.op("Mul", n.op("Add", x, n.weight(np.float32(30))), n.weight(np.float32(3)))
    n.op("MatMul", x, n.normal(8, 8), name="y")
    original = n.artifact({"x": ["N", 8]}, {"y": ["N", 8]})
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)}, None)
    found = ranges(collect(original, data), RangeMethod.MIN_MAX, SCHEMES[0])
    made = unrounded(proto(quantize(original, found, SCHEMES[0], QdqPlacement.WIDE)), original)
    scalars = [numpy_helper.to_array(one) for one in made.graph.initializer if not len(one.dims)]
    assert scalars == [30, 3]


def test_products_with_blocks_are_made_float_to_be_compared():
    made = WEIGHTS["int8"](NETWORKS["mlp"][0])
    nodes = [node for node in proto(with_float_products(made)).graph.node if node.op_type == "MatMulNBits"]
    assert [one.i for node in nodes for one in node.attribute if one.name == "accuracy_level"] == [1, 1, 1]
    assert with_float_products(NETWORKS["mlp"][0]) is NETWORKS["mlp"][0]


def written(body: str, outputs: str = "float[N, 3] y", inputs: str = "float[N, 4] x", **weights) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]>\nagraph ({inputs}) => ({outputs}) {{ {body} }}'
    )
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return made


def source(body: str, outputs: str = "float[N, 3] y", **weights) -> Artifact:
    return Artifact.from_bytes(written(body, outputs, **weights).SerializeToString())


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_constants_are_initialisers_and_values_of_constant_nodes():
    made = written(
        "a = Constant<value = float {2.0}>()\n b = Constant<value_float = 3.0>()\n y = ConstantOfShape<value = float[1] {4.0}>(s)",
        s=np.array([1, 3]),
    )
    assert [array.tolist() for array in constants(made.graph)] == [[1, 3], 2.0]


WEIGHT = np.float32([[7, -2, 3], [4, 5, -6], [-1, 1, 8], [2, 6, 3]]) / 8
PRODUCT = source("y = MatMul(x, w)", w=WEIGHT)


@pytest.mark.parametrize("scale", [1 / 64, [1 / 64], [1 / 128, 1 / 128, 1 / 64]])
@pytest.mark.parametrize("zero", [None, 3])
def test_a_weight_is_put_back_from_any_form_of_dequantisation(scale, zero):
    scale = np.float32(scale)
    integers = (np.round(WEIGHT / scale) + (zero or 0)).astype(np.int8)
    given = {} if zero is None else {"z": np.full(scale.shape, zero, np.int8)}
    body = f"d = DequantizeLinear({', '.join(['q', 's', *given])})\n y = MatMul(x, d)"
    found = unrounded(written(body, q=integers, s=scale, **given), PRODUCT)
    assert operators(found) == ["MatMul"]
    assert (numpy_helper.to_array(found.graph.initializer[0]) == WEIGHT).all()
    integers[3, 2] += 1
    with pytest.raises(WrongResult, match="weight 'q' .* is no rounded weight"):
        unrounded(written(body, q=integers, s=scale, **given), PRODUCT)


def test_two_channels_have_their_own_scales_along_any_axis():
    for axis, shape in ((0, (2, 3)), (1, (3, 2)), (-2, (2, 3))):
        turned = (2, 1) if axis in (0, -2) else (1, 2)
        weight = np.arange(6, dtype=np.float32).reshape(shape) * np.float32([1, 4]).reshape(turned)
        scale = np.float32([weight[0, 2] / 64 if axis != 1 else weight[2, 0] / 64, 0.25])
        along = scale.reshape(turned)
        made = written(
            f"d = DequantizeLinear<axis = {axis}>(q, s)\n y = Add(x, d)",
            q=(weight / along).astype(np.int8),
            s=scale,
        )
        found = unrounded(made, source("y = Add(x, w)", w=weight))
        assert (numpy_helper.to_array(found.graph.initializer[0]) == weight).all()


ADDED = "d = DequantizeLinear<axis = 1>(q, s)\n y = MatMul(x, d)"
GEMM = "d = DequantizeLinear<axis = 1>(q, s)\n e = DequantizeLinear<axis = 0>(b, t)\n y = Gemm(x, d, e)"


@pytest.mark.parametrize(("largest", "is_found"), [(127, False), (63, False), (62, True), (1, True), (0, True)])
def test_a_scale_that_wastes_half_of_the_levels_is_found(largest, is_found):
    size = np.abs(WEIGHT).max(axis=0)
    scale = size / 127
    scale[1] = size[1] / (largest + 0.1)
    integers = np.round(WEIGHT / scale).astype(np.int8)
    sums = DYNAMIC + SUMS.format(zero="") + ENDS.format(scale="s")
    for made in (written(ADDED, q=integers, s=scale), written(sums, w=integers, t=scale)):
        if is_found:
            with pytest.raises(WrongResult, match="steps of weight '[qw]' .* are too large for its values"):
                unrounded(made, PRODUCT)
        else:
            unrounded(made, PRODUCT)


def test_a_channel_may_be_zero():
    weight = WEIGHT * np.float32([1, 0, 1])
    scale = np.float32([1 / 128, 1, 1 / 64])
    integers = np.round(weight / scale).astype(np.int8)
    assert operators(unrounded(written(ADDED, q=integers, s=scale), source("y = MatMul(x, w)", w=weight))) == ["MatMul"]


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("steps", "is_found"), [(2**30, False), (2**29, False), (2**29 - 1, True)])
def test_a_large_bias_may_require_a_large_scale(steps, is_found, per_channel):
    scale = np.float32([1 / 128, 1, 1 / 64]) if per_channel else np.float32([1])
    integers = np.round(WEIGHT / scale).astype(np.int8)
    bias = np.array([5, steps, 7], np.int32)
    floats = (bias * scale.astype(np.float64)).astype(np.float32)
    body = GEMM if per_channel else GEMM.replace("<axis = 1>", "").replace("<axis = 0>", "")
    made = written(body, q=integers, s=scale, b=bias, t=scale)
    original = source("y = Gemm(x, w, c)", w=WEIGHT, c=floats)
    if is_found:
        with pytest.raises(WrongResult, match="steps of weight 'q'"):
            unrounded(made, original)
    else:
        assert operators(unrounded(made, original)) == ["Gemm"]


def test_large_integers_are_compared_exactly():
    weight = np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32)
    scale = np.float32(3e-9)
    integers = np.round(weight.astype(np.float64) / scale).astype(np.int32)
    original, body = source("y = Add(x, w)", w=weight), "d = DequantizeLinear(q, s)\n y = Add(x, d)"
    assert operators(unrounded(written(body, q=integers, s=scale), original)) == ["Add"]
    with pytest.raises(WrongResult):
        unrounded(written(body, q=integers + np.int32(1), s=scale), original)


ROUND = "q = QuantizeLinear(x, s, z)\n y = DequantizeLinear(q, {s}, {z})"
SCALE, ZERO = np.float32(0.125), np.uint8(8)
"""From -1 to 30.875."""


@pytest.mark.parametrize(
    ("activation", "zero", "size", "fits"),
    [
        ("Clip(x, low, high)", 8, 1.0, True),
        ("Clip(x, low, high)", 10, 1.0, False),
        ("Clip(x, low, high)", 6, 1.0, False),
        ("Clip(x, low, high)", 8, 1.01, False),
        ("Clip(x, low, high)", 8, 0.99, True),
        ("Clip(x, , high)", 8, 1.0, True),
        ("Clip(x, , high)", 6, 1.0, False),
        ("Clip(x, low)", 6, 1.0, True),
        ("Clip(x, low)", 10, 1.0, False),
        ("Relu(x)", 0, 1.0, True),
        ("Relu(x)", 0, 9.0, True),
        ("Relu(x)", 2, 1.0, False),
        ("Sigmoid(x)", 8, 1.0, None),
    ],
)
def test_only_the_activation_that_a_range_replaces_is_put_back(activation, zero, size, fits):
    activation = activation.replace("(x, ,", '(x, "",')
    ends = {"low": np.float32(-1), "high": np.float32(30.875)}
    original = source(f"y = {activation}", **{name: end for name, end in ends.items() if name in activation})
    made = written(ROUND.format(s="s", z="z"), s=size * SCALE, z=np.uint8(zero))
    if fits is False:
        with pytest.raises(WrongResult, match="exceeds the bounds of"):
            unrounded(made, original)
        return
    found = unrounded(made, original)
    # Another operator is not replaced, so it is lost.
    assert operators(found) == ([activation.split("(")[0]] if fits else ["Identity"])
    if fits:
        assert list(found.graph.node[0].input) == list(onnx.load_model_from_string(original.data).graph.node[0].input)
        onnx.checker.check_model(found)


@pytest.mark.parametrize(
    ("s", "z", "fits"), [("s", "z", True), ("s2", "z2", True), ("s3", "z", False), ("s", "z3", False)]
)
def test_a_tensor_is_restored_with_the_values_that_rounded_it(s, z, fits):
    values = {"s": SCALE, "z": ZERO, "s2": SCALE, "z2": ZERO, "s3": 2 * SCALE, "z3": np.uint8(9)}
    made = written(ROUND.format(s=s, z=z), **values)
    if fits:
        assert operators(unrounded(made, source("y = Neg(x)"))) == ["Identity"]
    else:
        with pytest.raises(WrongResult, match="is quantised and dequantised differently"):
            unrounded(made, source("y = Neg(x)"))


def test_a_zero_point_is_in_both_or_neither():
    made = written("q = QuantizeLinear(x, s, z)\n y = DequantizeLinear(q, s)", s=SCALE, z=ZERO)
    with pytest.raises(WrongResult, match="is quantised and dequantised differently"):
        unrounded(made, source("y = Neg(x)"))


def test_computed_parameters_are_the_same_if_they_have_one_name():
    made = written("s = Abs(k)\n z = Abs(l)\n" + ROUND.format(s="s", z="z"), k=SCALE, l=ZERO)
    assert "Identity" in operators(unrounded(made, source("y = Neg(x)")))


def test_what_was_not_rounded_from_floats_stays():
    for first in ("", "q = Identity(k)\n"):
        given = "k" if first else "q"
        made = written(f"{first} y = DequantizeLinear(q, s, z)", inputs=f"uint8[N, 3] {given}", s=SCALE, z=ZERO)
        assert operators(unrounded(made, source("y = Neg(x)")))[-1] == "DequantizeLinear"
    made = written(ROUND.format(s="s", z="z"), "float[N, 3] y, uint8[N, 3] q", s=SCALE, z=ZERO)
    assert operators(unrounded(made, source("y = Neg(x)"))) == ["QuantizeLinear", "Identity"]


def test_casts_of_integers_stay_and_weights_beyond_fp16_are_no_halves():
    halves, large = WEIGHT.astype(np.float16), WEIGHT * np.float32(1e6)
    original = source("a = MatMul(x, v)\n b = MatMul(x, w)\n y = Add(a, b)", v=large, w=WEIGHT)
    made = written(
        "h = Cast<to = 1>(w)\n i = Cast<to = 1>(k)\n a = MatMul(x, v)\n b = MatMul(x, h)\n c = Add(a, i)\n y = Add(c, b)",
        v=large,
        w=halves,
        k=np.array([1, 2, 3]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = unrounded(made, original)
    assert operators(found) == ["Cast", "MatMul", "MatMul", "Add", "Add"]


def blocks(method: str, weight: np.ndarray, transposed: bool = False) -> tuple[Artifact, onnx.ModelProto]:
    n = Network()
    n.op("Gemm", "x", n.weight(weight.T.copy() if transposed else weight), name="y", transB=int(transposed))
    original = n.artifact({"x": ["N", len(weight)]}, {"y": ["N", weight.shape[1]]})
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((16, len(weight))).astype(np.float32)}, None)
    if method == "dynamic":
        return original, proto(quantize_dynamic(original, data, DynamicOptions(least_weights=1)))
    return original, proto(WEIGHTS[method](original))


ODD = np.random.default_rng(5).standard_normal((21, 6)).astype(np.float32)
"""Not a multiple of the block."""


@pytest.mark.parametrize("method", ["dynamic", "int8", "int4"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_any_length_and_order_are_put_back(method, transposed):
    original, made = blocks(method, ODD, transposed)
    found = unrounded(made, original)
    weights = [numpy_helper.to_array(one) for one in found.graph.initializer if len(one.dims) == 2]
    # A dynamic product has the scale of its weight outside.
    scale = np.abs(ODD).max(axis=0) / 127 if method == "dynamic" else 1
    ratios = weights[0] / (ODD / scale)
    np.testing.assert_allclose(ratios, np.broadcast_to(ratios[0], ODD.shape), rtol=1e-5)
    packed = next(one for one in made.graph.initializer if one.data_type in (2, 3) and len(one.dims) > 1)
    put(made, packed.name, np.roll(numpy_helper.to_array(packed), 1, 0))
    with pytest.raises(WrongResult, match=f"weight '{packed.name}'"):
        unrounded(made, original)


@pytest.mark.parametrize("size", [1 / 16, 16])
def test_a_block_of_scale_zero_holds_zeros_only(size):
    weight = ODD * np.float32(size)
    weight[:16, 0] = 0
    original, made = blocks("int8", weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "MatMul" in operators(unrounded(made, original))
    node = next(node for node in made.graph.node if node.op_type == "MatMulNBits")
    packed, scales = (numpy_helper.to_array(tensor_of(made, name)).copy() for name in node.input[1:3])
    packed.reshape(6, 2, 16)[1, 0], scales.reshape(6, 2)[1, 0] = 128, 0
    put(made, node.input[1], packed)
    put(made, node.input[2], scales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WrongResult, match="is no rounded weight"):
            unrounded(made, original)


DYNAMIC = "q, s, z = DynamicQuantizeLinear(x)\n"
SUMS = "i = MatMulInteger(q, w, z{zero})\n"
ENDS = "f = Cast<to = 1>(i)\n b = Mul({scale}, t)\n y = Mul(f, b)"


@pytest.mark.parametrize("zero", [None, 0, 3])
def test_an_integer_product_may_have_a_zero_point(zero):
    given = {} if zero is None else {"v": np.int8(zero)}
    body = DYNAMIC + SUMS.format(zero=", v" if given else "") + ENDS.format(scale="s")
    integers = (WEIGHT * 64).astype(np.int8) + np.int8(zero or 0)
    found = unrounded(written(body, w=integers, t=np.float32([1 / 64]), **given), PRODUCT)
    assert operators(found) == ["DynamicQuantizeLinear", "Div", "MatMul", "Cast", "Mul", "Mul"]
    (weight,) = (numpy_helper.to_array(one) for one in found.graph.initializer if len(one.dims) == 2)
    assert (weight == 64 * WEIGHT).all()


@pytest.mark.parametrize(
    "body",
    [
        "other = Abs(o)\n" + DYNAMIC + SUMS.format(zero="") + ENDS.format(scale="other"),
        DYNAMIC + "i = MatMulInteger(q, w, o)\n" + ENDS.format(scale="s"),
        DYNAMIC + SUMS.format(zero="") + "y = Cast<to = 1>(i)",
        DYNAMIC + SUMS.format(zero="") + "f = Cast<to = 1>(i)\n y = Neg(f)",
    ],
)
def test_an_integer_product_has_the_parameters_of_its_input(body):
    other = np.uint8(1) if "w, o" in body else np.float32(1)
    made = written(body, w=(WEIGHT * 8).astype(np.int8), t=np.float32([1 / 8]), o=other)
    with pytest.raises(WrongResult):
        unrounded(made, PRODUCT)


@pytest.mark.parametrize(
    "body",
    [
        "i = MatMulInteger(x, w)\n" + "f = Cast<to = 1>(i)\n y = Mul(f, t)",
        "q = Cast<to = 2>(x)\n s = Abs(t)\n" + "i = MatMulInteger(q, w)\n" + ENDS.format(scale="s"),
        DYNAMIC + SUMS.format(zero="") + "f = Cast<to = 1>(i)\n y = Mul(f, s)\n u = Neg(t)",
        DYNAMIC + SUMS.format(zero="") + "f = Cast<to = 1>(i)\n b = Mul(s, s)\n y = Mul(f, b)",
    ],
)
def test_other_integer_products_stay(body):
    inputs = "uint8[N, 4] x" if body.startswith("i") else "float[N, 4] x"
    made = written(body, inputs=inputs, w=(WEIGHT * 8).astype(np.int8), t=np.float32([1 / 8]))
    assert "MatMulInteger" in operators(unrounded(made, PRODUCT))


@pytest.mark.parametrize(
    ("way", "suffix"), [("dynamic", "weight"), ("dynamic", "exact"), ("int8", "weight"), ("int4", "weight")]
)
def test_names_of_restored_weights_are_unused(way: str, suffix: str) -> None:
    """A tensor of the original may have the name that the restored weight would get."""
    original = proto(NETWORKS["mlp"][0])
    plain = proto(WEIGHTS[way](NETWORKS["mlp"][0]))
    taken = [f"{name}_{suffix}" for node in plain.graph.node for name in node.output]
    value = np.ones(1, np.float32)
    for name in taken:
        original.graph.initializer.append(numpy_helper.from_array(value, name))
    last = original.graph.output[0].name
    for node in original.graph.node:
        node.output[:] = ["before" if name == last else name for name in node.output]
    names = ["before", *(f"scaled{number}" for number in range(len(taken) - 1)), last]
    for name, before, after in zip(taken, names, names[1:], strict=False):
        original.graph.node.append(onnx.helper.make_node("Mul", [before, name], [after]))
    source = Artifact.from_bytes(original.SerializeToString())
    found = unrounded(proto(WEIGHTS[way](source)), source)
    np.testing.assert_allclose(run(found, "mlp"), run(original, "mlp"), rtol=1e-4, atol=1e-5)
