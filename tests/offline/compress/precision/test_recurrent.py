"""LSTM in INT8: the outputs of the float layer, except for rounding, with every input and attribute."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import networks
import stored_models
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import Unsupported, WrongResult
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.precision.dynamic import DynamicOptions
from penstock.offline.compress.precision.recurrent import quantize_recurrent
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType

ALL = DynamicOptions(least_weights=1)


def run(artifact: Artifact, inputs: dict[str, Array]) -> dict[str, Array]:
    return get_engine("onnxruntime").load(artifact, {"threads": 1}).forward(inputs)


def data_of(artifact: Artifact, time: int = 6, batch: int = 4) -> Dataset:
    return make_dataset(stored_models.recurrent_inputs(artifact, time, batch, seed=5), None)


def sequences(hidden: int = 32, features: int = 12) -> Artifact:
    """x (N, T, features) to y (N, 4): a bidirectional LSTM over time, then a Gemm of its last states."""
    n = networks.Network()
    rng = np.random.default_rng(3)
    weights = [n.weight(rng.normal(0, 0.2, (2, 4 * hidden, size)).astype(np.float32)) for size in (features, hidden)]
    x = n.op("Transpose", "x", perm=[1, 0, 2])
    n.nodes.append(
        onnx.helper.make_node("LSTM", [x, *weights], ["", "last"], hidden_size=hidden, direction="bidirectional")
    )
    n.gemm(n.op("Flatten", n.op("Transpose", "last", perm=[1, 0, 2])), 2 * hidden, 4, name="y")
    return n.artifact({"x": ["N", "T", features]}, {"y": ["N", 4]})


LAYERS = st.fixed_dictionaries(
    {
        "inputs": st.integers(4, 40),
        "hidden": st.integers(4, 33),
        "direction": st.sampled_from(["forward", "reverse", "bidirectional"]),
        "seed": st.integers(0, 99),
        **{name: st.booleans() for name in ("lengths", "states", "peepholes", "bias")},
    },
    optional={"clip": st.just(0.7)},
)


@given(
    layer=LAYERS,
    time=st.integers(1, 9),
    batch=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 3.0]),
    reduce_range=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_outputs_are_those_of_the_float_layer(layer, time, batch, scale, reduce_range):
    artifact = stored_models.recurrent(**layer)
    made = quantize_recurrent(artifact, data_of(artifact), DynamicOptions(least_weights=1, reduce_range=reduce_range))
    given_inputs = stored_models.recurrent_inputs(artifact, time, batch, layer["seed"], scale)
    want, got = run(artifact, given_inputs), run(made, given_inputs)
    for name, array in want.items():
        assert got[name].shape == array.shape
        # A wrong connection gives an error of about 1; with few values, rounding gives up to a tenth of it.
        assert np.linalg.norm(got[name] - array) <= 0.2 * np.linalg.norm(array) + 1e-3 * array.size**0.5, name


@pytest.mark.parametrize(
    "attributes",
    [
        {"input_forget": 1, "layout": 0},
        {"activations": ["HardSigmoid", "Relu", "Softsign"]},
        {"activations": ["HardSigmoid", "Softsign", "Affine"], "activation_alpha": [0.3, 2.0], "activation_beta": [0.4, 0.1]},
    ],
)  # fmt: skip
def test_attributes_are_kept(attributes: dict[str, object]) -> None:
    artifact = stored_models.recurrent(direction="forward", **attributes)
    made = quantize_recurrent(artifact, data_of(artifact), ALL)
    inputs = stored_models.recurrent_inputs(artifact, 7, 3)
    want, got = run(artifact, inputs)["Y"], run(made, inputs)["Y"]
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
    check_explained(artifact, made, data_of(artifact))


def test_facts_and_size() -> None:
    artifact = sequences(64, 40)
    x = np.random.default_rng(0).standard_normal((24, 9, 40)).astype(np.float32)
    data = make_dataset({"x": x * np.geomspace(0.1, 3, 24)[:, None, None].astype(np.float32)}, None)
    made = quantize_recurrent(artifact, data)
    facts = made.provenance[-1].facts
    assert made.size_bytes < 0.3 * artifact.size_bytes
    assert facts["layers"] == 1
    assert facts["batch_dependence"] > 1e-3
    assert facts["batch_invariant"] is False
    assert made.data == quantize_recurrent(artifact, data).data
    found = check_explained(artifact, made, data)
    errors = {one.reason.split()[0]: one.error for one in found}
    assert errors["without"] < 1e-4 < errors["its"]


def test_it_follows_calibrated_int8() -> None:
    artifact = sequences()
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((24, 9, 12)).astype(np.float32)}, None)
    scheme = IntegerScheme(DataType.UINT8, DataType.INT8, True, "test")
    int8 = quantize(artifact, ranges(collect(artifact, data), RangeMethod.MSE, scheme), scheme)
    made = quantize_recurrent(int8, data, ALL)
    operators = [node.op_type for node in onnx.load_model_from_string(made.data).graph.node]
    assert "DynamicQuantizeLSTM" in operators
    assert "QuantizeLinear" in operators
    found = check_explained(artifact, made, data)
    assert max(one.error for one in found if one.reason.startswith("without")) < 1e-3


def test_wrong_weights_are_found() -> None:
    artifact = sequences()
    data = make_dataset({"x": np.random.default_rng(0).standard_normal((24, 9, 12)).astype(np.float32)}, None)
    made = quantize_recurrent(artifact, data, ALL)
    for swaps in ({1: 2}, {8: 10}):
        proto = onnx.load_model_from_string(made.data)
        node = next(node for node in proto.graph.node if node.op_type == "DynamicQuantizeLSTM")
        tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        for one, other in swaps.items():
            array = numpy_helper.to_array(tensors[node.input[one]])
            changed = np.roll(array, 1, axis=-1) if other == 2 else 2 * array
            tensors[node.input[one]].CopyFrom(numpy_helper.from_array(changed, node.input[one]))
        wrong = artifact.derive(proto.SerializeToString(), "quantize_recurrent", {}, {})
        with pytest.raises(WrongResult, match="is no rounded weight of the original"):
            check_explained(artifact, wrong, data)


def test_two_layers_with_the_same_weights_share_integers() -> None:
    artifact = stored_models.recurrent(inputs=32, hidden=16, direction="bidirectional")
    proto = onnx.load_model_from_string(artifact.data)
    second = onnx.NodeProto()
    second.CopyFrom(proto.graph.node[0])
    del second.output[:]
    second.output.append("other")
    proto.graph.node.append(second)
    proto.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, ["T", 2, "N", 16]))
    twice = Artifact.from_bytes(proto.SerializeToString())
    made = quantize_recurrent(twice, data_of(twice), ALL)
    names = [tensor.name for tensor in onnx.load_model_from_string(made.data).graph.initializer]
    assert len(names) == 7  # integers, scales and zeros of both matrices, and the bias
    inputs = stored_models.recurrent_inputs(twice, 4, 2)
    found = run(made, inputs)
    np.testing.assert_array_equal(found["Y"], found["other"])


@pytest.mark.parametrize(
    "artifact",
    [
        stored_models.recurrent("GRU"),
        stored_models.recurrent("RNN"),
        stored_models.recurrent(layout=1, direction="forward"),
        networks.mlp(),
    ],
    ids=["GRU", "RNN", "layout", "mlp"],
)
def test_what_has_no_integer_kernel(artifact: Artifact) -> None:
    with pytest.raises(Unsupported, match="no LSTM"):
        quantize_recurrent(artifact, make_dataset({"x": np.zeros((4, 16), np.float32)}, None), ALL)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    proto = onnx.load_model_from_string(stored_models.recurrent().data)
    weight = numpy_helper.to_array(proto.graph.initializer[0]).copy()
    weight[0, 0, 0] = value
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "W"))
    artifact = Artifact.from_bytes(proto.SerializeToString())
    with pytest.raises(Unsupported, match="no LSTM"):
        quantize_recurrent(artifact, data_of(artifact), ALL)
