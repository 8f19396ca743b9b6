import re
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from networks import Network, attention, cnn, images, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import WrongResult
from penstock.offline.compress.explained import check_explained, distance
from penstock.offline.compress.perturb import perturbed
from penstock.offline.compress.precision.dynamic import quantize_dynamic
from penstock.offline.compress.precision.half import halve_weights
from penstock.offline.compress.precision.weight_only import WeightOnlyOptions, quantize_weights
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
Edit = Callable[[onnx.ModelProto], None]


def rows(shape: tuple[int, ...], count: int = 48) -> Dataset:
    return make_dataset({"x": np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)}, None)


NETWORKS = {
    "cnn": (cnn(8), make_dataset({"x": images(48)}, None)),
    "mlp": (mlp(32), rows((16,))),
    "attention": (attention(16), rows((5, 16))),
}


def int8(artifact: Artifact, data: Dataset, placement=QdqPlacement.LINEAR, method=RangeMethod.MIN_MAX) -> Artifact:
    return quantize(artifact, ranges(collect(artifact, data), method, SCHEME), SCHEME, placement)


def edited(artifact: Artifact, edit: Edit) -> Artifact:
    proto = onnx.load_model_from_string(artifact.data)
    edit(proto)
    return Artifact.from_bytes(proto.SerializeToString())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("placement", QdqPlacement)
@pytest.mark.parametrize("method", RangeMethod)
def test_int8_is_explained(name, placement, method):
    artifact, data = NETWORKS[name]
    for found in check_explained(artifact, int8(artifact, data, placement, method), data):
        assert 0 < found.error <= found.bound < 1


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_fewer_bits_are_explained_without_data(bits):
    artifact = mlp(32)
    made = quantize_weights(artifact, None, WeightOnlyOptions(bits=bits, block_size=16, least_weights=1))
    assert all(0 < found.error <= found.bound for found in check_explained(artifact, made))


@pytest.mark.parametrize("make", [lambda a, d: halve_weights(a), quantize_dynamic, lambda a, d: prune(a)])
def test_other_methods_are_explained(make):
    artifact, data = mlp(64), rows((16,))
    check_explained(artifact, make(artifact, data), data)


def scaled_weight(proto: onnx.ModelProto) -> None:
    """Double the scales of one weight, as if a factor was applied twice."""
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    node = next(n for n in proto.graph.node if n.op_type == "DequantizeLinear" and len(weights[n.input[1]].dims) == 1)
    tensor = weights[node.input[1]]
    tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), tensor.name))


def forgotten_bias(proto: onnx.ModelProto) -> None:
    node = next(n for n in proto.graph.node if n.op_type in ("Conv", "Gemm") and len(n.input) > 2)
    del node.input[2:]


def lost_negatives(proto: onnx.ModelProto) -> None:
    """Clip an output at zero, as if its only reader was a Relu."""
    proto.graph.node.append(helper.make_node("Relu", [inner(proto)], ["y"]))


