import numpy as np
import pytest

from penstock.offline.optimize.passes.conv_batch_norm import ConvBatchNorm

CONV = """agraph (float[N, 3, 6, 6] x) => (float[N, 4, H, W] y) {
    c = Conv(x, w, b)
    y = BatchNormalization(c, gamma, beta, mean, var)
}"""


@pytest.fixture
def norm(weights):
    def parameters(channels):
        return {name: weights(channels) for name in ("gamma", "beta", "mean", "var")}

    return parameters


def test_folds_into_a_conv_with_a_bias(parse, apply, weights, norm):
    outcome = apply(ConvBatchNorm(), parse(CONV, w=weights(4, 3, 3, 3), b=weights(4), **norm(4)))
    assert outcome.ops == ["Conv"]
    assert outcome.node("Conv").output == ["y"]


def test_folds_into_a_conv_without_a_bias_and_keeps_its_attributes(parse, apply, weights, norm):
    text = CONV.replace("Conv(x, w, b)", "Conv<group = 1, pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)")
    outcome = apply(ConvBatchNorm(), parse(text, w=weights(4, 3, 3, 3), **norm(4)))
    assert outcome.ops == ["Conv"]
    assert {attribute.name for attribute in outcome.node("Conv").attribute} == {"group", "pads", "strides"}


def test_folds_in_double_precision(parse, apply, weights, norm):
    w, b, parameters = weights(4, 3, 3, 3), weights(4), norm(4)
    outcome = apply(ConvBatchNorm(), parse(CONV, w=w, b=b, **parameters))
    wide = {name: array.astype(np.float64) for name, array in parameters.items()}
    scale = wide["gamma"] / np.sqrt(wide["var"] + np.float32(1e-5))
    _, weight, bias = (outcome.constants.get(name) for name in outcome.node("Conv").input)
    np.testing.assert_array_equal(weight, (w * scale[:, None, None, None]).astype(np.float32))
    np.testing.assert_array_equal(bias, (b * scale + wide["beta"] - wide["mean"] * scale).astype(np.float32))


def test_the_epsilon_of_the_node_counts(parse, apply, weights, norm):
    text = CONV.replace("BatchNormalization(", "BatchNormalization<epsilon = 0.5>(")
    w, b, parameters = weights(4, 3, 3, 3), weights(4), norm(4)
    outcome = apply(ConvBatchNorm(), parse(text, w=w, b=b, **parameters))
    wide = {name: array.astype(np.float64) for name, array in parameters.items()}
    scale = wide["gamma"] / np.sqrt(wide["var"] + 0.5)
    weight = outcome.constants[outcome.node("Conv").input[1]]
    np.testing.assert_array_equal(weight, (w * scale[:, None, None, None]).astype(np.float32))


