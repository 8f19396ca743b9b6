from __future__ import annotations

import copy
import random
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import networks
from networks import Network
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, InvalidModel, PenstockError, Unsupported
from penstock.offline.compress.training.operators import OPERATORS
from penstock.offline.compress.training.torch import Tensor, torch
from penstock.offline.compress.training.trainable import TrainableModel, to_tensors

_DIGITS = Path("examples/digits")


@pytest.fixture(scope="module")
def digits() -> Artifact:
    return Artifact.from_file(_DIGITS / "model.onnx")


@pytest.fixture(scope="module")
def images() -> Dataset:
    arrays = np.load(_DIGITS / "evaluate.npz")
    return make_dataset({"image": arrays["image"][:200]}, arrays["labels"][:200])


def _proto(artifact: Artifact) -> onnx.ModelProto:
    return onnx.load_model_from_string(artifact.data)


def _weights(artifact: Artifact) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in _proto(artifact).graph.initializer}


def test_an_untrained_model_is_written_back_as_it_was(digits: Artifact) -> None:
    written = TrainableModel(digits).to_artifact("train", {"epochs": 0}, {"loss": 1.0})
    assert written.data == _proto(digits).SerializeToString(deterministic=True)
    assert written.provenance[-1].name == "train"
    assert written.provenance[-1].facts == {"loss": 1.0}


def test_trained_weights_are_what_onnx_runtime_then_computes_with(digits: Artifact, images: Dataset) -> None:
    model = TrainableModel(digits)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = to_tensors(images.rows(0, 64), model)
    (name,) = model.output_names
    torch.nn.functional.cross_entropy(model(inputs)[name], torch.tensor(images.labels[:64].astype(np.int64))).backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.weights.values())
    optimizer.step()
    written = model.to_artifact("train", {}, {})
    theirs = get_engine("onnxruntime").load(written, {"graph_level": "disabled"}).forward(images.rows(0, 64))[name]
    with torch.no_grad():
        ours = model(inputs)[name].numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    before, after = _weights(digits), _weights(written)
    assert list(before) == list(after)
    assert {key for key in before if not np.array_equal(before[key], after[key])} == set(model.weights)


def test_nothing_but_payloads_changes(digits: Artifact) -> None:
    model = TrainableModel(digits)
    with torch.no_grad():
        for weight in model.weights.values():
            weight.mul_(0.5)
    before, after = _proto(digits), _proto(model.to_artifact("train", {}, {}))
    for proto in (before, after):
        for tensor in proto.graph.initializer:
            tensor.ClearField("raw_data")
    assert before == after


def test_weights_of_digits_are_all_but_the_statistics(digits: Artifact) -> None:
    names = {name for name in _weights(digits) if "running" not in name}
    assert set(TrainableModel(digits).weights) == names
    assert set(TrainableModel(digits, frozen=["classify.bias"]).weights) == names - {"classify.bias"}


def test_settings_scalars_and_masks_are_no_weights() -> None:
    assert sorted(TrainableModel(networks.attention()).weights) == ["w0", "w1", "w2", "w5"]


def test_a_scalar_weight_operand_is_a_weight_and_a_bound_is_none() -> None:
    n = Network()
    x = n.op("PRelu", "x", n.weight(np.float32([0.1])))
    bound = n.weight(np.float32(0.7))
    n.op("Mul", n.op("Clip", x, "", bound), n.weight(np.float32([1.0, 2.0])), name="y")
    assert sorted(TrainableModel(n.artifact({"x": ["N", 2]}, {"y": ["N", 2]})).weights) == ["w0", "w2"]


def test_a_tied_weight_is_one_parameter_with_the_sum_of_gradients() -> None:
    n = Network()
    w = n.normal(3, 3)
    n.op("MatMul", n.op("MatMul", "x", w), w, name="y")
    model = TrainableModel(n.artifact({"x": ["N", 3]}, {"y": ["N", 3]}))
    weight = model.weights["w0"].detach().clone().requires_grad_()
    x = torch.ones(2, 3)
    (x @ weight @ weight).sum().backward()
    model({"x": x})["y"].sum().backward()
    torch.testing.assert_close(model.weights["w0"].grad, weight.grad)