def other_parameter(place: int, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Dequantise the last activation with another scale (``place`` 1) or zero point (2) than it was quantised with."""

    def edit(proto: onnx.ModelProto) -> None:
        weights = {tensor.name: tensor for tensor in proto.graph.initializer}
        node = [n for n in proto.graph.node if n.op_type == "DequantizeLinear" and n.input[0] not in weights][-1]
        old = numpy_helper.to_array(weights[node.input[place]])
        node.input[place] = "other"
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(change(old), old.dtype), "other"))

    return edit


other_scale = other_parameter(1, lambda scale: scale * 1.5)
other_zero_point = other_parameter(2, lambda zero: zero + (zero < 128) * 16 - (zero >= 128) * 16)


def inner(proto: onnx.ModelProto) -> str:
    """The tensor that was the output, which gets another name."""
    node = next(node for node in proto.graph.node if node.output[0] == "y")
    node.output[0] = "inner"
    return "inner"


@pytest.mark.parametrize(
    ("name", "defect"),
    [
        ("cnn", scaled_weight),
        ("cnn", lost_negatives),
        ("cnn", other_scale),
        ("cnn", other_zero_point),
        ("mlp", scaled_weight),
        ("mlp", lost_negatives),
        ("mlp", forgotten_bias),
        ("mlp", other_scale),
        ("mlp", other_zero_point),
        ("attention", other_scale),
    ],
)
def test_a_defect_is_not_explained(name, defect):
    artifact, data = NETWORKS[name]
    made = edited(int8(artifact, data), defect)
    with pytest.raises(
        WrongResult, match=r"output 'y' .* on inputs x \[16, .*\], is off by .*%; rounding explains at most"
    ):
        check_explained(artifact, made, data)


def test_a_model_that_is_right_at_one_length_only_is_found():
    n = Network()
    n.op("MatMul", "x", n.normal(8, 8), name="y")
    artifact = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    data = rows((5, 8))

    def freeze(proto: onnx.ModelProto) -> None:
        """Cut all samples to the length of the data's."""
        graph = proto.graph
        for name, number in (("zero", 0), ("five", 5), ("one", 1)):
            graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
        graph.node.append(helper.make_node("Slice", [inner(proto), "zero", "five", "one"], ["y"]))

    check_explained(artifact, int8(artifact, data), data)
    with pytest.raises(WrongResult, match=r"on inputs x \[2, 17, 8\], has another type or shape"):
        check_explained(artifact, edited(int8(artifact, data), freeze), data)
    with pytest.raises(WrongResult, match="has another type or shape"):
        check_explained(artifact, edited(artifact, freeze))


def test_a_model_that_does_not_take_a_size_that_the_original_takes_is_found():
    artifact, data = NETWORKS["mlp"]

    def fix_batch(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(np.array([16, 4]), "all"))
        proto.graph.node.append(helper.make_node("Reshape", [inner(proto), "all"], ["y"]))

    with pytest.raises(WrongResult, match=r"does not run on inputs x \[1, 16\], but the original does"):
        check_explained(artifact, edited(artifact, fix_batch), data)


def test_a_model_that_does_not_load_is_found():
    artifact, data = NETWORKS["mlp"]
    with pytest.raises(WrongResult, match="does not load"):
        check_explained(artifact, edited(artifact, lambda proto: proto.graph.node.pop(0) and None), data)


def test_a_trained_model_may_have_any_finite_outputs():
    artifact, data = NETWORKS["mlp"]
    made = prune(artifact, PruneOptions(GlobalRule(0.9)))
    trained = artifact.derive(made.data, "recover", {}, {})
    check_explained(artifact, trained, data)

    def spoil(proto: onnx.ModelProto) -> None:
        tensor = proto.graph.initializer[0]
        tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), np.nan, np.float32), tensor.name))

    with pytest.raises(WrongResult, match="NaN or infinities"):
        check_explained(artifact, artifact.derive(edited(made, spoil).data, "recover", {}, {}), data)


def test_distance_of_what_is_no_float():
    assert distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    assert distance(np.array(["a"], object), np.array(["b"], object)) == 1.0
    assert distance(np.ones(2, np.float32), np.ones(2, np.float64)) == np.inf
    assert distance(np.ones((0, 2), np.float32), np.ones((0, 2), np.float32)) == 0.0


