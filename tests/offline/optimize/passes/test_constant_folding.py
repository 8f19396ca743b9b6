import numpy as np
import pytest

from penstock.offline.optimize.passes.constant_folding import ConstantFolding


def test_constants_become_initialisers(parse, apply):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        k = Constant<value = float[3] {1.0, 2.0, 3.0}>()
        f = Constant<value_float = 2.0>()
        a = Mul(x, k)
        y = Mul(a, f)
    }"""
    outcome = apply(ConstantFolding(), parse(text))
    assert outcome.ops == ["Mul", "Mul"]
    np.testing.assert_array_equal(outcome.constants["k"], np.array([1, 2, 3], np.float32))
    assert outcome.constants["f"].shape == ()


@pytest.mark.parametrize(
    ("attribute", "want"),
    [("value_int = 3", np.int64(3)), ("value_ints = [1, 2]", np.array([1, 2])), ("value_floats = [1.0, 2.0]", None)],
)
def test_constants_by_every_numeric_attribute(parse, apply, attribute, want):
    text = f"""agraph (float[2] x) => (float[2] y) {{
        k = Constant<{attribute}>()
        c = Cast<to = 1>(k)
        y = Mul(x, c)
    }}"""
    outcome = apply(ConstantFolding(), parse(text))
    assert outcome.ops == ["Mul"]
    if want is not None:
        np.testing.assert_array_equal(outcome.constants["k"], want)


def test_folds_a_chain(parse, apply, weights):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a = Transpose<perm = [1, 0]>(k)
        b = Abs(a)
        y = MatMul(x, b)
    }"""
    k = weights(3, 3)
    outcome = apply(ConstantFolding(), parse(text, k=k))
    assert outcome.ops == ["MatMul"]
    np.testing.assert_array_equal(outcome.constants["b"], k.T)


def test_folds_a_shape_that_is_known(parse, apply):
    text = """agraph (float[2, 3, 4] x) => (float[A, B] y) {
        s = Shape<start = 1>(x)
        y = Reshape(x, s2)
        r = ReduceProd<keepdims = 1>(s)
        t = Concat<axis = 0>(m, r)
        s2 = Identity(t)
    }"""
    text = text.replace("y = Reshape(x, s2)\n", "").replace("s2 = Identity(t)", "y = Reshape(x, t)")
    outcome = apply(ConstantFolding(), parse(text, m=np.array([-1])))
    assert outcome.ops == ["Reshape"]
    np.testing.assert_array_equal(outcome.constants["t"], [-1, 12])


def test_folds_one_known_dimension_of_a_dynamic_shape(parse, apply):
    text = """agraph (float[N, 3, 4] x) => (float[A, 3] y) {
        s = Shape(x)
        d = Gather(s, i)
        t = Concat<axis = 0>(m, d)
        y = Reshape(x, t)
    }"""
    outcome = apply(ConstantFolding(), parse(text, i=np.array([1]), m=np.array([-1])))
    assert "Gather" not in outcome.ops
    np.testing.assert_array_equal(outcome.constants["t"], [-1, 3])


def test_leaves_the_dynamic_dimension_alone(parse, apply):
    text = """agraph (float[N, 3, 4] x) => (int64[1] y) {
        s = Shape(x)
        y = Gather(s, i)
    }"""
    assert apply(ConstantFolding(), parse(text, i=np.array([0]))).status == "unchanged"


def test_leaves_random_operators_alone(parse, apply):
    text = """agraph (float[N, 3] x) => (int64[A] y) {
        r = RandomNormalLike(k)
        s = Mul(r, x)
        y = Shape(s)
    }"""
    assert "RandomNormalLike" in apply(ConstantFolding(), parse(text, k=np.ones(3, np.float32))).ops


def test_leaves_quantised_weights_alone(parse, apply):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        w = DequantizeLinear(q, s)
        y = MatMul(x, w)
    }"""
    artifact = parse(text, q=np.eye(3, dtype=np.int8), s=np.array(0.5, np.float32))
    assert apply(ConstantFolding(), artifact).status == "unchanged"


def test_leaves_large_results_of_small_inputs_alone(parse, apply):
    text = """agraph (float[1] x) => (float[A, B] y) {
        big = ConstantOfShape<value = float[1] {1.0}>(n)
        y = Mul(x, big)
    }"""
    assert apply(ConstantFolding(), parse(text, n=np.array([1024, 300]))).status == "unchanged"
    assert apply(ConstantFolding(), parse(text, n=np.array([16, 16]))).ops == ["Mul"]


def test_leaves_results_of_unknown_size_alone(parse, apply):
    text = """agraph (int64[1] x) => (int64[1, A] y) {
        n = NonZero(k)
        y = Mul(x, n)
    }"""
    assert apply(ConstantFolding(), parse(text, k=np.array([1, 0, 1]))).status == "unchanged"


def test_leaves_graph_outputs_and_subgraphs_alone(parse, apply, weights):
    text = """agraph (float[3] x) => (float[3] y, float[3] z, float[3] v) {
        y = Abs(k)
        z = If (flag) <
            then_branch = t () => (float[3] t1) { t1 = Abs(k) },
            else_branch = e () => (float[3] e1) { e1 = Neg(k) }
        >
        v = Abs(x)
    }"""
    assert apply(ConstantFolding(), parse(text, k=weights(3), flag=np.array(True))).status == "unchanged"


def test_leaves_overridable_inputs_alone(parse, apply, weights):
    text = """agraph (float[3] x, float[3] k) => (float[3] y) {
        a = Abs(k)
        y = Mul(x, a)
    }"""
    assert apply(ConstantFolding(), parse(text, k=weights(3))).status == "unchanged"


def test_what_a_subgraph_captures_is_folded_for_it(parse, apply, weights):
    text = """agraph (float[3] x, bool flag) => (float[3] y) {
        a = Abs(k)
        y = If (flag) <
            then_branch = t () => (float[3] t1) { t1 = Mul(x, a) },
            else_branch = e () => (float[3] e1) { e1 = Add(x, a) }
        >
    }"""
    assert apply(ConstantFolding(), parse(text, k=weights(3))).ops == ["If"]