def test_constant_nodes_are_trained_and_written_like_initialisers() -> None:
    value = numpy_helper.from_array(np.float32([[1, 2], [3, 4]]))
    nodes = [
        helper.make_node("Constant", [], ["w"], value=value),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "two"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 17)])
    model = TrainableModel(Artifact.from_bytes(proto.SerializeToString()))
    assert list(model.weights) == ["w"]
    model.weight_hooks["w"] = lambda w: w * 3
    assert model({"x": torch.tensor([[1.0, 0.0]])})["y"].tolist() == [[6.0, 12.0]]
    written = _proto(model.to_artifact("train", {}, {})).graph.node[0].attribute[0].t
    np.testing.assert_array_equal(numpy_helper.to_array(written), [[3, 6], [9, 12]])


def test_hooks_see_weights_and_values_and_are_written() -> None:
    artifact = networks.mlp()
    model = TrainableModel(artifact)
    mask = torch.zeros_like(model.weights["w0"])
    model.weight_hooks["w0"] = lambda w: w * mask
    seen: list[Tensor] = []
    model.value_hooks["hidden"] = lambda h: (seen.append(h), h * 0)[1]
    found = model({"x": torch.ones(2, 16)}, also=["hidden", "w0", "x"])
    assert set(found) == {"y", "hidden", "w0", "x"}
    assert not found["w0"].any()
    assert not found["hidden"].any()
    torch.testing.assert_close(seen[0], torch.relu(model.constant("w1")).expand(2, -1))
    assert not _weights(model.to_artifact("prune", {}, {}))["w0"].any()


def test_a_hook_may_not_change_a_shape() -> None:
    model = TrainableModel(networks.mlp())
    model.weight_hooks["w0"] = lambda w: w[:, :8]
    with pytest.raises(InvalidArgument, match="hook of 'w0' changed its shape"):
        model.to_artifact("train", {}, {})


def test_a_diverged_model_is_not_written() -> None:
    model = TrainableModel(networks.mlp())
    with torch.no_grad():
        model.weights["w2"][0, 0] = torch.nan
    with pytest.raises(InvalidModel, match="'w2' is not finite"):
        model.to_artifact("train", {}, {})


def _integers() -> Artifact:
    n = Network()
    n.op("Reshape", "x", n.weight(np.array([0, 1, 4], np.int64)), name="y")
    return n.artifact({"x": ["N", 4]}, {"y": ["N", 1, 4]})


@pytest.mark.parametrize("hooks", ["weight_hooks", "value_hooks"])
def test_hooks_on_unknown_names_are_refused(hooks: str) -> None:
    model = TrainableModel(networks.mlp())
    getattr(model, hooks)["nowhere"] = torch.relu
    with pytest.raises(InvalidArgument, match="nowhere"):
        model({"x": torch.ones(1, 16)})


def test_other_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        TrainableModel(networks.mlp(), frozen=["nowhere"])
    with pytest.raises(InvalidArgument, match=r"\['w0'\] are not FP32"):
        TrainableModel(_integers(), trained=["w0"])
    with pytest.raises(InvalidArgument, match="nowhere"):
        TrainableModel(networks.mlp())({"x": torch.ones(1, 16)}, also=["nowhere"])


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = TrainableModel(networks.cnn(batch=2))
    assert model.fixed_rows == 2
    with pytest.raises(InvalidArgument, match="input 'x' is missing"):
        model({})
    with pytest.raises(InvalidArgument, match=r"must have shape \[2, 3, 12, 12\], got \[5, 3, 12, 12\]"):
        model({"x": torch.zeros(5, 3, 12, 12)})
    assert model({"x": torch.zeros(2, 3, 12, 12)})["y"].shape == (2, 10)


def test_a_node_that_cannot_be_computed_is_named() -> None:
    n = Network()
    n.op("MatMul", "x", n.normal(3, 3), name="y")
    model = TrainableModel(n.artifact({"x": ["N", "M"]}, {"y": ["N", 3]}))
    with pytest.raises(InvalidArgument, match=r"'y' \(MatMul\) cannot be computed"):
        model({"x": torch.zeros(2, 4)})