def test_distance_is_relative_to_the_original():
    assert distance(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == pytest.approx(0.2)
    assert distance(np.array([3.0, 4.0]), np.array([-3.0, -4.0])) == pytest.approx(2.0)
    assert distance(np.zeros(4), np.full(4, 0.1), 0.04) == pytest.approx(0.5)
    assert distance(np.ones(4), np.full(4, 1.1), 0.04) == pytest.approx(0.1)
    assert distance(np.zeros(4), np.zeros(4)) == 0.0


def test_distance_compares_what_is_finite():
    want = np.array([np.nan, np.inf, -np.inf, 2.0])
    assert distance(want, np.array([np.nan, np.inf, -np.inf, 3.0])) == pytest.approx(0.5)
    for place, other in ((0, 1.0), (1, -np.inf), (2, np.nan), (3, np.inf), (3, np.nan)):
        got = want.copy()
        got[place] = other
        assert distance(want, got) == np.inf
    assert distance(np.ones(3), np.ones((3, 1))) == np.inf


def lengthwise(error: float, other: float) -> tuple[Artifact, Artifact, Dataset]:
    """A model, another one that is off by ``error`` at length 5 and by ``other`` at other lengths, and data of length 5."""
    n = Network()
    n.op("Mul", "x", n.weight(np.float32(1)), name="y")
    original = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    n = Network()
    is_five = n.op("Equal", n.op("Shape", "x", start=1, end=2), n.weight(np.array([5])))
    factor = n.op("Where", is_five, n.weight(np.float32([1 + error])), n.weight(np.float32([1 + other])))
    n.op("Mul", "x", factor, name="y")
    signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (48, 5, 8))
    return original, n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]}), make_dataset({"x": signs}, None)


@pytest.mark.parametrize(("error", "other", "bound"), [(0.01, 0.49, 0.5), (0.1, 0.98, 1.0)])
def test_without_rounding_the_error_at_the_datas_sizes_bounds_that_at_others(error, other, bound):
    original, made, data = lengthwise(error, other)
    (found,) = check_explained(original, made, data)
    assert (found.error, found.bound) == (pytest.approx(other, rel=1e-3), pytest.approx(bound, rel=1e-3))
    assert found.sizes == "x [2, 1, 8]"
    original, made, data = lengthwise(error, bound + 0.02)
    with pytest.raises(WrongResult, match="its error at other sizes explains at most") as wrong:
        check_explained(original, made, data)
    assert f"is off by {bound + 0.02:.2%}" in wrong.value.message


def test_the_datas_own_size_has_no_bound_but_must_be_finite():
    original, made, data = lengthwise(30.0, 30.0)
    (found,) = check_explained(original, made, data)
    assert found.error == pytest.approx(30.0)
    with pytest.raises(WrongResult, match=r"on inputs x \[16, 5, 8\], has another type or shape, or NaN"):
        check_explained(original, lengthwise(np.inf, 0.0)[1], data)


@pytest.mark.parametrize("batch", [1, 4, 16, 24])
def test_a_model_of_a_fixed_batch_is_checked_too(batch):
    artifact, data = cnn(8, batch=batch), make_dataset({"x": images(48)}, None)
    made = int8(artifact, data)
    (found,) = check_explained(artifact, made, data)
    assert found.sizes == f"x [{batch}, 3, 12, 12]"
    with pytest.raises(WrongResult, match="rounding explains at most"):
        check_explained(artifact, edited(made, scaled_weight), data)


@pytest.mark.parametrize("defect", [None, lost_negatives])
def test_the_bound_is_four_times_the_change_of_two_or_ten_perturbations(defect):
    """A single size of inputs: other sizes would extend the bound."""
    artifact, data = cnn(8, batch=16), make_dataset({"x": images(16)}, None)
    made = int8(artifact, data)
    x = dict(data.inputs)

    def run(proto: onnx.ModelProto) -> np.ndarray:
        options = {"threads": 1, "graph_level": "disabled"}
        return OnnxRuntimeEngine().load(Artifact.from_bytes(proto.SerializeToString()), options).forward(x)["y"]

    original, compressed = (onnx.load_model_from_string(one.data) for one in (artifact, made))
    least = 1e-4 * float(np.square(run(original).astype(np.float64)).mean())
    changes = [distance(run(compressed), run(perturbed(compressed, original, draw)), least) for draw in range(10)]
    if defect is None:
        (found,) = check_explained(artifact, made, data)
        assert found.bound == pytest.approx(4 * max(changes[:2]) + 2e-3, rel=1e-3)
    else:
        with pytest.raises(WrongResult) as wrong:
            check_explained(artifact, edited(made, defect), data)
        negative = (
            np.maximum(run(compressed), 0),
            [np.maximum(run(perturbed(compressed, original, d)), 0) for d in range(10)],
        )
        bound = 4 * max(distance(negative[0], one, least) for one in negative[1]) + 2e-3
        assert f"rounding explains at most {bound:.2%}" in wrong.value.message


