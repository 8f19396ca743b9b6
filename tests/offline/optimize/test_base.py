import msgspec
import numpy as np
import onnx
import pytest

from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.optimize.base import OptimizeReport, Pass
from penstock.offline.optimize.optimizer import MAX_ROUNDS, optimize
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.offline.optimize.passes.identity_elimination import IdentityElimination

TEXT = """agraph (float[N, 3] x) => (float[N, 3] y) {
    a = Relu(x)
    b = Identity(a)
    y = Add(b, k)
}"""


class WrongPass(Pass):
    """A pass that replaces every Relu by an Abs."""

    name = "wrong"

    def applications(self, model, skipped=()):
        for node in model.graph:
            if node.op_type == "Relu" and node.outputs[0].name not in skipped:
                node.op_type = "Abs"
                yield node.outputs[0].name


class FailingPass(Pass):
    """A pass that breaks the graph, then raises."""

    name = "failing"

    def applications(self, model, skipped=()):
        model.graph.initializers.clear()
        raise KeyError("oops")
        yield "never"


class RestlessPass(Pass):
    """A pass that always reports a change."""

    name = "restless"

    def applications(self, model, skipped=()):
        yield "y"


@pytest.fixture
def artifact(parse, weights):
    return parse(TEXT, k=weights(3))


def test_a_wrong_pass_is_undone_and_named(artifact):
    result, report = optimize(artifact, passes=[WrongPass(), IdentityElimination()])
    record = report.passes[0]
    assert (record.name, record.status) == ("wrong", "reverted")
    assert "output 'y': relative error" in record.reason
    assert "first divergent tensor: 'a' (Abs)" in record.reason
    assert record.max_relative_error > 1e-4
    assert [node.op_type for node in onnx.load_model_from_string(result.data).graph.node] == ["Relu", "Add"]


def test_an_undone_pass_is_not_tried_again(artifact):
    _, report = optimize(artifact, passes=[WrongPass(), IdentityElimination()])
    assert [(record.name, record.round) for record in report.passes].count(("wrong", 1)) == 1
    assert {record.name for record in report.passes if record.round > 1} == {"identity_elimination"}


def test_a_failing_pass_is_undone_and_the_others_go_on(artifact):
    _, report = optimize(artifact, passes=[FailingPass(), IdentityElimination()])
    assert report.reverted == {"failing": "the pass failed: KeyError: 'oops'"}
    assert report.applied == ["identity_elimination"]


def test_rounds_are_bounded(artifact):
    _, report = optimize(artifact, passes=[RestlessPass()])
    assert len(report.passes) == MAX_ROUNDS


def test_nothing_to_do_gives_the_same_bytes(artifact):
    once, _ = optimize(artifact, passes=[IdentityElimination(), DeadCode()])
    twice, report = optimize(once, passes=[IdentityElimination(), DeadCode()])
    assert twice.data == once.data
    assert [record.status for record in report.passes] == ["unchanged", "unchanged"]
    assert report.max_relative_error is None


def test_the_result_is_self_contained_even_if_nothing_was_to_be_done(artifact, tmp_path):
    proto = onnx.load_model_from_string(artifact.data)
    onnx.save_model(proto, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    result, _ = optimize(Artifact.from_file(tmp_path / "model.onnx"), passes=[])
    (tensor,) = onnx.load_model_from_string(result.data).graph.initializer
    assert onnx.numpy_helper.to_array(tensor).shape == (3,)


def test_provenance_says_what_was_done(artifact):
    result, _ = optimize(artifact, passes=[WrongPass(), IdentityElimination()])
    (step,) = result.provenance
    assert (step.name, step.source_digest) == ("optimize", artifact.digest)
    assert step.options == {"passes": ["wrong", "identity_elimination"]}
    assert step.facts["applied"] == ["identity_elimination"]
    assert list(step.facts["reverted"]) == ["wrong"]
    assert (step.facts["nodes_before"], step.facts["nodes_after"]) == (3, 2)


def test_the_report_survives_json(artifact):
    _, report = optimize(artifact, passes=[WrongPass(), IdentityElimination()])
    assert msgspec.json.decode(msgspec.json.encode(report), type=OptimizeReport) == report


def test_what_cannot_be_run_is_not_changed(parse):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a = custom.Unknown(x)
        b = Identity(a)
        y = Abs(b)
    }"""
    artifact = parse(text)
    result, report = optimize(artifact, passes=[IdentityElimination()])
    assert report.passes[0].reason.startswith("unverifiable")
    assert report.passes[0].max_relative_error is None
    assert result.data == artifact.data


def test_samples_are_used(parse):
    # Without samples nothing can be run: the first axis must be 7, which the signature does not say.
    text = "agraph (float[A, B] x) => (float[C, D] y) { r = Reshape(x, s)\n i = Identity(r)\n y = Abs(i) }"
    artifact = parse(text, s=np.array([7, 5]))
    _, without = optimize(artifact, passes=[IdentityElimination()])
    _, with_samples = optimize(artifact, [{"x": np.ones((5, 7), np.float32)}], passes=[IdentityElimination()])
    assert without.passes[0].status == "reverted"
    assert with_samples.passes[0].status == "applied"


def test_a_corrupt_model_is_refused(artifact):
    with pytest.raises(InvalidModel):
        optimize(Artifact.from_bytes(artifact.data[:-9]), passes=[])
