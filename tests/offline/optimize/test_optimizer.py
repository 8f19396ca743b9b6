"""The default passes together, on models like those that frameworks export."""

from collections import Counter

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.offline.optimize.model import load_model
from penstock.offline.optimize.optimizer import optimize
from penstock.testing import assert_tensors_close


def make(nodes, initializers, inputs, outputs):
    def value(name, shape):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "graph",
        [value(*item) for item in inputs.items()],
        [value(*item) for item in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Artifact.from_bytes(model.SerializeToString())


def resnet(blocks=8, channels=8):
    """A residual network as an exporter in training order writes it: Conv, BatchNormalization, Relu, Identity, Add."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {}

    def conv_norm(source, name, inputs):
        weights[f"{name}.w"] = rng.normal(0, 0.2, (channels, inputs, 3, 3)).astype(np.float32)
        for part in ("gamma", "beta", "mean", "var"):
            weights[f"{name}.{part}"] = rng.uniform(0.5, 1.5, channels).astype(np.float32)
        nodes.append(helper.make_node("Conv", [source, f"{name}.w"], [f"{name}.c"], pads=[1] * 4))
        norm = [f"{name}.c", *(f"{name}.{part}" for part in ("gamma", "beta", "mean", "var"))]
        nodes.append(helper.make_node("BatchNormalization", norm, [f"{name}.n"]))
        return f"{name}.n"

    def relu(source, name):
        nodes.append(helper.make_node("Relu", [source], [name]))
        return name

    x = relu(conv_norm("image", "stem", 3), "stem.out")
    for index in range(blocks):
        first = relu(conv_norm(x, f"b{index}.1", channels), f"b{index}.r")
        second = conv_norm(first, f"b{index}.2", channels)
        nodes.append(helper.make_node("Add", [second, x], [f"b{index}.sum"]))
        x = relu(f"b{index}.sum", f"b{index}.out")
    weights["head.w"] = rng.normal(size=(channels, 10)).astype(np.float32)
    weights["head.b"] = rng.normal(size=10).astype(np.float32)
    weights["pool.shape"] = np.array([-1, channels])
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["pool"]),
        helper.make_node("Reshape", ["pool", "pool.shape"], ["flat"]),
        helper.make_node("Dropout", ["flat"], ["drop"]),
        helper.make_node("MatMul", ["drop", "head.w"], ["product"]),
        helper.make_node("Add", ["product", "head.b"], ["sum"]),
        helper.make_node("Identity", ["sum"], ["logits"]),
    ]
    return make(nodes, weights, {"image": ["N", 3, 8, 8]}, {"logits": ["N", 10]})


def run(artifact, inputs, **options):
    return get_engine("onnxruntime").load(artifact, {"threads": 1, **options}).forward(inputs)


def operators(artifact: Artifact) -> Counter[str]:
    """Number of nodes of each operator, subgraphs included."""
    return Counter(node.op_type for node in load_model(artifact).graph.all_nodes())


def test_a_residual_network_loses_a_third_of_its_nodes():
    artifact = resnet()
    result, report = optimize(artifact)
    assert report.reverted == {}
    assert report.nodes_after <= 0.7 * report.nodes_before
    assert operators(result) == {"Add": 8, "Conv": 17, "Gemm": 1, "GlobalAveragePool": 1, "Relu": 17, "Reshape": 1}
    assert report.max_relative_error < 1e-4
    rng = np.random.default_rng(1)
    for batch in (1, 2, 5):
        inputs = {"image": rng.normal(size=(batch, 3, 8, 8)).astype(np.float32)}
        assert_tensors_close(run(result, inputs), run(artifact, inputs), rtol=1e-3, atol=1e-4)


def test_no_weight_is_left_over():
    result, _ = optimize(resnet())
    graph = onnx.load_model_from_string(result.data).graph
    read = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= read
    onnx.checker.check_model(result.data, full_check=True)


def test_the_signature_stays():
    artifact = resnet()
    result, _ = optimize(artifact)
    engine = get_engine("onnxruntime")
    assert engine.load(result, {}).signature == engine.load(artifact, {}).signature


def test_the_same_bytes_give_the_same_bytes():
    assert optimize(resnet())[0].data == optimize(resnet())[0].data


def test_optimising_again_changes_nothing():
    once, _ = optimize(resnet())
    twice, report = optimize(once)
    assert twice.data == once.data
    assert report.applied == []


def test_an_exporters_shape_arithmetic_folds(parse, weights):
    text = """agraph (float[N, 4, 6] x) => (float[N, 24] y) {
        s = Shape(x)
        one = Constant<value = int64 {1}>()
        two = Constant<value = int64 {2}>()
        zero = Constant<value_ints = [0]>()
        d1 = Gather(s, one)
        d2 = Gather(s, two)
        p = Mul(d1, d2)
        u = Unsqueeze(p, zero)
        t = Concat<axis = 0>(m, u)
        y = Reshape(x, t)
    }"""
    result, _ = optimize(parse(text, m=np.array([-1])))
    assert operators(result) == {"Reshape": 1}


def test_a_loop_that_captures_keeps_its_meaning(parse, weights):
    text = """agraph (float[3] x, int64 count) => (float[3] y) {
        a = Mul(x, k)
        i = Identity(a)
        dead = Neg(i)
        always = Constant<value = bool {1}>()
        y = Loop (count, always, x) <body = step (int64 n, bool go, float[3] state) => (bool go_on, float[3] next) {
            go_on = Identity(go)
            next = Add(state, i)
        }>
    }"""
    artifact = parse(text, k=weights(3))
    result, report = optimize(artifact)
    assert report.reverted == {}
    assert "Neg" not in operators(result)
    inputs = {"x": np.array([1, 2, 3], np.float32), "count": np.array(3)}
    assert_tensors_close(run(result, inputs), run(artifact, inputs))


def test_a_small_encoder_layer_keeps_its_answers(parse, weights):
    text = """agraph (int64[N, S] ids) => (float[N, S, 8] y) {
        e = Gather(table, ids)
        q = MatMul(e, w1)
        k = MatMul(e, w2)
        kt = Transpose<perm = [0, 2, 1]>(k)
        s = MatMul(q, kt)
        p = Softmax<axis = -1>(s)
        v = MatMul(e, w1)
        a = MatMul(p, v)
        r = Add(a, e)
        d = Dropout(r)
        y = LayerNormalization(d, g, b)
    }"""
    given = {"table": weights(2, 8), "w1": weights(8, 8), "w2": weights(8, 8), "g": weights(8), "b": weights(8)}
    _, report = optimize(parse(text, **given))
    assert report.reverted == {}
    assert report.nodes_before - report.nodes_after == 2  # Dropout, and v = q


@st.composite
def random_graphs(draw):
    """Random chains and joins of the operators that the passes rewrite, over images of 4 channels."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    nodes, weights, values = [], {}, ["x"]

    def weight(shape):
        name = f"w{len(weights)}"
        weights[name] = (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1])).astype(np.float32)
        return name

    kinds = st.sampled_from(["Conv", "BatchNormalization", "Add", "Mul", "Sub", "Identity", "Relu", "Join", "Neutral"])
    for index in range(draw(st.integers(2, 9))):
        kind, source, out = draw(kinds), values[-1 - draw(st.integers(0, min(1, len(values) - 1)))], f"v{index}"
        if kind == "Conv":
            nodes.append(helper.make_node("Conv", [source, weight((4, 2, 1, 1))], [out], group=2))
        elif kind == "BatchNormalization":
            weights[f"var{index}"] = rng.uniform(0.5, 1.5, 4).astype(np.float32)
            inputs = [source, *(weight((4,)) for _ in range(3)), f"var{index}"]
            nodes.append(helper.make_node(kind, inputs, [out]))
        elif kind in ("Add", "Mul", "Sub"):
            shape = draw(st.sampled_from([(), (4, 1, 1), (1, 4, 1, 1), (4,), (1, 1, 4, 4)]))
            pair = [source, weight(shape)]
            nodes.append(helper.make_node(kind, pair[::-1] if draw(st.booleans()) else pair, [out]))
        elif kind == "Join":
            nodes.append(helper.make_node("Add", [source, draw(st.sampled_from(values))], [out]))
        elif kind == "Neutral":
            weights[f"one{index}"] = np.ones(draw(st.sampled_from([(), (1,), (4, 1, 1)])), np.float32)
            nodes.append(helper.make_node("Mul", [source, f"one{index}"], [out]))
        else:
            nodes.append(helper.make_node(kind, [source], [out]))
        values.append(out)
    outputs = {values[-1], *draw(st.lists(st.sampled_from(values[1:]), max_size=2))}
    shape = ["N", 4, 4, 4]
    return make(nodes, weights, {"x": shape}, dict.fromkeys(sorted(outputs), shape))


@settings(max_examples=60, deadline=None)
@given(random_graphs())
def test_no_pass_is_ever_undone(artifact):
    result, report = optimize(artifact)
    assert report.reverted == {}
    assert report.nodes_after <= report.nodes_before
    inputs = {"x": np.random.default_rng(3).normal(size=(2, 4, 4, 4)).astype(np.float32)}
    wants, gots = (run(model, inputs, graph_level="disabled") for model in (artifact, result))
    for name, want in wants.items():
        np.testing.assert_allclose(gots[name], want, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(want).max()))


def test_the_example_model(request):
    _, report = optimize(Artifact.from_file(request.config.rootpath / "examples/digits/model.onnx"))
    assert report.reverted == {}
    assert report.nodes_after < report.nodes_before
