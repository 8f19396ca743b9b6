# ruff: noqa: E501 - a model is easier to read in one line
"""Models of other float types give the same answers in FP32, up to rounding, with the same inputs and outputs."""

import re
from collections.abc import Iterator
from unittest.mock import patch

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from models import linear
from penstock.artifact import Artifact
from penstock.errors import Unsupported
from penstock.offline.compress.fp32.single import in_single
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import loaded, signature_of
from penstock.tensor import Array, DataType
from tests import random_models
from tests.random_models import RandomModel, make_genes
from tests.row_graphs import parsed

TOLERANCES = {np.float16: 3e-2, np.float64: 1e-4, ml_dtypes.bfloat16: 2e-1}


def run(artifact: Artifact, **inputs: Array) -> list[Array]:
    with loaded(artifact, as_written=True) as model:
        return list(model.forward(inputs).values())


def types(artifact: Artifact) -> list[tuple[str, DataType]]:
    signature = signature_of(artifact)
    return [(spec.name, spec.datatype) for spec in (*signature.inputs, *signature.outputs)]


def kinds(artifact: Artifact) -> set[int]:
    """The types of the weights."""
    return {tensor.data_type for tensor in onnx.load_model_from_string(artifact.data).graph.initializer}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), kind=st.sampled_from([np.float16, np.float64]))
def test_random_models_answer_alike_in_fp32(seed: int, kind: type) -> None:
    try:
        with patch.object(random_models, "_FLOATS", (kind,)):
            random = RandomModel(make_genes(seed))
            model = random.artifact()
    except onnx.checker.ValidationError:  # ONNX Runtime takes operators of later opsets
        reject()
    try:
        made = in_single(model)
    except Unsupported as error:
        # ONNX Runtime fuses a Cast into a LayerNormalization, and then refuses it. ONNX does not infer the type of GroupNormalization.
        assert re.search("LayerNormFusion|type of tensor .* is not known", error.message)  # noqa: PT017
        return
    signature = signature_of(model)
    assert types(made) == types(model)
    for count in (1, random.fixed_rows or 5):
        values = random.rows(random.fixed_rows or count, seed).values()
        rows = dict(zip((spec.name for spec in signature.inputs), values, strict=True))
        for want, got in zip(run(model, **rows), run(made, **rows), strict=True):
            largest = max(np.abs(want.astype(np.float64)).max(initial=0.0), 1e-2)
            assert want.dtype == got.dtype
            assert want.shape == got.shape
            np.testing.assert_allclose(
                got.astype(np.float64) / largest, want.astype(np.float64) / largest, atol=TOLERANCES[kind]
            )


def test_models_in_fp32_are_returned_as_they_are() -> None:
    model = linear()
    assert in_single(model) is model


def half(text: str) -> str:
    """``text`` with the numbers of FP16 constants as bits, as ONNX's text form has them."""
    return re.sub(
        r"(float16(?:\[[\d,]*\])? (?:w = )?){([^}]*)}", lambda found: f"{found[1]}{{{_bits(found[2])}}}", text
    )


def _bits(numbers: str) -> str:
    return ",".join(str(np.float16(number).view(np.uint16)) for number in numbers.split(","))


def model_of(body: str, inputs: str = "float16[N,4] x", outputs: str = "float16[N,4] y", weights: str = "") -> Artifact:
    return parsed(half(body), inputs, outputs, half(weights or HALF))


