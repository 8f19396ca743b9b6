"""Parity finds faults that real exporters have had, names the node, and accepts other rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest

from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import FAULTS, inject
from benchmarks.onnx_source import OnnxSource
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, Exported, TensorLink
from penstock.offline.convert.certificate import Certificate
from penstock.offline.convert.parity.parity import certify
from penstock.offline.convert.parity.patience import Patience
from penstock.tensor import Array

NEEDLESS = {"or equal": "differs only for equal numbers"}
"""Faults that are not visible in these graphs."""


def artifact(model: onnx.ModelProto) -> Artifact:
    return Artifact.from_bytes(model.SerializeToString())


def checked(
    before: onnx.ModelProto, after: onnx.ModelProto, links: tuple[TensorLink, ...] | None = None, seed: int = 0
) -> Certificate:
    source = OnnxSource(artifact(before), before, seed)
    exported = source.exported if links is None else Exported("test", links)
    return certify(artifact(after), source, exported, ConvertOptions(), seed)


@pytest.mark.parametrize("name", GRAPHS)
def test_holds_with_other_rounding(name: str) -> None:
    model = make(name)
    for seed in range(2):
        found = checked(model, model, seed=seed)
        assert found.holds, found
        assert found.cases >= 8
        assert found.max_error <= found.tolerance < 1e-2


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - NEEDLESS.keys()))
def test_finds_the_fault_and_names_its_node(fault: str) -> None:
    for name in GRAPHS:
        model = make(name, 1)
        injected = inject(model, fault, np.random.default_rng(1))
        if injected is not None:
            break
    else:
        pytest.skip("no graph has the operator")
    found = checked(model, injected.model)
    assert not found.holds
    assert found.first_divergent is not None
    assert any(label in found.first_divergent.node for label in injected.guilty), found.first_divergent


def test_without_links_names_the_output() -> None:
    model = make("resnet")
    injected = inject(model, "lost bias", np.random.default_rng(0))
    assert injected is not None
    found = checked(model, injected.model, ())
    assert not found.holds
    assert any("no intermediate values" in note or "no single node" in note for note in found.notes)


def test_a_wrong_link_blames_no_innocent_node() -> None:
    """A link names the tensor after an activation by the layer before it."""
    model = make("resnet")
    injected = inject(model, "max for average", np.random.default_rng(0))
    assert injected is not None
    links = [TensorLink(name, name) for node in model.graph.node for name in node.output]
    links = [TensorLink("n1", "r1") if link.tensor == "n1" else link for link in links]
    found = checked(model, injected.model, tuple(links))
    assert found.first_divergent is not None
    assert any(label in found.first_divergent.node for label in injected.guilty), found.first_divergent


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

    def probes(self, seed: int) -> Sequence[Mapping[str, Array]]:
        return ({"x": np.array([[0.3], [0.7]], np.float32)},)


def test_the_probes_of_the_source_are_compared() -> None:
    """``x < 0.3`` and ``x <= 0.3`` differ for a single number, which no random value hits."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N,1] x) => (bool[N,1] y) '
        "<float[1] threshold = {0.3}> { y = %s(x, threshold) }"
    )
    right, wrong = onnx.parser.parse_model(text % "Less"), onnx.parser.parse_model(text % "LessOrEqual")
    source = ProbingSource(artifact(right), right)
    assert certify(artifact(right), source, source.exported, ConvertOptions()).holds
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


def test_a_source_that_accepts_nothing() -> None:
    model = make("resnet")
    source = OnnxSource(artifact(model), model)
    broken = make("encoder")
    source._nodes = OnnxSource(artifact(broken), broken)._nodes  # a source with other inputs than it says
    with pytest.raises(InvalidArgument, match="accepts none of the inputs"):
        certify(artifact(model), source, source.exported, ConvertOptions())
