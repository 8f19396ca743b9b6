import numpy as np

from penstock.offline.optimize.passes.common_subexpression import CommonSubexpression


def test_merges_equal_chains(parse, apply):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a1 = Relu(x)
        b1 = Softmax<axis = 1>(a1)
        a2 = Relu(x)
        b2 = Softmax<axis = 1>(a2)
        y = Add(b1, b2)
    }"""
    assert apply(CommonSubexpression(), parse(text)).ops == ["Relu", "Softmax", "Add"]


def test_merges_nodes_that_differ_by_equal_constants_only(parse, apply, weights):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a = Mul(x, k1)
        b = Mul(x, k2)
        y = Add(a, b)
    }"""
    k = weights(3)
    outcome = apply(CommonSubexpression(), parse(text, k1=k, k2=k))
    assert outcome.ops == ["Mul", "Add"]
    assert list(outcome.constants) == ["k1"]


def test_tells_constants_of_other_type_or_shape_apart(parse, apply):
    text = """agraph (float[N, 3] x, int32[N, 1] i) => (float[N, 3] y, int32[N, 1] j, float[1, N, 3] z) {
        y = Mul(x, f)
        j = Mul(i, n)
        z = Mul(x, g)
    }"""
    zero = np.zeros(1, np.float32)
    outcome = apply(CommonSubexpression(), parse(text, f=zero, n=np.zeros(1, np.int32), g=zero.reshape(1, 1, 1)))
    assert outcome.status == "unchanged"


def test_compares_attributes_with_their_tensors(parse, apply):
    text = """agraph (int64[1] n) => (float[A] y) {
        a = ConstantOfShape<value = float[1] {1.0}>(n)
        b = ConstantOfShape<value = float[1] {2.0}>(n)
        c = ConstantOfShape<value = float[1] {1.0}>(n)
        y = Concat<axis = 0>(a, b, c)
    }"""
    outcome = apply(CommonSubexpression(), parse(text))
    assert outcome.ops == ["ConstantOfShape", "ConstantOfShape", "Concat"]
    assert list(outcome.node("Concat").input) == ["a", "b", "a"]


def test_leaves_random_operators_alone(parse, apply):
    text = """agraph (float[N, 3] x) => (int64[A] y) {
        a = RandomNormalLike(x)
        b = RandomNormalLike(x)
        sa = Shape(a)
        sb = Shape(b)
        y = Add(sa, sb)
    }"""
    assert apply(CommonSubexpression(), parse(text)).status == "unchanged"


def test_leaves_graph_outputs_alone(parse, apply):
    text = """agraph (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) {
        y = Relu(x)
        z = Relu(x)
    }"""
    assert apply(CommonSubexpression(), parse(text)).status == "unchanged"


def test_a_subgraph_reads_the_node_that_stays(parse, apply):
    text = """agraph (float[N, 3] x, bool flag) => (float[N, 3] y, float[N, 3] z) {
        a = Relu(x)
        b = Relu(x)
        y = Neg(a)
        z = If (flag) <
            then_branch = t () => (float[N, 3] t1) { t1 = Abs(b) },
            else_branch = e () => (float[N, 3] e1) { e1 = Neg(b) }
        >
    }"""
    assert apply(CommonSubexpression(), parse(text)).ops == ["Relu", "Neg", "If"]