HALF = "float16[4,4] w = {1,2,0.5,1,0,1,2,0,3,1,1,0,1,0,0,1}"
DOUBLE = HALF.replace("float16", "double")
X16 = "float16[N,4] x"
MODELS: dict[str, Artifact] = {
    "weights": model_of("y = MatMul(x, w)"),
    "constant node": model_of("c = Constant<value = float16[4] {1,2,3,4}>() p = MatMul(x, w) y = Add(p, c)"),
    "constant as output": model_of("c = Constant<value = float16[2] {1,2}>() p = MatMul(x, w) y = Mul(p, p)", X16, "float16[N,4] y, float16[2] c"),
    "weight as output": model_of("y = MatMul(x, w)", X16, "float16[N,4] y, float16[4,4] w"),
    "output that is read": model_of("y = MatMul(x, w) z = Relu(y)", X16, "float16[N,4] y, float16[N,4] z"),
    "input as output": model_of("y = MatMul(x, w) z = Identity(x)", X16, "float16[N,4] y, float16[N,4] z"),
    "casts inside": model_of("a = Cast<to=1>(x) b = Relu(a) c = Cast<to=10>(b) y = MatMul(c, w)"),
    "FP32 outside": model_of("a = Cast<to=10>(x) b = MatMul(a, w) y = Cast<to=1>(b)", inputs="float[N,4] x", outputs="float[N,4] y"),
    "filled": model_of("s = Shape(x) f = ConstantOfShape<value = float16[1] {2}>(s) g = Add(x, f) y = MatMul(g, w)"),
    "cast like": model_of("f = Cast<to=1>(x) g = CastLike(f, w) y = MatMul(g, w)"),
    "random like": model_of("e = EyeLike<dtype=10>(x) g = Add(x, e) y = MatMul(g, w)"),
    "sizes": model_of(
        "p = MatMul(x, w) s = Shape(p) f = Cast<to=10>(s) c = Constant<value = float16 {0.35}>() g = Mul(f, c) h = Ceil(g) n = Cast<to=7>(h) q = ReduceMax(p) y = Expand(q, n)",
        X16, "float16[A,B] y",
    ),
    "range": model_of("p = MatMul(x, w) r = Range(a, b, c) m = ReduceSum<keepdims=0>(p) y = Mul(r, m)", "double[N,4] x", "double[K] y", DOUBLE + ", double a = {0}, double b = {0.3}, double c = {0.1}"),
    "branches": model_of(
        "p = MatMul(x, w) m = ReduceMax<keepdims=0>(p) z = Constant<value = float16 {0}>() b = Greater(m, z) "
        "y = If(b) <then_branch = one () => (float16[N,4] t) { t = Mul(p, p) }, else_branch = two () => (float16[N,4] e) { k = Constant<value = float16 {3}>() e = Mul(x, k) }>",
            ),
    "branch of a constant": model_of(
        "p = MatMul(x, w) m = ReduceMax<keepdims=0>(p) z = Constant<value = float16 {0}>() b = Greater(m, z) "
        "q = If(b) <then_branch = one () => (float16 t) { t = Constant<value = float16 {3}>() }, else_branch = two () => (float16 e) { e = Identity(m) }> y = Mul(p, q)",
            ),
    "loop": model_of(
        "n = Constant<value = int64 {3}>() t = Constant<value = bool {1}>() p = MatMul(x, w) "
        "y, all = Loop(n, t, p) <body = g (int64 i, bool c, float16[N,4] a) => (bool d, float16[N,4] o, float16[N,4] s) { d = Identity(c) f = Cast<to=10>(i) b = Add(a, f) k = Constant<value = float16 {0.5}>() o = Mul(b, k) s = Add(o, x) }>",
        X16, "float16[N,4] y, float16[K,N,4] all",
    ),
    "sequence": model_of("p = MatMul(x, w) s = SequenceConstruct(p, x) i = Constant<value = int64 {1}>() q = SequenceAt(s, i) y = Add(p, q)"),
    "function": model_of(
        'y = local.f (x, w) FUNCTIONS <domain: "local", opset_import: ["": 17]> f (a, b) => (c) { d = MatMul(a, b) e = Constant<value = float16 {2}>() c = Mul(d, e) }',
            ),
    "mask beyond FP32": model_of("p = MatMul(x, w) b = Greater(x, z) q = Where(b, p, m) y = Softmax(q)", "double[N,4] x", "double[N,4] y", DOUBLE + ", double z = {-1.5}, double m = {-1e300}"),
    "tiny epsilon": model_of("p = MatMul(x, w) a = Sub(p, p) b = Add(a, e) c = Div(a, b) y = Add(c, p)", "double[N,4] x", "double[N,4] y", DOUBLE + ", double e = {1e-300}"),
    "hash of the input": model_of("p = MatMul(x, w) i = Cast<to=7>(x) f = Cast<to=11>(i) y = Add(p, f)", "double[N,4] x", "double[N,4] y", DOUBLE),
    "text": model_of("p = MatMul(x, w) t = Cast<to=8>(x)", "double[N,4] x", "double[N,4] p, string[N,4] t", DOUBLE),
}  # fmt: skip


@pytest.fixture(params=MODELS, name="model")
def each_model(request: pytest.FixtureRequest) -> Artifact:
    return MODELS[request.param]


def values(model: Artifact) -> Iterator[Array]:
    """Rows of ordinary values, of zeros, of large values; one row and none."""
    dtype = signature_of(model).inputs[0].datatype.dtype
    rng = np.random.default_rng(0)
    yield from (rng.standard_normal((rows, 4)).astype(dtype) for rows in (1, 3, 20))
    yield np.zeros((2, 4), dtype)
    yield (rng.standard_normal((2, 4)) * 500).astype(dtype)


def test_every_construction_answers_alike(model: Artifact) -> None:
    made = in_single(model)
    assert types(made) == types(model)
    if "w" not in signature_of(model).output_names:
        assert onnx.TensorProto.FLOAT in kinds(made)
    for x in values(model):
        for version in (made, optimize(made)[0]):
            for want, got in zip(run(model, x=x), run(version, x=x), strict=True):
                assert want.dtype == got.dtype
                if want.dtype.kind != "f":
                    assert np.array_equal(want, got)
                else:
                    scale = np.maximum(np.abs(want).max(initial=0.0), 1e-2)
                    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2 * scale)


def test_numbers_that_the_caller_gave_stay_exact() -> None:
    """The input becomes integers and text without being rounded to FP32 first."""
    x = np.full((1, 4), 2.0**40 + 1)
    got = run(in_single(MODELS["hash of the input"]), x=x)[0] - run(in_single(MODELS["hash of the input"]), x=x - 1)[0]
    want = run(MODELS["text"], x=x)[1]
    assert np.array_equal(run(in_single(MODELS["text"]), x=x)[1], want)
    assert got.shape == (1, 4)


def test_unknown_types_are_refused() -> None:
    model = model_of("a = com.microsoft.Gelu(x) y = MatMul(a, w)")  # ONNX cannot infer the type of Gelu's result
    with pytest.raises(Unsupported, match="type of tensor 'a' is not known"):
        in_single(model)


def test_sequences_of_the_caller_are_refused() -> None:
    model = model_of("p = MatMul(x, w) y = SequenceConstruct(p, x)", X16, "seq(float16[N,4]) y")
    with pytest.raises(Unsupported, match="'y' is a sequence"):
        in_single(model)
