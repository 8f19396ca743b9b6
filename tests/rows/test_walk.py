import onnx
import pytest

import models
from fold_graphs import FoldGraph, wrong_folds
from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.rows.call import MICROSOFT, RULES
from penstock.rows.proof import unproven
from penstock.rows.walk import OPSETS
from penstock.tensor import DataType, Signature, TensorSpec
from row_graphs import keeps_rows, objection, parsed

W = "int64[1] zero = {0}, int64[1] one = {1}, int64 three = {3}, bool yes = {1}, float[4] w = {1,2,3,4}, int64 two = {2}"
BRANCHES = (
    "<then_branch = a () => (float[N,4] p) {{ p = Relu({}) }}, else_branch = b () => (float[N,4] q) {{ q = Neg({}) }}>"
)
BODY = "(int64 i, bool c, float[N,4] s) => (bool d, float[N,4] t, float[N,4] u)"


def branch(condition: str, of: str = "x") -> str:
    return f"y = If {BRANCHES.format(of, of)}({condition})"


@pytest.mark.parametrize(
    "body",
    [
        branch("yes"),
        # The length of the rows is the same for all of them.
        f"h = Shape(x) l = Gather(h, one) g = Greater(l, three) k = Squeeze(g) {branch('k')}",
        f"r = Relu(x) {branch('yes', 'r')}",
        f"e, o = Loop <body = b {BODY} {{ d = Identity(c) t = Mul(s, w) u = Neg(s) }}>(three, yes, x) y = Identity(e)",
        (f"e, o = Loop <body = b {BODY} {{ d = Identity(c) t = Mul(s, w) u = Neg(s) }}>(three, yes, x) "
        "y = ReduceSum<keepdims = 0>(o, zero)"),
        ("t = Transpose(x) m = ReduceMax<axes = [1], keepdims = 0>(x) e, o = Scan <num_scan_inputs = 1, "
        "body = b (float[N] s, float[N] v) => (float[N] a, float[N] b) { a = Add(s, v) b = Tanh(a) }>(m, t) y = Transpose(o)"),
        "y = local.twice(x) FUNCTIONS <opset_import: [\"\": 17], domain: \"local\"> twice (a) => (b) { c = Neg(a) b = Add(c, a) }",
        ("y = local.soft<ax = 1>(x) FUNCTIONS <opset_import: [\"\": 17], domain: \"local\"> soft <ax>(a) => (b) "
        "{ b = Softmax<axis: int = @ax>(a) }"),
        # What the outputs do not need does not matter.
        "m = ReduceMean(x) y = Relu(x)",
    ],
)  # fmt: skip
def test_graphs_in_graphs(body: str) -> None:
    keeps_rows(parsed(body, weights=W))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"n = Size(x) g = Greater(n, three) {branch('g')}", "node 'y' (If) selects a branch by the content or number of rows"),
        (f"m = ReduceMax<keepdims = 0>(x) g = Cast<to = 9>(m) {branch('g')}", "(ReduceMax) mixes the rows"),
        (f"{branch('yes').replace('Relu(x)', 'Softmax<axis = 0>(x)')}", "node 'p' (Softmax) mixes the rows"),
        (
            (f"h = Shape(x) n = Gather(h, zero) k = Squeeze(n) e, o = Loop <body = b {BODY} {{ d = Identity(c) t = Mul(s, w) "
            "u = Neg(s) }>(k, yes, x) y = Identity(e)"),
            "(Loop) has a number of iterations that depends on the rows, or on their number",
        ),
        (
            (f"e, o = Loop <body = b {BODY} {{ m = ReduceMax<keepdims = 0>(s) d = Cast<to = 9>(m) t = Mul(s, w) "
            "u = Neg(s) }>(three, yes, x) y = Identity(e)"),
            "(ReduceMax) mixes the rows",
        ),
        (
            ("m = ReduceMax<axes = [0], keepdims = 0>(w) r = Expand(m, l) e, o = Scan <num_scan_inputs = 1, "
            "body = b (float[4] s, float[4] v) => (float[4] a, float[4] b) { a = Add(s, v) b = Tanh(a) }>(r, x) y = Identity(o)"),
            "(Scan) iterates over the rows of a batch",
        ),
        (
            ("y = local.soft<ax = 0>(x) FUNCTIONS <opset_import: [\"\": 17], domain: \"local\"> soft <ax>(a) => (b) "
            "{ b = Softmax<axis: int = @ax>(a) }"),
            "(Softmax) mixes the rows",
        ),
        ("y = com.microsoft.Trilu(x)", "node 'y' (Trilu) is an operator that is not known to keep rows apart"),
    ],
)  # fmt: skip
def test_rows_that_meet_in_graphs_in_graphs(body: str, reason: str) -> None:
    assert reason in objection(parsed(body, outputs="y", weights=f"{W}, int64[1] l = {{4}}"))


