import numpy as np
import onnx
import pytest

from penstock.offline.optimize.passes.identity_elimination import IdentityElimination

ZEROS, ONES = np.zeros, np.ones
F32 = np.float32


def wrap(expression, x="float[N, 3] x", y="float[N, 3] y"):
    """Put the node under test between two others, so that it touches neither an input nor an output of the graph."""
    return f"agraph ({x}) => ({y}) {{ a = Neg(x)\n b = {expression}\n y = Abs(b) }}"


NOTHING = {
    "Identity": ("Identity(a)", {}),
    "Concat of one": ("Concat<axis = 0>(a)", {}),
    "Dropout": ("Dropout(a)", {}),
    "Dropout with ratio": ("Dropout(a, k)", {"k": np.array(0.5, F32)}),
    "Dropout not training": ("Dropout(a, k, t)", {"k": np.array(0.5, F32), "t": np.array(False)}),
    "Transpose": ("Transpose<perm = [0, 1]>(a)", {}),
    "Reshape copying": ("Reshape(a, k)", {"k": np.array([0, 0])}),
    "Reshape with the rest": ("Reshape(a, k)", {"k": np.array([-1, 3])}),
    "Flatten": ("Flatten(a)", {}),
    "Cast": ("Cast<to = 1>(a)", {}),
    "Pad": ("Pad(a, k)", {"k": np.zeros(4, np.int64)}),
    "Slice": ("Slice(a, s, e, s)", {"s": np.array([0]), "e": np.array([2**31 - 1])}),
    "Slice of a known axis": ("Slice(a, s, e, k, k)", {"s": np.array([0]), "e": np.array([3]), "k": np.array([1])}),
    "Add": ("Add(a, k)", {"k": np.array(0, F32)}),
    "Add on the left": ("Add(k, a)", {"k": ZEROS(3, F32)}),
    "Sub": ("Sub(a, k)", {"k": ZEROS((1, 3), F32)}),
    "Mul": ("Mul(k, a)", {"k": ONES((1, 1), F32)}),
    "Div": ("Div(a, k)", {"k": ONES(1, F32)}),
}


@pytest.mark.parametrize("case", NOTHING)
def test_removes_what_does_nothing(parse, apply, case):
    expression, constants = NOTHING[case]
    assert apply(IdentityElimination(), parse(wrap(expression), **constants)).ops == ["Neg", "Abs"]


SOMETHING = {
    "Dropout in training": ("Dropout(a, k, t)", {"k": np.array(0.0, F32), "t": np.array(True)}),
    "Transpose": ("Transpose(a)", {}),
    "Reshape": ("Reshape(a, k)", {"k": np.array([3, -1])}),
    "Reshape to the other order": ("Reshape(a, k)", {"k": np.array([-1, 1])}),
    "Reshape to a fixed batch": ("Reshape(a, k)", {"k": np.array([1, 3])}),
    "Flatten": ("Flatten<axis = 0>(a)", {}),
    "Cast": ("Cast<to = 11>(a)", {}),
    "Pad": ("Pad(a, k)", {"k": np.array([0, 0, 0, 1])}),
    "Slice from 1": ("Slice(a, s, e)", {"s": np.array([1]), "e": np.array([2**31 - 1])}),
    "Slice by 2": (
        "Slice(a, s, e, s, k)",
        {"s": np.array([0]), "e": np.array([2**31 - 1]), "k": np.array([2])},
    ),
    "Slice of an unknown axis": ("Slice(a, s, e, s)", {"s": np.array([0]), "e": np.array([100])}),
    "Add of something": ("Add(a, k)", {"k": np.array([0, 0, 1], F32)}),
    "Add that widens": ("Add(a, k)", {"k": ZEROS((1, 1, 1), F32)}),
    "Add that may widen": ("Add(a, k)", {"k": ZEROS((2, 3), F32)}),
    "Sub from 0": ("Sub(k, a)", {"k": np.array(0, F32)}),
    "Div of 1": ("Div(k, a)", {"k": np.array(1, F32)}),
    "Concat of two": ("Concat<axis = 0>(a, a)", {}),
}


@pytest.mark.parametrize("case", SOMETHING)
def test_leaves_alone_what_does_something(parse, apply, case):
    expression, constants = SOMETHING[case]
    y = "double[A, B] y" if case == "Cast" else "float[A, B, C] y" if case == "Add that widens" else "float[A, B] y"
    assert apply(IdentityElimination(), parse(wrap(expression, y=y), **constants)).status == "unchanged"


def test_a_graph_output_keeps_its_name(parse, apply):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a = Neg(x)
        c = Relu(a)
        y = Identity(a)
    }"""
    outcome = apply(IdentityElimination(), parse(text))
    assert outcome.ops == ["Neg", "Relu"]
    assert outcome.node("Neg").output == outcome.node("Relu").input == ["y"]


@pytest.mark.parametrize(
    "text",
    [
        "agraph (float[N, 3] x) => (float[N, 3] y) { y = Identity(x) }",
        "agraph (float[N, 3] x) => (float[N, 3] y, float[3] z) { y = Neg(x)\n z = Identity(k) }",
        "agraph (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Neg(x)\n z = Identity(y) }",
    ],
    ids=["input", "initialiser", "output"],
)
def test_both_names_must_stay(parse, apply, weights, text):
    assert apply(IdentityElimination(), parse(text, k=weights(3))).status == "unchanged"


def test_what_a_subgraph_reads_is_renamed_for_it(parse, apply):
    text = """agraph (float[N, 3] x, bool flag) => (float[N, 3] y, float[N, 3] i) {
        a = Neg(x)
        i = Identity(a)
        y = If (flag) <
            then_branch = t () => (float[N, 3] t1) { t1 = Abs(a) },
            else_branch = e () => (float[N, 3] e1) { e1 = Identity(i) }
        >
    }"""
    outcome = apply(IdentityElimination(), parse(text))
    assert outcome.status == "applied"
    assert outcome.ops == ["Neg", "If"]


def test_leaves_unknown_shapes_alone(parse, apply):
    text = """agraph (float[N, 3] x, int64[2] s) => (float[N, 3] y) {
        r = Reshape(x, s)
        b = Reshape(r, k)
        y = Abs(b)
    }"""
    outcome = apply(IdentityElimination(), parse(text, k=np.array([3, -1])))
    assert outcome.status == "unchanged"


def test_a_scalar_output_keeps_its_shape(parse, apply):
    """Whatever computes the output gets the declared shape, which ``onnx.checker`` demands of outputs."""
    body = "body = g (int64 i, bool k, float s) => (bool l, float o) { l = Identity(k)\n o = Neg(s) }"
    text = f"agraph (float[3] x) => (float y) {{ a = ReduceSum<keepdims = 0>(x)\n b = Loop<{body}>(n, c, a)\n y = Identity(b) }}"
    found = apply(IdentityElimination(), parse(text, n=np.array(3), c=np.array(True)))
    assert found.ops == ["ReduceSum", "Loop"]
    onnx.checker.check_model(found.artifact.data)