def wrong_at(*shape: int) -> Artifact:
    """A model that multiplies by four if the input has this shape, otherwise by one."""
    n = Network()
    same = n.op("Cast", n.op("Equal", n.op("Shape", "x"), n.weight(np.array(shape))), to=7)
    factor = n.op("Where", n.op("Cast", n.op("ReduceMin", same, keepdims=0), to=9), n.weight(np.float32(4)), "one")
    n.weights.append(numpy_helper.from_array(np.float32(1), "one"))
    n.op("Mul", "x", factor, name="y")
    return n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (3, 5), (2, 1), (2, 5), (2, 17)])
def test_an_error_at_any_of_the_sizes_is_found(batch, length):
    original, _, data = lengthwise(0.0, 0.0)
    with pytest.raises(WrongResult, match=rf"on inputs x \[{batch}, {length}, 8\], is off by 300"):
        check_explained(original, wrong_at(batch, length, 8), data)


@pytest.mark.parametrize(("axis", "sizes"), [(0, "[0, 5, 8]"), (1, "[1, 0, 8]")])
def test_a_model_that_fails_on_nothing_is_found(axis, sizes):
    original, _, data = lengthwise(0.0, 0.0)
    n = Network()
    one = n.op("Div", n.op("Shape", "x", start=axis, end=axis + 1), n.op("Shape", "x", start=axis, end=axis + 1))
    n.op("Mul", "x", n.op("Cast", one, to=1), name="y")
    made = n.artifact({"x": ["N", "L", 8]}, {"y": ["N", "L", 8]})
    with pytest.raises(WrongResult, match=f"does not run on inputs x {re.escape(sizes)}"):
        check_explained(original, made, data)


def test_a_model_that_ends_its_process_cannot_be_used():
    n = Network()
    n.op("Mul", "x", "x", name="y")
    original = n.artifact({"x": ["N", 3]}, {"y": ["N", 3]})
    n = Network()
    found = n.op("Cast", n.op("NonZero", "x"), to=1)
    square = n.op(
        "Mul", n.op("Unsqueeze", found, n.weight(np.array([2]))), n.op("Unsqueeze", found, n.weight(np.array([1])))
    )
    n.op("Einsum", square, square, name="y", equation="ia...,ja...->ij...")
    made = n.artifact({"x": ["N", 3]}, {"y": ["N", "P", "Q"]})
    zeros = make_dataset({"x": np.zeros((16, 3), np.float32)}, None)
    with pytest.raises(WrongResult, match="cannot be used: ONNX Runtime ends its process when it runs it"):
        check_explained(original, made, zeros)


def test_an_output_that_is_missing_is_found():
    n = Network()
    n.op("Mul", "x", "x", name="y")
    n.op("Neg", "x", name="z")
    original = n.artifact({"x": ["N", 8]}, {"y": ["N", 8], "z": ["N", 8]})
    made = edited(original, lambda proto: proto.graph.output.pop() and None)
    with pytest.raises(WrongResult, match="has no output 'z'"):
        check_explained(original, made, rows((8,)))


def test_the_largest_error_of_each_output_is_reported_with_its_sizes():
    original, made, data = lengthwise(0.3, 0.2)
    (found,) = check_explained(original, made, data)
    assert (found.output, found.sizes, found.error) == ("y", "x [16, 5, 8]", pytest.approx(0.3))
