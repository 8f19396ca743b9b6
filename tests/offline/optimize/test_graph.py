import numpy as np
import pytest

from penstock.offline.optimize import graph
from penstock.offline.optimize.model import load_model

TEXT = """agraph (float[N, 3] x, bool flag, float[3] default) => (float[N, 3] y) {
    a = Relu(x)
    d = Mul(a, default)
    b = Mul(d, k)
    y = If (flag) <
        then_branch = t () => (float[N, 3] inner) { inner = Mul(b, k) },
        else_branch = e () => (float[N, 3] other) { other = Neg(b) }
    >
}"""


@pytest.fixture
def model(parse, weights):
    return load_model(parse(TEXT, k=weights(3), default=weights(3)))


def value(model, name):
    return next(output for node in model.graph for output in node.outputs if output.name == name)


def test_plain_nodes_have_no_subgraphs(model):
    assert [node.op_type for node in graph.plain_nodes(model)] == ["Relu", "Mul", "Mul"]


def test_what_a_caller_may_override_is_no_constant(model):
    assert graph.constant(model.graph.initializers["default"]) is None
    assert graph.constant(model.graph.initializers["k"]).shape == (3,)
    assert graph.constant(value(model, "a")) is None
    assert graph.constant(None) is None


def test_captured_values_have_no_sole_consumer(model):
    assert graph.sole_consumer(value(model, "a")).outputs[0].name == "d"
    assert graph.sole_consumer(value(model, "b")) is None
    assert graph.sole_consumer(value(model, "y")) is None


def test_names_of_new_constants_are_free(model):
    made = [graph.add_constant(model.graph, np.ones(1), "k").name for _ in range(2)]
    assert made == ["k_folded", "k_folded_2"]


def test_static_shape_and_rank(model):
    assert graph.static_shape(model.graph.inputs[0]) is None
    assert graph.static_shape(model.graph.initializers["k"]) == (3,)
    assert graph.rank(model.graph.inputs[0]) == 2
    assert graph.rank(None) is None


def test_the_opset_is_found(model):
    assert graph.opset(model) == 17
