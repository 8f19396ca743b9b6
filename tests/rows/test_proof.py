# ruff: noqa: E501 - a model is easier to read in one line
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import benchmarks.models
import models
import penstock
from benchmarks.compression import nets
from penstock.artifact import Artifact, Format
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.rows.proof import unproven
from penstock.tensor import DataType, Signature, TensorSpec
from row_graphs import RandomGraph, apart, objection, parsed

X = Signature((TensorSpec("x", DataType.FP32, (-1, 4)),), (TensorSpec("y", DataType.FP32, (-1, 4)),))
BRANCHES = "<then_branch = a () => (float[N,4] p) { p = Relu(x) }, else_branch = b () => (float[N,4] q) { q = Neg(x) }>"
DEPENDENT = {
    "only at large values": ("m = ReduceMean<axes = [0]>(x) d = Sub(m, c) r = Relu(d) y = Sub(x, r)", "'m' (ReduceMean) mixes"),
    "weakly": ("m = ReduceMean<axes = [0]>(x) w = Mul(m, e) y = Sub(x, w)", "'m' (ReduceMean) mixes"),
    "by the batch size": (f"n = Size(x) g = Greater(n, k) y = If {BRANCHES}(g)", "'y' (If) selects a branch by the content or number of rows"),
    "by the range of all": ("a, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(a, s, z)", "computes its scale from all rows"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "reason"), DEPENDENT.values(), ids=DEPENDENT.keys())
def test_rows_that_depend_on_each_other_although_probing_may_not_show_it(body: str, reason: str) -> None:
    model = parsed(body, weights="float c = {100}, float e = {0.02}, int64 k = {8}")
    assert reason in objection(model)
    assert apart(model) != ""


@pytest.mark.parametrize("block", range(10))
def test_random_graphs_that_are_proven_keep_rows_apart(block: int) -> None:
    proven = 0
    for seed in range(block * 30, block * 30 + 30):
        model = RandomGraph(seed).artifact()
        if not objection(model):
            proven += 1
            assert (seed, apart(model)) == (seed, "")
    assert proven


def test_random_graphs_have_dependent_rows_too() -> None:
    graphs = [RandomGraph(seed).artifact() for seed in range(20)]
    assert sum(bool(objection(model)) and bool(apart(model)) for model in graphs) > 3


NETS = [nets.plain, nets.depthwise, nets.deep, nets.residual, nets.mlp, nets.encoder, nets.autoencoder, nets.lenet_300_100, nets.lenet_5]  # fmt: skip
BENCHMARKS = [
    benchmarks.models.mlp,
    benchmarks.models.small_cnn,
    benchmarks.models.resnet18,
    benchmarks.models.mobilenet,
    benchmarks.models.encoder,
]
SMALL = [models.linear, models.dynamic_image, models.sum_and_difference, models.input_as_output, models.unread_input, models.gather]  # fmt: skip


@pytest.mark.parametrize("make", [*NETS, *SMALL])
def test_small_models_are_proven(make: Callable[[], Artifact]) -> None:
    assert objection(make()) == ""


