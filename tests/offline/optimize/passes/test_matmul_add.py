import numpy as np
import pytest

from penstock.offline.optimize.passes.matmul_add import MatMulAdd


def model(x="float[N, 3] x", y="float[N, 5] y", add="Add(p, b)"):
    return f"agraph ({x}) => ({y}) {{ p = MatMul(x, w)\n y = {add} }}"


@pytest.mark.parametrize("add", ["Add(p, b)", "Add(b, p)"])
@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_makes_a_gemm(parse, apply, weights, add, shape):
    outcome = apply(MatMulAdd(), parse(model(add=add), w=weights(3, 5), b=weights(*shape)))
    assert outcome.ops == ["Gemm"]
    assert outcome.node("Gemm").output == ["y"]


def test_leaves_other_ranks_alone(parse, apply, weights):
    text = model("float[N, 7, 3] x", "float[N, 7, 5] y")
    assert apply(MatMulAdd(), parse(text, w=weights(3, 5), b=weights(5))).status == "unchanged"


@pytest.mark.parametrize("shape", [(), (1,), (2, 5), (1, 1, 5)])
def test_leaves_other_biases_alone(parse, apply, weights, shape):
    text = model("float[2, 3] x", "float[*] y".replace("[*]", "[A, B, C]" if len(shape) == 3 else "[A, B]"))
    assert apply(MatMulAdd(), parse(text, w=weights(3, 5), b=weights(*shape))).status == "unchanged"


def test_leaves_integers_alone(parse, apply):
    text = model("int32[N, 3] x", "int32[N, 5] y")
    artifact = parse(text, w=np.ones((3, 5), np.int32), b=np.ones(5, np.int32))
    assert apply(MatMulAdd(), artifact).status == "unchanged"


def test_leaves_a_product_that_is_an_output_alone(parse, apply, weights):
    text = model(y="float[N, 5] y, float[N, 5] p")
    assert apply(MatMulAdd(), parse(text, w=weights(3, 5), b=weights(5))).status == "unchanged"


def test_leaves_old_opsets_alone(parse, apply, weights):
    assert apply(MatMulAdd(), parse(model(), opset=9, w=weights(3, 5), b=weights(5))).status == "unchanged"
