"""Parity finds faults that real exporters have had, names the node, and accepts other rounding."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import inject
from benchmarks.onnx_source import OnnxSource
from penstock.clock import ManualClock
from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, Exported, Probes
from penstock.offline.convert.parity.parity import certify
from penstock.offline.convert.parity.patience import Patience
from penstock.tensor import Array
from tests.compared import LAYER_NORM, artifact, checked, parsed


@pytest.mark.parametrize("name", GRAPHS)
def test_holds_with_other_rounding(name: str) -> None:
    model = make(name)
    for seed in range(2):
        found = checked(model, model, seed=seed)
        assert found.holds, found
        assert found.cases >= 8
        assert found.max_error <= found.tolerance < (0.5 if "quantised" in name else 0.2 if "half" in name else 1e-2)


@pytest.mark.parametrize("name", ["half_mlp", "half_encoder", "half_resnet"])
@pytest.mark.parametrize("fault", ["gain of 2 %", "gain of 0.5 %", "shifted bias"])
def test_small_systematic_errors_of_fp16_models_are_found_and_named(name: str, fault: str) -> None:
    model = make(name)
    injected = inject(model, fault, np.random.default_rng(0))
    assert injected is not None
    found = checked(model, injected.model)
    assert found.first_divergent is not None
    assert any(label in found.first_divergent.node for label in injected.guilty)


def test_without_links_the_divergent_node_is_not_said_to_be_the_first() -> None:
    model = make("half_mlp")
    injected = inject(model, "gain of 2 %", np.random.default_rng(0))
    assert injected is not None
    found = checked(model, injected.model, links=())
    assert found.first_divergent is not None
    assert not found.first_divergent.is_first


POSITIONS = (
    "g (int64[N,T] ids) => (float[N,T,1] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}> "
    "{ s = Shape(ids) t = Slice(s, one, two) p = Slice(table, zero, t, zero) e = Cast<to=1>(ids) u = Unsqueeze(e, two) y = Add(u, p) }"
)


def test_calls_reach_the_end_of_a_table_of_positions() -> None:
    table = np.arange(700, dtype=np.float32)[:, None]
    models = []
    for changed in (0, 690):
        models.append(parsed(POSITIONS))
        table[changed] += 0.5
        models[-1].graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    found = checked(models[0], models[0])
    assert found.holds
    assert [(one.output, one.calls == one.of == found.cases) for one in found.proved] == [("y", True)]
    assert not checked(*models).holds


def test_rows_of_a_table_that_no_call_reads_are_noted() -> None:
    model = parsed(POSITIONS)
    table = np.zeros((3_000_000, 1), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    found = checked(model, model)
    assert any("to 2999999 of the table 'table'" in note for note in found.notes)


def test_an_axis_that_is_not_free_is_a_failure() -> None:
    model = make("encoder")
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 32
    found = checked(model, fixed)
    assert not found.holds
    assert any("which the source accepts" in note for note in found.notes)


def test_random_outputs_are_named_and_left_out() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => (float[N,4] y, float[N,4] z) '
        "{ r = RandomNormalLike(x) y = Add(x, r) z = Abs(x) }"
    )
    found = checked(model, model)
    assert found.holds
    assert found.not_compared == ("y",)
    assert any("RandomNormalLike" in note for note in found.notes)


def test_an_output_that_is_random_in_the_onnx_model_only_is_a_failure() -> None:
    text = (
        "g (float[N,4] x) => (float[N,4] y, float[N,4] z) "
        "<float ratio = {0.5}, bool training = {%d}> { y = Dropout(x, ratio, training) z = Abs(x) }"
    )
    evaluated, trained = parsed(text % 0), parsed(text % 1)
    found = checked(evaluated, trained)
    assert not found.holds
    assert not found.not_compared
    assert any("'y' changes if the call is repeated" in note for note in found.notes)
    assert checked(evaluated, evaluated).holds


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_an_output_of_a_narrower_type_is_a_failure(kind: str) -> None:
    text = "g (float[N,4] x) => (%s[N,4] y) { s = Sigmoid(x) y = %s(s) }"
    right = parsed(text % ("float", "Identity"))
    wrong = parsed(text % (kind, f"Cast<to={onnx.TensorProto.DataType.Value(kind.upper())}>"))
    found = checked(right, wrong)
    assert not found.holds
    assert any(f"is {kind}, but float32 in the source" in note for note in found.notes)


def test_a_fault_that_the_outputs_hide_is_found_between_linked_tensors() -> None:
    """The layer gives a ten-millionth of the output, as one with small weights beside a residual connection."""
    text = (
        "g (float[N,4] x) => (float[N,4] y) <float gain = {%s}, float small = {1e-7}> "
        "{ h = Mul(x, gain) s = Sin(h) t = Mul(s, small) y = Add(x, t) }"
    )
    right = parsed(text % "1.0")
    found = checked(right, parsed(text % "1.01"))
    assert not found.holds
    assert found.first_divergent is not None
    assert "(Mul)" in found.first_divergent.node
    assert checked(right, right).holds


def test_nothing_is_proved_if_all_outputs_are_random() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => (float[N,4] y) { y = RandomNormalLike(x) }'
    )
    found = checked(model, model)
    assert not found.holds


def test_a_tie_is_no_difference() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => (int64[N] k) '
        "{ e = Exp(x) s = Log(e) d = Sub(s, x) k = ArgMax<axis=1,keepdims=0>(d) }"
    )
    found = checked(model, model)
    assert found.first_divergent is None


def test_the_sample_is_a_case() -> None:
    model = make("resnet")
    source = OnnxSource(artifact(model), model)
    options = ConvertOptions(sample={"image": np.ones((2, 3, 12, 12), np.float32)})
    labels: list[str] = []
    certify(artifact(model), source, source.exported, options, progress=labels.append)
    assert labels[0] == "the given sample"


class ProbingSource(OnnxSource):
    """A source that knows the threshold at which it is hard to convert."""

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        return Probes(({"x": np.array([[0.3], [0.7]], np.float32)},), ("two values of many",))


def test_the_probes_of_the_source_are_compared() -> None:
    """``x < 0.3`` and ``x <= 0.3`` differ for a single number, which no random value hits."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,1] x) => (bool[N,1] y) '
        "<float[1] threshold = {0.3}> { y = %s(x, threshold) }"
    )
    right, wrong = onnx.parser.parse_model(text % "Less"), onnx.parser.parse_model(text % "LessOrEqual")
    source = ProbingSource(artifact(right), right)
    held = certify(artifact(right), source, source.exported, ConvertOptions())
    assert (held.holds, held.notes) == (True, ("two values of many",))
    found = certify(artifact(wrong), source, source.exported, ConvertOptions())
    assert not found.holds
    assert found.first_divergent is not None
    assert "LessOrEqual" in found.first_divergent.node


