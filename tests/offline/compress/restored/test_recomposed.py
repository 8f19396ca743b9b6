import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import WrongResult
from penstock.offline.compress.low_rank.convolution import SplitForm
from penstock.offline.compress.low_rank.factorize import Splitter
from penstock.offline.compress.low_rank.layers import layers, replace
from penstock.offline.compress.restored.recomposed import recomposed
from penstock.offline.compress.taps import Taps, no_progress
from penstock.offline.optimize.model import load_model, to_artifact
from penstock.offline.sessions import loaded

RANKS = {SplitForm.CHANNEL: (3,), SplitForm.SPATIAL: (5,), SplitForm.TUCKER: (4, 6)}


def network(kind: str) -> Artifact:
    n = Network()
    if kind == "conv":
        weight, bias = n.normal(8, 6, 3, 3, fan_in=27), n.normal(8)
        n.op("Conv", "x", weight, bias, name="y", strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2])
        return n.artifact({"x": ["N", 6, 9, 9]}, {"y": ["N", 8, 5, 7]})
    inputs, outputs = (12, 8) if kind == "narrow" else (8, 12)
    n.op("Gemm", "x", n.normal(outputs, inputs), n.normal(outputs), name="y", transB=1, alpha=0.5)
    return n.artifact({"x": ["N", inputs]}, {"y": ["N", outputs]})


def split(kind: str, form: SplitForm, aware: bool) -> tuple[Artifact, onnx.ModelProto, dict, np.ndarray]:
    original = network(kind)
    model = load_model(original)
    known = {layer.name: layer for layer in layers(model)}
    splitter = Splitter(known)
    with loaded(original) as running:
        shape = [64 if size == -1 else size for size in running.signature.inputs[0].shape]
    sizes = np.linspace(0.1, 2, shape[1], dtype=np.float32).reshape(-1, *(1 for _ in shape[2:]))
    data = 1 + np.random.default_rng(0).standard_normal(shape).astype(np.float32) * sizes
    if aware:
        splitter.observe(Taps(original, make_dataset({"x": data}, None)), no_progress)
    replace(known["y"], form, splitter.split("y", form, RANKS[form]))
    made = onnx.load_model_from_string(to_artifact(model).data)
    return original, made, {"y": {"form": form.value, "ranks": list(RANKS[form])}}, data


WAYS = [("conv", form) for form in SplitForm] + [("narrow", SplitForm.CHANNEL), ("wide", SplitForm.CHANNEL)]


def run(model: onnx.ModelProto, data: np.ndarray) -> np.ndarray:
    with loaded(Artifact.from_bytes(model.SerializeToString()), as_written=True) as running:
        return running.forward({"x": data})["y"]