def test_gradients_are_right_in_double(digits: Artifact) -> None:
    model = TrainableModel(digits).double()
    weight = model.weights["classify.weight"]
    picked = torch.zeros_like(weight).index_put(
        (torch.tensor([0, 3]), torch.tensor([1, 5])), torch.tensor(1.0).double()
    )
    torch.manual_seed(0)  # at a corner of ReLU there is no derivative to compare with
    image = torch.rand(2, 1, 8, 8, dtype=torch.float64)

    def outputs(step: Tensor, image: Tensor) -> Tensor:
        model.weight_hooks["classify.weight"] = lambda w: w + step * picked
        return model({"image": image})[model.output_names[0]].logsumexp(1)

    assert torch.autograd.gradcheck(
        outputs, (torch.zeros((), dtype=torch.float64, requires_grad=True), image.requires_grad_()), atol=1e-6
    )


def test_gradients_of_every_weight_of_an_encoder_are_right() -> None:
    """Along a random direction through all weights at once, against central differences in FP64."""
    model = TrainableModel(networks.attention()).double()
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    directions = {name: torch.randn_like(weight) for name, weight in model.weights.items()}

    def loss(step: float) -> Tensor:
        for name, direction in directions.items():
            model.weight_hooks[name] = lambda w, direction=direction: w + step * direction
        return model({"x": x})["y"].pow(2).mean()

    loss(0.0).backward()
    slope = sum(float((model.weights[name].grad * direction).sum()) for name, direction in directions.items())
    with torch.no_grad():
        differences = float(loss(1e-6) - loss(-1e-6)) / 2e-6
    assert slope == pytest.approx(differences, rel=1e-6)