def test_random_outputs_are_found_on_the_sample() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,4] x) => (float[N,4] y, float[N,4] z) '
        "{ r = RandomNormalLike(x) y = Add(x, r) z = Abs(x) }"
    )
    source = OnnxSource(artifact(model), model)
    options = ConvertOptions(sample={"x": np.ones((2, 4), np.float32)})
    assert certify(artifact(model), source, source.exported, options).holds


class SlowSource(OnnxSource):
    """Each call takes a second for 100 elements."""

    clock = ManualClock()

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.clock.advance(sum(array.size for array in inputs.values()) / 100)
        return super().forward(inputs)


def test_a_slow_model_is_compared_within_the_time_and_the_certificate_lists_what_was_left_out() -> None:
    model = make("resnet")
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "H"
    source = SlowSource(artifact(model), model)
    start = source.clock.now()
    labels: list[str] = []
    patience = Patience(60.0, source.clock)
    found = certify(
        artifact(model), source, source.exported, ConvertOptions(), progress=labels.append, patience=patience
    )
    assert found.holds
    assert source.clock.now() - start < 60 + 5 * 3 * 32 * 12 / 100
    (note,) = [note for note in found.notes if note.startswith("left out, because the model is slow: ")]
    assert "equal values of image [1, 3, 224, 12]" in note
    assert "zeros values" in labels
    assert len(labels) > 5


def test_a_large_sample_does_not_make_every_call_large() -> None:
    model = make("resnet")
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "HW"[axis - 2]
    source = OnnxSource(artifact(model), model)
    options = ConvertOptions(sample={"image": np.ones((1, 3, 224, 224), np.float32)})
    sizes: list[int] = []
    forward = source.forward

    class Watched(OnnxSource):
        def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            sizes.append(inputs["image"].size)
            return forward(inputs)

    assert certify(artifact(model), Watched(artifact(model), model), source.exported, options).holds
    assert sizes[0] == 3 * 224 * 224
    assert sum(size >= 3 * 224 * 112 for size in sizes) <= 5


class RoughSource(OnnxSource):
    """Sums equal values in an unlucky order, so that their mean is not exact."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = super().forward(inputs)
        x = inputs["x"]
        is_constant = (x == x[..., :1]).all(-1, keepdims=True)
        error = np.where(is_constant, np.spacing(np.abs(x[..., :1])) / np.float32(1e-3), 0.0)
        return {"y": found["y"] + error.astype(np.float32)}


def test_a_tolerance_does_not_collapse_because_a_mean_is_exact_by_luck() -> None:
    model = parsed(LAYER_NORM)
    source = RoughSource(artifact(model), model)
    found = certify(artifact(model), source, Exported("test"), ConvertOptions())
    assert found.first_divergent is None, found


def test_a_source_that_accepts_nothing() -> None:
    model = make("resnet")
    source = OnnxSource(artifact(model), model)
    broken = make("encoder")
    source._nodes = OnnxSource(artifact(broken), broken)._nodes  # a source with other inputs than it says
    with pytest.raises(InvalidArgument, match="accepts none of the inputs"):
        certify(artifact(model), source, source.exported, ConvertOptions())


class InPlace(OnnxSource):
    """A source that changes its inputs."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = super().forward(inputs)
        inputs["x"][:] = 0
        return found