@pytest.mark.parametrize(("kind", "form"), WAYS)
@pytest.mark.parametrize("aware", [False, True])
def test_the_product_of_the_factors_gives_the_same_answers(kind, form, aware):
    original, made, ways, data = split(kind, form, aware)
    found = recomposed(made, original, ways)
    assert len(found.graph.node) < len(made.graph.node)
    want = run(made, data)
    np.testing.assert_allclose(run(found, data), want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.abs(run(onnx.load_model_from_string(original.data), data) - want).max() > 1e-2


@pytest.mark.parametrize(("kind", "form"), WAYS)
@pytest.mark.parametrize("aware", [False, True])
def test_other_factors_and_biases_are_found(kind, form, aware):
    original, made, ways, _ = split(kind, form, aware)
    for tensor in made.graph.initializer:
        array = numpy_helper.to_array(tensor)
        wrong = [np.roll(array, 1, 0), 1.1 * array, 0 * array]
        if array.ndim > 1:
            wrong.append(np.concatenate([-array[:1], array[1:]]))
        for one in wrong:
            model = onnx.ModelProto()
            model.CopyFrom(made)
            place = next(other for other in model.graph.initializer if other.name == tensor.name)
            place.CopyFrom(numpy_helper.from_array(one.astype(np.float32), tensor.name))
            with pytest.raises(WrongResult, match="do not approximate its weight and bias"):
                recomposed(model, original, ways)


def test_a_lost_factor_is_found():
    original, made, ways, _ = split("wide", SplitForm.CHANNEL, aware=False)
    made.graph.node[0].name = "other"
    with pytest.raises(WrongResult, match="lacks a factor of layer 'y'"):
        recomposed(made, original, ways)


def test_what_the_factors_do_to_places_remains_a_difference():
    original, made, ways, data = split("conv", SplitForm.SPATIAL, aware=False)
    strides = next(one for one in made.graph.node[0].attribute if one.name == "dilations")
    strides.ints[:] = [2, 1]
    pads = next(one for one in made.graph.node[0].attribute if one.name == "pads")
    pads.ints[:] = [2, 0, 2, 0]
    want = run(made, data)
    assert np.abs(run(recomposed(made, original, ways), data) - want).max() > 1e-2


def matrix(weight: np.ndarray, factors: list[np.ndarray], bias: np.ndarray | None, shifted: np.ndarray | None) -> bool:
    """True if ``factors``, applied in turn to rows, and the bias ``shifted`` are accepted for a product with ``weight``."""

    def model(arrays: list[np.ndarray], last: np.ndarray | None, names: list[str]) -> Artifact:
        n, x = Network(), "x"
        for name, array in zip(names, arrays, strict=True):
            ends = [n.weight(last.astype(np.float32))] if last is not None and name == names[-1] else []
            x = n.op("MatMul" if not ends else "Gemm", x, n.weight(array.astype(np.float32)), *ends, name=name)
            n.nodes[-1].name = name
        return n.artifact({"x": ["N", len(arrays[0])]}, {x: ["N", arrays[-1].shape[1]]})

    original = model([weight], bias, ["y"])
    made = onnx.load_model_from_string(model(factors, shifted, ["y_factor0", "y_factor1"]).data)
    try:
        found = recomposed(made, original, {"y": {"form": "channel", "ranks": [factors[0].shape[1]]}})
    except WrongResult:
        return False
    (array,) = (numpy_helper.to_array(one) for one in found.graph.initializer if len(one.dims) == 2)
    np.testing.assert_allclose(array, factors[0] @ factors[1], rtol=1e-4, atol=1e-6 * np.abs(weight).max())
    return True


def orthogonal(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0]


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_is_accepted_does_not_depend_on_the_size(size, has_bias):
    """``weight`` is a sum of three products of vectors. The factors keep the largest two, or others."""
    left, right, large = orthogonal(6, 3, 0), orthogonal(5, 3, 1), size * np.array([4.0, 2.0, 1.0])
    weight = left * large @ right.T
    bias = size * np.arange(1.0, 6.0) if has_bias else None
    best = [left[:, :2] * large[:2], right[:, :2].T]
    inside, outside = size * right[:, 0], size * right[:, 2]
    assert matrix(weight, best, bias, bias)
    assert not matrix(weight, [1.01 * best[0], best[1]], bias, bias)
    assert not matrix(weight, [best[0], best[1] + 0.01 * right[:, 2:].T], bias, bias)
    if bias is not None:
        assert matrix(weight, best, bias, bias + outside)
        assert not matrix(weight, best, bias, bias + 0.01 * inside)
        assert not matrix(weight, best, bias, bias + outside + 0.01 * inside)


@pytest.mark.parametrize("rank", [2, 3])
def test_factors_of_a_lower_rank_are_right_for_a_weight_of_that_rank(rank):
    left, right = orthogonal(6, 3, 0), orthogonal(5, 3, 1)
    weight = left[:, :rank] @ right[:, :rank].T
    pairs = [left[:, :2], right[:, :2]]
    for more in ([left[:, 2], np.zeros(5)], [np.zeros(6), right[:, 1]]):
        before, after = (np.column_stack(pair) for pair in zip(pairs, more, strict=True))
        factors = [before, after.T]
        assert matrix(weight, factors, None, None) == (rank == 2)


def test_factors_of_zeros_are_right_for_a_weight_of_zeros():
    zeros = np.zeros((6, 5))
    assert matrix(zeros, [np.zeros((6, 2)), np.zeros((2, 5))], None, None)
    assert not matrix(zeros + 1, [np.zeros((6, 2)), np.zeros((2, 5))], None, None)


def test_factors_of_another_shape_are_found():
    assert not matrix(np.ones((6, 5)), [np.ones((6, 2)), np.ones((2, 4))], None, None)


def test_a_factor_that_is_no_constant_is_found():
    original, made, ways, _ = split("wide", SplitForm.CHANNEL, aware=False)
    made.graph.node[0].input[1] = "computed"
    with pytest.raises(WrongResult, match="lacks a factor of layer 'y'"):
        recomposed(made, original, ways)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_three_factors_may_have_any_size(size):
    original, made, ways, _ = split("conv", SplitForm.TUCKER, aware=True)
    before = onnx.load_model_from_string(original.data)
    for graph in (before.graph, made.graph):
        sized = [graph.node[-1].input[place] for place in (1, 2)]  # the last factor and the bias
        for tensor in graph.initializer:
            if tensor.name in sized:
                array = numpy_helper.to_array(tensor) * np.float32(size)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    original = Artifact.from_bytes(before.SerializeToString())
    recomposed(made, original, ways)
    core = next(one for one in made.graph.initializer if one.name == made.graph.node[1].input[1])
    right = numpy_helper.to_array(core)
    wrong = [1.1 * right, np.zeros_like(right)]
    for one in wrong:
        core.CopyFrom(numpy_helper.from_array(one.astype(np.float32), core.name))
        with pytest.raises(WrongResult):
            recomposed(made, original, ways)


def test_a_first_factor_of_zeros_is_found():
    original, made, ways, _ = split("conv", SplitForm.TUCKER, aware=False)
    for tensor in made.graph.initializer:
        if tensor.name == made.graph.node[0].input[1]:
            tensor.CopyFrom(numpy_helper.from_array(0 * numpy_helper.to_array(tensor), tensor.name))
    with pytest.raises(WrongResult):
        recomposed(made, original, ways)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_three_factors_may_share_their_size_in_any_way(size):
    original, made, ways, _ = split("conv", SplitForm.TUCKER, aware=True)
    sizes = {made.graph.node[0].input[1]: size, made.graph.node[2].input[1]: 1 / size}
    for tensor in made.graph.initializer:
        array = numpy_helper.to_array(tensor) * np.float32(sizes.get(tensor.name, 1))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    recomposed(made, original, ways)