@pytest.mark.parametrize("make", BENCHMARKS)
def test_models_of_the_benchmarks_are_proven(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert objection(Artifact.from_file(make(tmp_path / "m.onnx"))) == ""


@pytest.mark.parametrize("datatype", list(DataType))
def test_every_datatype(datatype: DataType) -> None:
    assert objection(models.identity(datatype)) == ""


def test_the_example_is_proven() -> None:
    assert objection(Artifact.from_file("examples/digits/model.onnx")) == ""


@pytest.mark.parametrize(
    ("precision", "operator"),
    [
        ("int8", "QuantizeLinear"),
        ("int8-weights", "MatMulNBits"),
        ("int4-weights", "MatMulNBits"),
        ("fp16-weights", "Cast"),
        ("int8-dynamic", "DynamicQuantizeLinear"),
    ],
)
def test_what_quantisation_makes_of_a_model_is_proven_unless_its_ranges_are_those_of_the_batch(
    precision: str, operator: str, tmp_path: Path
) -> None:
    data = (
        {"input": np.random.default_rng(0).random((8, 1, 28, 28), np.float32)} if "weights" not in precision else None
    )
    options = {"method": "min-max", "placement": "wide", "equalize": False} if precision == "int8" else {}
    penstock.compress.quantize(nets.lenet_300_100(), data, output=tmp_path / "q.onnx", precision=precision, **options)
    made = Artifact.from_file(tmp_path / "q.onnx")
    assert operator in {node.op_type for node in onnx.load_model_from_string(made.data).graph.node}
    assert ("computes its scale from all rows of a batch" in objection(made)) == (precision == "int8-dynamic")
    assert bool(objection(made)) == (precision == "int8-dynamic")


def test_an_input_with_a_default_value_is_examined_with_it_and_without() -> None:
    spec, sent = TensorSpec("b", DataType.FP32, (-1, 4)), "float[1,4] b = {1,2,3,4}"
    both = Signature((*X.inputs, spec), X.outputs)
    assert unproven(parsed("y = Add(x, b)", "float[N,4] x, float[N,4] b", weights=sent), both) == ""
    mixed = parsed("m = ReduceMean<axes = [0]>(b) y = Add(x, m)", "float[N,4] x, float[N,4] b", weights=sent)
    assert unproven(mixed, X) == ""
    assert "node 'm' (ReduceMean) mixes" in unproven(mixed, both)
    table = parsed("y = Add(x, b)", "float[N,4] x, float[N,4] b", weights="float[2,4] b = {1,2,3,4,5,6,7,8}")
    assert "node 'y' (Add) combines rows" in unproven(table, both)


def test_outputs_that_are_not_served_do_not_matter() -> None:
    model = parsed("y = Relu(x) m = ReduceMean<axes = [0]>(x)", outputs="float[N,4] y, float[1,4] m")
    assert unproven(model, X) == ""
    assert "node 'm' (ReduceMean) mixes" in objection(model)


def test_models_of_which_nothing_can_be_said() -> None:
    fixed = Signature(X.inputs, (TensorSpec("y", DataType.FP32, (1, 4)),))
    assert unproven(models.linear(), fixed) == "output 'y' of the model, [1, 4], has no free first dimension"
    script = Artifact.from_bytes(b"script", Format.TORCHSCRIPT)
    assert unproven(script, X) == "only ONNX models can be examined, not models of format 'torchscript'"
    assert unproven(Artifact.from_bytes(b"\x3a\xff"), X).startswith("its graph cannot be read: ")
    assert unproven(Artifact.from_bytes(b""), X) == "the graph reads 'y', which is not known"
    assert "node 'y' (Frobnicate) is an operator that is not known" in unproven(
        models.unknown_operator(), Signature((TensorSpec("x", DataType.FP32, (-1, 2)),), X.outputs)
    )


def test_names_in_reasons_are_short_and_printable() -> None:
    model = onnx.load_model_from_string(parsed("y = Softmax<axis = 0>(x)").data)
    model.graph.node[0].name = "a\x1b[31m\n" + "b" * 5000
    reason = unproven(Artifact.from_bytes(model.SerializeToString()), X)
    assert reason.startswith("node 'a?[31m?bbb")
    assert len(reason) < 200
    assert reason.isprintable()


def test_a_thousand_nodes_take_less_than_50_ms() -> None:
    layers = "".join(
        f"m{n} = MatMul(b{n}, w) a{n} = Add(m{n}, v) r{n} = Relu(a{n}) s{n} = Reshape(r{n}, cube) t{n} = Transpose<perm = [0, 2, 1]>(s{n}) "
        f"h{n} = Shape(b{n}) i{n} = Gather(h{n}, zero) j{n} = Concat<axis = 0>(i{n}, rest) k{n} = Reshape(t{n}, j{n}) b{n + 1} = Add(k{n}, b{n}) "
        for n in range(100)
    )
    weights = (
        "float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4] v = {1,2,3,4}, int64[3] cube = {0,2,2}, "
        "int64[1] zero = {0}, int64[1] rest = {-1}"
    )
    model = parsed(f"b0 = Relu(x) {layers} y = Relu(b100)", weights=weights)
    signature, times = OnnxRuntimeEngine().load(model, {"threads": 1}).signature, []
    for _ in range(5):
        start = time.thread_time()
        assert unproven(model, signature) == ""
        times.append(time.thread_time() - start)
    assert min(times) < 0.05, times
