"""ConvTranspose in INT8: exact integers in every engine, and float where no engine has a correct integer kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import available_engines
from penstock.errors import Unsupported
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.keep_float import keep_float
from penstock.offline.compress.precision.storage import StorageOptions, store_weights
from penstock.offline.compress.ptq.bias_correction import correct_biases
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.versions.layouts import make_layouts
from penstock.offline.look.cost import cost
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

SCHEME = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
ENGINES = [name for name in ("onnxruntime", "openvino") if name in available_engines()]


def layer(
    weight: Array, bias: Array | None, size: tuple[int, ...], before: str = "Relu", **attributes: Any
) -> Artifact:
    """x (N, I, …) through ``before`` and one ConvTranspose to y."""
    n = Network()
    operands = [n.weight(array) for array in (weight, bias) if array is not None]
    n.op("ConvTranspose", n.op(before, "x"), *operands, name="y", **attributes)
    return n.artifact({"x": ["N", *size]}, {"y": [f"d{axis}" for axis in range(weight.ndim)]})


def run(model: Artifact, x: Array, engine: str = "onnxruntime") -> Array:
    with loaded(model, engine=engine) as running:
        return running.forward({"x": x})["y"].astype(np.float64)


def int8(model: Artifact, x: Array, placement: QdqPlacement = QdqPlacement.LINEAR, **names: Any) -> Artifact:
    return quantize(model, ranges(collect(model, {"x": x}), RangeMethod.MIN_MAX, SCHEME), SCHEME, placement, **names)


def operators(model: Artifact) -> list[tuple[str, list[onnx.AttributeProto]]]:
    """The operators and attributes, without rounding."""
    rounding = ("QuantizeLinear", "DequantizeLinear")
    nodes = onnx.load_model_from_string(model.data).graph.node
    return [(node.op_type, list(node.attribute)) for node in nodes if node.op_type not in rounding]


def constants(model: Artifact) -> dict[str, Array]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load_model_from_string(model.data).graph.initializer}


@st.composite
def layers(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, ...], bool, int]:
    """The shape of the weight, the attributes, the size of a sample, if there is a bias, and a seed."""
    rank = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))  # noqa: E731
    kernel, strides, dilations = each(1, 4), each(1, 3), each(1, 2)
    groups = draw(st.sampled_from([1, 1, 1, 2]))
    inputs, outputs = draw(st.integers(1, 9)) * groups, draw(st.integers(1, 9))
    reach = [(size - 1) * dilation for size, dilation in zip(kernel, dilations, strict=True)]
    pads = [draw(st.integers(0, min(2, most))) for most in reach * 2]
    more = [draw(st.integers(0, stride - 1)) for stride in strides]
    sizes = each(3, 6)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": more, "group": groups}
    return (inputs, outputs, *kernel), attributes, (inputs, *sizes), draw(st.booleans()), draw(st.integers(0, 99))


@settings(max_examples=40, deadline=None)
@given(layers())
def test_the_error_is_at_most_that_of_rounding(given: tuple[Any, ...]) -> None:
    shape, attributes, size, has_bias, seed = given
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape).astype(np.float32)
    bias = rng.standard_normal(shape[1] * attributes["group"]).astype(np.float32) if has_bias else None
    model, x = layer(weight, bias, size, **attributes), rng.standard_normal((4, *size)).astype(np.float32)
    fits = attributes["group"] == 1 and min(max(attributes["strides"]), max(attributes["dilations"])) == 1
    ends = attributes["pads"][len(shape) - 2 :]
    fits = fits and all(more <= end for more, end in zip(attributes["output_padding"], ends, strict=True))
    if not fits:
        with pytest.raises(Unsupported, match="no operator to quantise"):
            int8(model, x)
        return
    made = int8(model, x)
    assert operators(made) == operators(model)
    check_explained(model, made, make_dataset({"x": x}, None))
    assert constants(made)["w0_scale"].shape == shape[1:2]
    assert constants(made)["w0_quantized"].dtype == np.int8
    step, steps = constants(made)["relu0_scale"], constants(made)["w0_scale"].reshape(-1, *[1] * (len(shape) - 2))
    # Each activation is off by half a step of the input, and each weight by half a step of its channel.
    by_weights = run(layer(np.broadcast_to(steps / 2, shape).astype(np.float32), None, size, **attributes), x)
    most = np.abs(weight) + steps / 2
    by_inputs = run(layer(most, None, size, **attributes), np.full_like(x, step / 2))
    bound = by_weights + by_inputs + step * steps
    for engine in ENGINES:
        assert (np.abs(run(made, x, engine) - run(model, x)) <= 1.001 * bound + 1e-5).all(), engine


def decoder(*, activation: str = "Relu", group: int = 1) -> Artifact:
    """x (N, 6, 4, 4) to y (N, 3, 16, 16): a Conv and two ConvTransposes."""
    n = Network(3)
    x = n.op(activation, n.conv("x", 6, 16))
    x = n.op("ConvTranspose", x, n.normal(16, 8 // group, 4, 4, fan_in=64), strides=[2, 2], pads=[1] * 4, group=group)
    x = n.op("Concat", n.op("Relu", x), n.op("Sigmoid", x), axis=1)
    x = n.op("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    x = n.op("ConvTranspose", x, n.normal(16, 3, 2, 2, fan_in=16), n.normal(3), strides=[2, 2])
    n.op("Tanh", x, name="y")
    return n.artifact({"x": ["N", 6, 4, 4]}, {"y": ["N", 3, 16, 16]})


def images(count: int = 32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 6, 4, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, 2), ({"activation": "LeakyRelu"}, 1), ({"activation": "Tanh"}, 1), ({"group": 2}, 1)]
)
def test_only_those_of_inputs_that_are_never_negative_become_integer(options: dict[str, Any], wanted: int) -> None:
    model = decoder(**options)
    for placement in QdqPlacement:
        made = int8(model, images(), placement)
        found = [array.ndim for array in constants(made).values() if array.dtype == np.int8]
        assert found.count(4) == 1 + wanted
        check_explained(model, made, make_dataset({"x": images()}, None))
    assert cost(model, {"x": (1, 6, 4, 4)}).quantisable == 1 + wanted


def test_many_paths_to_an_input_are_followed_once() -> None:
    n = Network()
    starts, ends, axes = (n.weight(np.array([at], np.int64)) for at in (0, 4, 1))
    x = n.op("Relu", "x")
    for _ in range(64):
        x = n.op("Slice", n.op("Concat", x, x, axis=1), starts, ends, axes)
    n.op("ConvTranspose", x, n.normal(4, 2, 2, 2), name="y")
    model = n.artifact({"x": ["N", 4, 3, 3]}, {"y": ["N", 2, 4, 4]})
    assert [node.op_type for node in FloatModel(model).integer_nodes(QdqPlacement.LINEAR)] == ["ConvTranspose"]


def test_the_whole_recipe_runs_alike_in_every_engine() -> None:
    model, data = decoder(), make_dataset({"x": images(64)}, None)
    made = quantize_with(PtqRecipe(), model, data, SCHEME)
    check_explained(model, made, data)
    x = images(16, seed=1)
    want, plain = run(model, x), run(int8(model, images(64)), x)
    found = [run(made, x, engine) for engine in ENGINES]
    for one in found:
        # OpenVINO multiplies scales in another order, so that some values are one step off.
        assert np.linalg.norm(one - found[0]) < 0.01 * np.linalg.norm(want)
        assert np.linalg.norm(one - want) < min(0.05 * np.linalg.norm(want), 1.1 * np.linalg.norm(plain - want))


def test_biases_are_corrected() -> None:
    """A bias of the second ConvTranspose that is off by a constant is put right, and one is given to the first."""
    model, x = decoder(), images(64)
    proto = onnx.load_model_from_string(int8(model, x).data)
    for tensor in proto.graph.initializer:
        if tensor.data_type == DataType.INT32.onnx and tensor.dims[0] == 3:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 500, tensor.name))
    wrong = Artifact.from_bytes(proto.SerializeToString())
    right = correct_biases(model, wrong, make_dataset({"x": x}, None))
    first, best = right.provenance[-1].facts["error"]
    assert best < 0.5 * first
    assert sum(name.startswith("ConvTranspose") for name in right.provenance[-1].facts["corrected"]) == 2


def test_what_is_kept_in_float_stays() -> None:
    model, x = decoder(), images()
    named = FloatModel(keep_float(model, model, ["convtranspose2"])).integer_nodes(QdqPlacement.LINEAR)
    assert [node.name for node in named if node.op_type != "Relu"] == ["Conv_0", "ConvTranspose_7"]
    made = int8(model, x, keep_float=["ConvTranspose_7"])
    assert [array.ndim for array in constants(made).values() if array.dtype == np.int8].count(4) == 2


def test_a_build_tries_them_only_in_engines_with_a_kernel() -> None:
    few = make_dataset({"x": images(8)}, None)
    made = make_layouts(decoder(), few, SCHEME, (), {})
    integer = {
        layout: [array.ndim for array in constants(model).values() if array.dtype == np.int8].count(4)
        for layout, model in made.items()
    }
    assert {layout.engines for layout, count in integer.items() if count == 3} == {("openvino",)}
    assert {layout.kind for layout, count in integer.items() if count == 1} == {""}
    assert len(made) == 4
    assert all(not one.engines for one in make_layouts(decoder(), few, SCHEME, ("onnxruntime",), {}))


def test_weights_are_stored_whatever_the_input_is() -> None:
    for model in (decoder(), decoder(activation="Tanh", group=2)):
        stored = store_weights(model, StorageOptions(least_weights=64))
        kept = [array.dtype for array in constants(stored).values() if array.size >= 64]
        assert set(kept) == {np.dtype(np.int8)}
        assert np.linalg.norm(run(stored, images()) - run(model, images())) < 0.02 * np.linalg.norm(
            run(model, images())
        )