def test_a_source_may_change_its_inputs() -> None:
    model = parsed("g (float[N,4] x) => (float[N,4] y) { y = Exp(x) }")
    source = InPlace(artifact(model), model)
    assert certify(artifact(model), source, source.exported, ConvertOptions()).holds


def test_outputs_that_are_empty_in_most_calls_are_not_proved() -> None:
    model = parsed(
        "g (float[N,4] x) => (float[M,4] y) <float bound = {100000.0}, int64[1] axes = {1}> { m = ReduceMax<keepdims=0>(x, axes) "
        "b = Greater(m, bound) y = Compress<axis=0>(x, b) }"
    )
    found = checked(model, model)
    assert not found.holds
    assert found.not_proved == ("y",)
    assert found.first_divergent is None


class Finite(OnnxSource):
    """A source whose loop does not end for other values."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        assert np.isfinite(inputs["x"]).all()
        return super().forward(inputs)


def test_loops_are_not_given_values_for_which_they_might_not_end() -> None:
    model = parsed(
        """g (float[N] x) => (float[N] y) <float one = {1.0}, float two = {2.0}, bool true = {1}> { y = Loop (, true, x)
        <body = halve (int64 step, bool more, float[N] state) => (bool again, float[N] half) {
        half = Div(state, two) size = Abs(half) largest = ReduceMax<keepdims=0>(size) again = Greater(largest, one) }> }"""
    )
    source = Finite(artifact(model), model)
    found = certify(artifact(model), source, source.exported, ConvertOptions())
    assert found.holds, found
    assert any("loops" in note for note in found.notes)


def test_other_results_for_nan_are_noted() -> None:
    source = parsed("g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    other = parsed(
        "g (float[N,4] x) => (float[N,4] y) <float zero = {0.0}> { b = Greater(x, zero) y = Where(b, x, zero) }"
    )
    found = checked(source, other)
    assert found.holds
    assert any("NaN in 'x'" in note for note in found.notes)


@pytest.mark.parametrize(
    ("declared", "made"), [("int64", "int32"), ("int64", "int8"), ("int32", "int64"), ("double", "float")]
)
def test_an_output_of_another_type_is_a_failure(declared: str, made: str) -> None:
    text = "g (float[N,4] x) => (%s[N,4] y) { s = Sign(x) y = Cast<to=%d>(s) }"
    one, other = (parsed(text % (kind, getattr(onnx.TensorProto, kind.upper()))) for kind in (declared, made))
    assert checked(one, one).holds
    found = checked(one, other)
    assert found.first_divergent is not None
    assert any(" in the source, on " in note for note in found.notes)


class Drawing(OnnxSource):
    """A source that draws numbers where no exporter sees it."""

    scale, share = 1.0, 1.0

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = super().forward(inputs)
        draws = np.random.rand(2) if self.share else (random.random(), 0.0)
        return found | ({"y": found["y"] * np.float32(1 + self.scale * draws[1])} if draws[0] < self.share else {})


def test_an_output_that_is_random_in_the_source_only_is_a_failure() -> None:
    model = parsed("g (float[N,4] x) => (float[N,4] y, float[N,4] z) { y = Exp(x) z = Abs(x) }")
    source = Drawing(artifact(model), model)
    source.share = 0.4  # most calls are equal
    found = certify(artifact(model), source, source.exported, ConvertOptions())
    assert found.first_divergent is not None
    assert any("'y' is random in the source, but not in the ONNX model" in note for note in found.notes)


def test_a_source_that_draws_numbers_without_effect_is_noted() -> None:
    model = parsed("g (float[N,4] x) => (float[N,4] y) { y = Exp(x) }")
    source = Drawing(artifact(model), model)
    for source.share, source.scale in ((0.0, 1.0), (1.0, 0.0)):
        found = certify(artifact(model), source, source.exported, ConvertOptions())
        assert found.holds
        assert any("`numpy.random`" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("y = Gelu<approximate={}>(t)", '"none"', '"tanh"'),
        ("y = LayerNormalization<epsilon={}>(t, ones)", "1e-12", "1e-11"),
        ("y = LayerNormalization<epsilon={}>(t, ones)", "1e-5", "1e-4"),
    ],
)
def test_parts_are_compared_on_values_of_other_magnitudes(text: str, right: str, wrong: str) -> None:
    """The values of all calls are so small or so large that both models give the same."""
    scale = "0.001" if "Gelu" in text else "1000.0"
    graph = (
        "g (float[N,4] x) => (float[N,4] y) <float scale = {%s}, float[4] ones = {1, 1, 1, 1}> "
        "{ s = Sign(x) t = Mul(s, scale) %s }"
    )
    one, other = (parsed(graph % (scale, text.replace("{}", value))) for value in (right, wrong))
    source = OnnxSource(artifact(one), one)
    exported = replace(source.exported, has_parts=True)
    samples = ConvertOptions(sample={"x": np.array([[0.5, 1.0, -0.7, 0.2]], np.float32)})
    assert certify(artifact(one), source, exported, samples).holds
    found = certify(artifact(other), source, exported, samples)
    assert found.first_divergent is not None
    assert found.first_divergent.source == "y"