@pytest.mark.parametrize("groups", [1, 2])
def test_folds_into_a_transposed_convolution(parse, apply, weights, norm, groups):
    text = f"""agraph (float[N, 4, 5, 5] x) => (float[N, 6, H, W] y) {{
        c = ConvTranspose<group = {groups}>(x, w)
        y = BatchNormalization(c, gamma, beta, mean, var)
    }}"""
    assert apply(ConvBatchNorm(), parse(text, w=weights(4, 6 // groups, 3, 3), **norm(6))).ops == ["ConvTranspose"]


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", ["scalar", "row", "none"])
def test_folds_into_a_gemm(parse, apply, weights, norm, transposed, bias):
    shape = {"scalar": (), "row": (1, 5)}.get(bias)
    given = {} if shape is None else {"b": weights(*shape)}
    text = f"""agraph (float[N, 3] x) => (float[N, 5] y) {{
        c = Gemm<alpha = 0.5, beta = 2.0, transB = {transposed}>(x, w{", b" if given else ""})
        y = BatchNormalization(c, gamma, beta, mean, var)
    }}"""
    w = weights(5, 3) if transposed else weights(3, 5)
    assert apply(ConvBatchNorm(), parse(text, w=w, **given, **norm(5))).ops == ["Gemm"]


def test_copies_weights_that_are_shared(parse, apply, weights, norm):
    text = """agraph (float[N, 3, 6, 6] x) => (float[N, 4, H, W] y, float[N, 4, H, W] z) {
        c = Conv(x, w)
        y = BatchNormalization(c, gamma, beta, mean, var)
        z = Conv(x, w)
    }"""
    w = weights(4, 3, 3, 3)
    outcome = apply(ConvBatchNorm(), parse(text, w=w, **norm(4)))
    assert outcome.ops == ["Conv", "Conv"]
    np.testing.assert_array_equal(outcome.constants["w"], w)


def test_folds_in_half_precision(parse, apply, weights, norm):
    text = CONV.replace("float[", "float16[")
    given = {"w": weights(4, 3, 3, 3), "b": weights(4), **norm(4)}
    halves = {name: array.astype(np.float16) for name, array in given.items()}
    assert apply(ConvBatchNorm(), parse(text, **halves)).ops == ["Conv"]


LEFT_ALONE = {
    "the convolution's result is read twice": """agraph (float[N, 3, 6, 6] x) => (float[N, 4, H, W] y, float[N, 4, H, W] r) {
        c = Conv(x, w, b)
        r = Relu(c)
        y = BatchNormalization(c, gamma, beta, mean, var)
    }""",
    "the convolution's result is a graph output": """agraph (float[N, 3, 6, 6] x)
    => (float[N, 4, H, W] y, float[N, 4, H, W] c) {
        c = Conv(x, w, b)
        y = BatchNormalization(c, gamma, beta, mean, var)
    }""",
    "training mode": CONV.replace("BatchNormalization(", "BatchNormalization<training_mode = 1>(").replace(
        "y =", "y, m, v ="
    ),
    "computed scale": CONV.replace("y =", "g2 = Abs(gamma)\n y =").replace("(c, gamma", "(c, g2"),
    "computed weight": CONV.replace("c =", "w2 = Abs(w)\n c =").replace("(x, w,", "(x, w2,"),
    "no linear operator before": CONV.replace("Conv(x, w, b)", "Relu(x4)").replace(
        "float[N, 3, 6, 6] x", "float[N, 4, 6, 6] x4"
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_leaves_alone(parse, apply, weights, norm, case):
    artifact = parse(LEFT_ALONE[case], w=weights(4, 3, 3, 3), b=weights(4), **norm(4))
    outcome = apply(ConvBatchNorm(), artifact)
    assert outcome.status == "unchanged"
    assert outcome.artifact.data == artifact.data


def test_leaves_overridable_weights_alone(parse, apply, weights, norm):
    text = CONV.replace("float[N, 3, 6, 6] x", "float[N, 3, 6, 6] x, float[4, 3, 3, 3] w")
    outcome = apply(ConvBatchNorm(), parse(text, w=weights(4, 3, 3, 3), b=weights(4), **norm(4)))
    assert outcome.status == "unchanged"


def test_leaves_negative_variance_alone(parse, apply, weights, norm):
    parameters = norm(4) | {"var": np.full(4, -1, np.float32)}
    assert apply(ConvBatchNorm(), parse(CONV, w=weights(4, 3, 3, 3), b=weights(4), **parameters)).status == "unchanged"


def test_leaves_a_scale_without_limit_alone(parse, apply, weights, norm):
    text = CONV.replace("BatchNormalization(", "BatchNormalization<epsilon = 0.5>(")
    parameters = norm(4) | {"var": np.array([1, -0.5, 1, 1], np.float32)}
    assert apply(ConvBatchNorm(), parse(text, w=weights(4, 3, 3, 3), b=weights(4), **parameters)).status == "unchanged"


def test_leaves_a_conv_alone_whose_result_a_subgraph_captures(parse, apply, weights, norm):
    text = """agraph (float[N, 3, 6, 6] x, bool flag) => (float[N, 4, H, W] y, float[N, 4, H, W] z) {
        c = Conv(x, w)
        y = BatchNormalization(c, gamma, beta, mean, var)
        z = If (flag) <
            then_branch = t () => (float[N, 4, H, W] t1) { t1 = Relu(c) },
            else_branch = e () => (float[N, 4, H, W] e1) { e1 = Neg(c) }
        >
    }"""
    assert apply(ConvBatchNorm(), parse(text, w=weights(4, 3, 3, 3), **norm(4))).status == "unchanged"


def test_leaves_one_channel_of_negative_variance_alone(parse, apply, weights, norm):
    parameters = norm(4) | {"var": np.array([1, -1, 1, 1], np.float32)}
    assert apply(ConvBatchNorm(), parse(CONV, w=weights(4, 3, 3, 3), b=weights(4), **parameters)).status == "unchanged"


@pytest.mark.parametrize(("opset", "attributes", "status"), [(7, "", "applied"), (6, "<is_test = 1>", "unchanged")])
def test_folds_from_opset_7(parse, apply, weights, norm, opset, attributes, status):
    text = CONV.replace("BatchNormalization(", f"BatchNormalization{attributes}(")
    outcome = apply(ConvBatchNorm(), parse(text, opset, w=weights(4, 3, 3, 3), b=weights(4), **norm(4)))
    assert outcome.status == status


GEMM = """agraph (float[N, 3] x) => (float[N, 5] y) {
    c = Gemm(x, w, b)
    y = BatchNormalization(c, gamma, beta, mean, var)
}"""


def test_leaves_a_norm_per_activation_alone(parse, apply, weights, norm):
    text = GEMM.replace("BatchNormalization(", "BatchNormalization<spatial = 0>(")
    assert apply(ConvBatchNorm(), parse(text, 7, w=weights(3, 5), b=weights(5), **norm(5))).status == "unchanged"
    text = GEMM.replace("BatchNormalization(", "BatchNormalization<spatial = 1>(")
    assert apply(ConvBatchNorm(), parse(text, 7, w=weights(3, 5), b=weights(5), **norm(5))).status == "applied"


def test_leaves_a_norm_alone_whose_statistics_are_read(parse, apply, weights, norm):
    text = GEMM.replace("float[N, 5] y)", "float[N, 5] y, float[5] m)").replace("y =", "y, m, v, s, t =")
    assert apply(ConvBatchNorm(), parse(text, 9, w=weights(3, 5), b=weights(5), **norm(5))).status == "unchanged"


def test_leaves_parameters_of_another_shape_alone(parse, apply, weights, norm):
    parameters = norm(5) | {"beta": weights(1, 5)}
    assert apply(ConvBatchNorm(), parse(GEMM, w=weights(3, 5), b=weights(5), **parameters)).status == "unchanged"