def test_values_are_freed_when_last_used() -> None:
    n = Network()
    name = "x"
    for _ in range(20):
        name = n.op("Relu", name)
    n.op("Identity", name, name="y")
    model = TrainableModel(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def count(value: Tensor) -> Tensor:
        nonlocal most
        alive.append(weakref.ref(value))
        most = max(most, sum(ref() is not None for ref in alive))
        return value

    model.value_hooks = {f"relu{i}": count for i in range(20)}
    with torch.no_grad():
        model({"x": torch.ones(3, 4)})
    assert len(alive) == 20
    assert most <= 3


def test_norms_are_frozen(digits: Artifact, images: Dataset) -> None:
    model = TrainableModel(digits)
    model.train()
    model(to_tensors(images.rows(0, 32), model))
    after = _weights(model.to_artifact("t", {}, {}))
    assert np.array_equal(after["stem.1.running_mean"], _weights(digits)["stem.1.running_mean"])


def test_dynamic_axes_run_in_exact_integers() -> None:
    """(N, T, 6) to (N, 2, T, 3), with shapes computed in the graph, as exporters write them."""
    n = Network()
    sizes = n.op("Shape", "x")
    batch, tokens = (n.op("Gather", sizes, n.weight(np.array([i], np.int64)), axis=0) for i in (0, 1))
    shape = n.op("Concat", batch, tokens, n.weight(np.array([2, 3], np.int64)), axis=0)
    n.op("Transpose", n.op("Reshape", "x", shape), perm=[0, 2, 1, 3], name="y")
    model = TrainableModel(n.artifact({"x": ["N", "T", 6]}, {"y": ["N", 2, "T", 3]}))
    for rows, tokens_ in ((1, 4), (3, 7)):
        x = torch.randn(rows, tokens_, 6)
        torch.testing.assert_close(model({"x": x})["y"], x.reshape(rows, tokens_, 2, 3).transpose(1, 2))


def test_a_copy_has_weights_of_its_own() -> None:
    model = TrainableModel(networks.mlp())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weights["w0"].zero_()
    assert model.weights["w0"].any()
    assert not twin.constant("w0").any()
    assert not _weights(twin.to_artifact("t", {}, {}))["w0"].any()


def test_local_functions_are_inlined() -> None:
    twice = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    weight = numpy_helper.from_array(np.float32([1, 2]), "w")
    nodes = [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Twice", ["h"], ["y"], domain="own")]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], [weight]), functions=[twice], opset_imports=imports, ir_version=8
    )
    model = TrainableModel(Artifact.from_bytes(proto.SerializeToString()))
    assert model({"x": torch.ones(1, 2)})["y"].tolist() == [[2.0, 4.0]]
    assert len(_proto(model.to_artifact("t", {}, {})).functions) == 1


def test_weights_in_external_files_come_home(tmp_path: Path, digits: Artifact) -> None:
    onnx.save(_proto(digits), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    external = Artifact.from_file(tmp_path / "m.onnx")
    written = TrainableModel(external).to_artifact("t", {}, {})
    for name, array in _weights(digits).items():
        np.testing.assert_array_equal(array, _weights(written)[name])


def test_operators_without_an_implementation_are_all_named() -> None:
    n = Network()
    a, b = n.op("Det", "x"), n.op("Det", "x")
    n.op("Sum", a, b, n.op("NonMaxSuppression", "x", "x"), name="y")
    proto = _proto(networks.mlp())
    del proto.graph.node[:]
    proto.graph.node.extend(n.nodes)
    proto.graph.node.add(op_type="Magic", domain="own", output=["z"])
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(Unsupported) as error:
        TrainableModel(Artifact.from_bytes(proto.SerializeToString()))
    assert "Det (2), NonMaxSuppression (1), own.Magic (1)" in error.value.message
    assert "post-training quantisation" in error.value.hint


def test_integers_are_written_rounded_and_within_their_range() -> None:
    n = Network()
    n.op("DequantizeLinear", n.weight(np.zeros(4, np.int32)), n.weight(np.float32(0.1)), name="d")
    n.op("Add", "x", "d", name="y")
    model = TrainableModel(n.artifact({"x": ["N", 4]}, {"y": ["N", 4]}))
    model.weight_hooks["w0"] = lambda _: torch.tensor([1.4, -2.6, 2.0**31, -(2.0**40)])
    written = _weights(model.to_artifact("t", {}, {}))["w0"]
    assert written.dtype == np.int32
    assert written.tolist() == [1, -3, 2**31 - 1, -(2**31)]


def test_damaged_models_get_errors_of_ours() -> None:
    """Random changes of bytes, operators, dimensions and types: the model runs, or is rejected with a reason."""
    draw = random.Random(0)
    artifact, feeds = networks.attention(8), {"x": torch.ones(2, 5, 8)}
    names = sorted(name for _, name in OPERATORS)
    computed = refused = 0
    for _ in range(300):
        proto = _proto(artifact)
        node, tensor = draw.choice(proto.graph.node), draw.choice(proto.graph.initializer)
        kind = draw.randrange(4)
        if kind == 0:
            node.op_type = draw.choice(names)
        elif kind == 1:
            tensor.data_type = draw.randrange(60)
        elif kind == 2:
            tensor.dims[:] = [draw.choice([0, -1, 5, 8, 2**40]) for _ in tensor.dims]
        data = bytearray(proto.SerializeToString())
        if kind == 3:
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            TrainableModel(Artifact.from_bytes(bytes(data)))(feeds)
            computed += 1
        except PenstockError:
            refused += 1
    assert computed > 50
    assert refused > 50


def test_old_opsets_and_odd_types_are_refused() -> None:
    old = _proto(networks.mlp())
    old.opset_import[0].version = 8
    with pytest.raises(Unsupported, match="opset 8"):
        TrainableModel(Artifact.from_bytes(old.SerializeToString()))
    odd = _proto(networks.mlp())
    odd.graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [1], [b"a"]))
    with pytest.raises(Unsupported, match="'text' is of type STRING"):
        TrainableModel(Artifact.from_bytes(odd.SerializeToString()))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_constants_are_computed_with_and_not_trained(dtype: int) -> None:
    half = helper.make_tensor("w", dtype, [2], [1.5, -2.0])
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "f"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [half])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model = TrainableModel(Artifact.from_bytes(proto.SerializeToString()))
    assert not model.weights
    assert model({"x": torch.ones(1, 2)})["y"].tolist() == [[1.5, -2.0]]