def test_an_operator_set_that_is_not_described() -> None:
    relu = models.linear()
    model = onnx.load_model_from_string(relu.data)
    model.opset_import[0].version = 6
    signature = OnnxRuntimeEngine().load(relu, {}).signature
    reason = unproven(Artifact.from_bytes(model.SerializeToString()), signature)
    assert reason == "node 'y' (MatMul) is of opset 6, but only opsets 7 to 28 are supported"


def test_the_newest_operator_set_is_described() -> None:
    assert OPSETS[-1] >= onnx.defs.onnx_opset_version(), "look at what the new set changes, then extend OPSETS"


def test_every_rule_is_of_an_operator() -> None:
    known = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas_with_history()}
    # ``SimplifiedLayerNormalization`` is ONNX Runtime's, in ONNX's own domain.
    assert {each for each in RULES if each[0] != MICROSOFT} - known == {("", "SimplifiedLayerNormalization")}


@pytest.mark.parametrize(("outside", "inside"), [(11, 13), (12, 17), (17, 13)])
def test_functions_of_another_operator_set(outside: int, inside: int) -> None:
    """ONNX Runtime computes Softmax as in the model's set: before version 13 over all axes."""
    head = f'<opset_import: ["": {inside}], domain: "local"> soft (a) => (b)'
    body = f"{head} {{ c = Transpose(a) d = Softmax<axis = 0>(c) b = Transpose(d) }}"
    found = objection(parsed(f"y = local.soft(x) FUNCTIONS {body}", opset=outside))
    assert found == "node 'y' (soft) is a model function that imports a different opset than the model"


def test_a_domain_with_two_operator_sets() -> None:
    model = onnx.load_model_from_string(models.linear().data)
    model.opset_import.add(domain="ai.onnx", version=12)
    signature = OnnxRuntimeEngine().load(models.linear(), {}).signature
    reason = unproven(Artifact.from_bytes(model.SerializeToString()), signature)
    assert reason == "its graph cannot be read: a domain imports two opsets"


def test_a_domain_that_imports_one_operator_set_twice() -> None:
    """skl2onnx writes such models, and ONNX Runtime runs them."""
    model = onnx.load_model_from_string(models.linear().data)
    model.opset_import.add(domain="ai.onnx", version=model.opset_import[0].version)
    artifact = Artifact.from_bytes(model.SerializeToString())
    assert unproven(artifact, OnnxRuntimeEngine().load(artifact, {}).signature) == ""


def test_functions_that_call_one_another_end() -> None:
    layers = "".join(
        f'<opset_import: ["local": 1, "": 17], domain: "local"> f{n} (a) => (b) {{ c = local.f{n + 1}(a) b = local.f{n + 1}(c) }} '
        for n in range(30)
    )
    last = '<opset_import: ["": 17], domain: "local"> f30 (a) => (b) { b = Relu(a) }'
    model = parsed(f"y = local.f0(x) FUNCTIONS {layers}{last}")
    spec = TensorSpec("x", DataType.FP32, (-1, 4))
    reason = unproven(model, Signature((spec,), (TensorSpec("y", DataType.FP32, (-1, 4)),)))
    assert "a model of more than" in reason


@pytest.mark.parametrize("block", range(4))
def test_what_is_computed_before_a_request_is_what_onnx_runtime_computes(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        assert (seed, wrong_folds(FoldGraph(seed))) == (seed, [])
