import numpy as np
import pytest

from penstock.offline.optimize.passes.bias_folding import BiasFolding


def conv(expression, conv_expression="Conv(x, w)"):
    return f"""agraph (float[N, 3, 6, 6] x) => (float[N, C, H, W] y) {{
        c = {conv_expression}
        y = {expression}
    }}"""


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("expression", ["Add(c, k)", "Add(k, c)", "Sub(c, k)", "Sub(k, c)", "Mul(k, c)", "Div(c, k)"])
def test_folds_a_constant_per_channel_into_a_conv(parse, apply, weights, shape, expression):
    outcome = apply(BiasFolding(), parse(conv(expression), w=weights(4, 3, 3, 3), k=weights(*shape)))
    assert outcome.ops == ["Conv"]
    assert outcome.node("Conv").output == ["y"]


def test_adds_to_the_bias_that_is_there(parse, apply, weights):
    b, k = weights(4), weights(4, 1, 1)
    outcome = apply(BiasFolding(), parse(conv("Add(c, k)", "Conv(x, w, b)"), w=weights(4, 3, 3, 3), b=b, k=k))
    bias = outcome.constants[outcome.node("Conv").input[2]]
    np.testing.assert_array_equal(bias, (b.astype(np.float64) + k.reshape(-1)).astype(np.float32))


def test_folds_a_chain_from_the_conv_on(parse, apply, weights):
    text = """agraph (float[N, 3, 6, 6] x) => (float[N, 4, H, W] y) {
        c = Conv(x, w)
        s = Mul(c, k)
        y = Add(s, k)
    }"""
    assert apply(BiasFolding(), parse(text, w=weights(4, 3, 3, 3), k=weights(4, 1, 1))).ops == ["Conv"]


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (1, 1)])
@pytest.mark.parametrize("expression", ["Add(c, k)", "Mul(c, k)", "Sub(k, c)"])
@pytest.mark.parametrize("bias", [None, (), (5,)])
def test_folds_into_a_gemm_with_alpha_and_beta(parse, apply, weights, shape, expression, bias):
    given = {} if bias is None else {"b": weights(*bias)}
    text = f"""agraph (float[N, 3] x) => (float[N, 5] y) {{
        c = Gemm<alpha = 0.5, beta = 3.0>(x, w{", b" if given else ""})
        y = {expression}
    }}"""
    assert apply(BiasFolding(), parse(text, w=weights(3, 5), k=weights(*shape), **given)).ops == ["Gemm"]


LEFT_ALONE = {
    "along the last axis": ("Add(c, k)", (4,)),
    "along the width": ("Add(c, k)", (1, 4)),
    "a map": ("Add(c, k)", (1, 1, 4, 4)),
    "per sample": ("Add(c, k)", (2, 4, 1, 1)),
    "constant over result": ("Div(k, c)", (4, 1, 1)),
    "result twice": ("Add(c, c)", (4, 1, 1)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_leaves_other_broadcasts_alone(parse, apply, weights, case):
    expression, shape = LEFT_ALONE[case]
    assert apply(BiasFolding(), parse(conv(expression), w=weights(4, 3, 3, 3), k=weights(*shape))).status == "unchanged"


def test_leaves_a_constant_that_widens_one_channel_alone(parse, apply, weights):
    outcome = apply(BiasFolding(), parse(conv("Add(c, k)"), w=weights(1, 3, 3, 3), k=weights(5, 1, 1)))
    assert outcome.status == "unchanged"


def test_leaves_a_division_by_zero_alone(parse, apply, weights):
    k = np.array([1, 0, 1, 1], np.float32).reshape(4, 1, 1)
    assert apply(BiasFolding(), parse(conv("Div(c, k)"), w=weights(4, 3, 3, 3), k=k)).status == "unchanged"


def test_leaves_a_gemm_with_a_bias_per_row_alone(parse, apply, weights):
    text = """agraph (float[5, 3] x) => (float[5, 5] y) {
        c = Gemm(x, w, b)
        y = Add(c, k)
    }"""
    artifact = parse(text, w=weights(3, 5), b=weights(5, 1), k=weights(5))
    assert apply(BiasFolding(), artifact).status == "unchanged"


def test_leaves_a_result_that_is_read_twice_alone(parse, apply, weights):
    text = """agraph (float[N, 3, 6, 6] x) => (float[N, 4, H, W] y, float[N, 4, H, W] z) {
        c = Conv(x, w)
        y = Add(c, k)
        z = Relu(c)
    }"""
    assert apply(BiasFolding(), parse(text, w=weights(4, 3, 3, 3), k=weights(4, 1, 1))).status == "unchanged"
