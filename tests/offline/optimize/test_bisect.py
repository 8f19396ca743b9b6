import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.artifact import Artifact
from penstock.offline.optimize.base import NodePass
from penstock.offline.optimize.bisect import first_wrong
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.optimize.passes.identity_elimination import IdentityElimination
from penstock.offline.optimize.verify import Verifier

CHAIN = """agraph (float[N, 3] x) => (float[N, 3] y) {
    a = Relu(x)
    b = Relu(a)
    c = Mul(b, two)
    d = Sub(k, c)
    e = Relu(d)
    y = Relu(e)
}"""


class DropRelu(NodePass):
    """A pass that takes every Relu for the identity, which is wrong for those whose input can be negative."""

    name = "drop_relu"

    def rewrite(self, node, model):
        if node.op_type != "Relu":
            return False
        node.op_type = "Identity"
        return True


@given(st.data())
def test_the_number_found_is_wrong_and_one_fewer_is_not(data):
    verdicts = [False, *data.draw(st.lists(st.booleans(), max_size=40)), True]
    found = first_wrong(len(verdicts) - 1, verdicts.__getitem__)
    assert verdicts[found]
    assert not verdicts[found - 1]


@pytest.fixture
def chain(parse):
    # x and d can be negative: one Relu of each pair is necessary.
    return parse(CHAIN, two=np.full(3, 2, np.float32), k=np.full(3, 1, np.float32))


def test_only_the_wrong_applications_are_undone(chain):
    result, report = optimize(chain, passes=[DropRelu(), IdentityElimination()])
    record = report.passes[0]
    assert record.status == "applied"
    kept = {node.output[0]: node.op_type for node in onnx.load_model_from_string(result.data).graph.node}
    assert list(kept.values()).count("Relu") == 2
    assert "at 'b': output 'y': relative error" in record.reason
    assert "at 'y': output 'y': relative error" in record.reason
    assert report.reverted == {"drop_relu": record.reason}
    assert Verifier(chain).check(result.data).failure == ""


def test_the_minimal_model_shows_the_error(chain):
    _, report = optimize(chain, passes=[DropRelu()])
    model = onnx.parser.parse_model(report.passes[0].example)
    assert len(model.graph.node) < 6
    wrong = onnx.ModelProto.FromString(model.SerializeToString())
    for node in wrong.graph.node:
        node.op_type = "Identity" if node.op_type == "Relu" else node.op_type
    verdict = Verifier(Artifact.from_bytes(model.SerializeToString())).check(wrong.SerializeToString())
    assert "relative error" in verdict.failure


def test_a_wrong_application_is_not_tried_again(chain):
    _, report = optimize(chain, passes=[DropRelu(), IdentityElimination()])
    later = [record for record in report.passes if record.name == "drop_relu" and record.round > 1]
    assert later
    assert not any(record.reason for record in later)


def test_the_whole_pass_is_undone_if_too_much_of_it_is_wrong(parse):
    body = "\n".join(f"y{i} = Relu(x)" for i in range(20))
    outputs = ", ".join(f"float[N, 3] y{i}" for i in range(20))
    artifact = parse(f"agraph (float[N, 3] x) => ({outputs}) {{ {body} }}")
    result, report = optimize(artifact, passes=[DropRelu()])
    assert report.passes[0].status == "reverted"
    assert result.data == artifact.data
