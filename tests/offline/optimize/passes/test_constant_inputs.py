from penstock.offline.optimize.optimizer import optimize
from penstock.offline.optimize.passes.constant_inputs import ConstantInputs, with_constant_inputs

TEXT = "agraph (float[N, 3] x, float[3, 3] w, float[3] unused) => (float[N, 3] y) { y = MatMul(x, w) }"


def test_inputs_with_a_default_become_constants(parse, apply, weights):
    outcome = apply(ConstantInputs(), parse(TEXT, w=weights(3, 3), unused=weights(3)))
    assert [value.name for value in outcome.graph.input] == ["x"]
    assert outcome.ops == ["MatMul"]


def test_inputs_without_a_default_stay(parse, apply):
    text = "agraph (float[N, 3] x, float[3, 3] w) => (float[N, 3] y) { y = MatMul(x, w) }"
    assert apply(ConstantInputs(), parse(text)).status == "unchanged"


def test_a_model_without_such_inputs_is_the_same_artifact(parse, weights):
    plain = parse("agraph (float[N, 3] x) => (float[N, 3] y) { y = Neg(x) }")
    assert with_constant_inputs(plain) is plain
    both = parse(TEXT, w=weights(3, 3), unused=weights(3))
    assert with_constant_inputs(both) != both


def test_weights_that_are_inputs_can_be_fused(parse, weights):
    text = """agraph (float[N, 3] x, float[3, 3] w, float[3] b) => (float[N, 3] y) {
        a = MatMul(x, w)
        y = Add(a, b)
    }"""
    model = parse(text, w=weights(3, 3), b=weights(3))
    found, report = optimize(model)
    assert {"constant_inputs", "matmul_add"} <= set(report.applied)
    assert found.digest != model.digest
