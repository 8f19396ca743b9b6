"""Parity finds faults that real exporters have had, names the node, and accepts other rounding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import FAULTS, inject
from benchmarks.onnx_source import OnnxSource
from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.convert.base import ConvertOptions, Exported, TensorLink
from penstock.offline.convert.certificate import Certificate
from penstock.offline.convert.parity.parity import certify

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


def test_a_source_that_accepts_nothing() -> None:
    model = make("resnet")
    source = OnnxSource(artifact(model), model)
    broken = make("encoder")
    source._nodes = OnnxSource(artifact(broken), broken)._nodes  # a source with other inputs than it says
    with pytest.raises(InvalidArgument, match="accepts none of the inputs"):
        certify(artifact(model), source, source.exported, ConvertOptions())
