import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.optimize.base import NodePass
from penstock.offline.optimize.bisect import applied, first_wrong, minimal_model
from penstock.offline.optimize.model import infer_shapes, to_proto
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
    assert Verifier(chain).check(result).failure == ""


def test_the_minimal_model_shows_the_error(chain):
    _, report = optimize(chain, passes=[DropRelu()])
    model = onnx.parser.parse_model(report.passes[0].example)
    assert len(model.graph.node) < 6
    wrong = onnx.ModelProto.FromString(model.SerializeToString())
    for node in wrong.graph.node:
        node.op_type = "Identity" if node.op_type == "Relu" else node.op_type
    verdict = Verifier(Artifact.from_bytes(model.SerializeToString())).check(
        Artifact.from_bytes(wrong.SerializeToString())
    )
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


class DropReluAfter(NodePass):
    """A pass that takes a Relu for the identity if ``depth`` negations lead to it."""

    name = "drop_relu_after"

    def __init__(self, depth):
        self.depth = depth

    def rewrite(self, node, model):
        value = node.inputs[0]
        for _ in range(self.depth):
            if value is None or value.producer() is None or value.producer().op_type != "Neg":
                return False
            value = value.producer().inputs[0]
        if node.op_type != "Relu":
            return False
        node.op_type = "Identity"
        return True


def minimal(artifact, current):
    """The operators of the minimal model, and the model as text."""
    text = minimal_model(to_proto(infer_shapes(onnx.load_model_from_string(artifact.data))), current)
    return [node.op_type for node in onnx.parser.parse_model(text).graph.node] if text else [], text


@pytest.mark.parametrize(
    ("depth", "operators"),
    [(0, ["Relu"]), (1, ["Neg", "Relu", "Abs"]), (2, ["Neg", "Neg", "Relu", "Abs", "Exp"]), (3, [])],
)
def test_the_part_grows_twice(parse, depth, operators):
    artifact = parse("""agraph (float[N, 3] x) => (float[N, 3] y) {
        a = Neg(x)\n b = Neg(a)\n c = Neg(b)\n d = Relu(c)\n e = Abs(d)\n f = Exp(e)\n y = Log(f)
    }""")
    assert minimal(artifact, DropReluAfter(depth))[0] == operators


def test_the_part_has_the_weights_that_it_reads_and_the_shapes_of_large_ones(parse):
    text = """agraph (float[N, 4] x) => (float[N, 4] y) {
        a = MatMul(x, small)\n b = Relu(a)\n c = MatMul(b, large)\n y = Add(c, other)
    }"""

    class DropReluBetween(DropRelu):
        """Wrong where a product follows."""

        def rewrite(self, node, model):
            return any(use.op_type == "MatMul" for use in node.outputs[0].consumers()) and super().rewrite(node, model)

    small, large = np.arange(16, dtype=np.float32).reshape(4, 4), np.ones((4, 5), np.float32)
    artifact = parse(text, small=small, large=large, other=np.ones(5, np.float32))
    operators, shown = minimal(artifact, DropReluBetween())
    assert operators == ["MatMul", "Relu", "MatMul"]
    weights = {tensor.name: tensor for tensor in onnx.parser.parse_model(shown).graph.initializer}
    assert set(weights) == {"small", "large"}
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(weights["small"]), small)
    assert (list(weights["large"].dims), len(weights["large"].float_data), weights["large"].raw_data) == (
        [4, 5],
        0,
        b"",
    )


def test_the_text_of_a_part_has_at_most_4000_characters(parse):
    body = "\n".join(f"y{i} = Relu(x)" for i in range(300))
    artifact = parse(f"agraph (float[N, 3] x) => ({', '.join(f'float[N, 3] y{i}' for i in range(300))}) {{ {body} }}")
    before = to_proto(infer_shapes(onnx.load_model_from_string(artifact.data)))
    assert len(minimal_model(before, DropRelu())) == 4000


def test_a_part_ends_where_types_are_known(parse):
    """The type of ``b`` is unknown, so its reader belongs to the part."""
    artifact = parse("agraph (float[N, 3] x) => (float[N, 3] y) { b = Relu(x)\n y = Neg(b) }")
    before = to_proto(ir.from_proto(onnx.load_model_from_string(artifact.data)))  # as a pass writes it, without types
    text = minimal_model(before, DropReluAfter(0))
    assert [node.op_type for node in onnx.parser.parse_model(text).graph.node] == ["Relu", "Neg"]


def test_a_part_gives_what_the_rest_reads(parse):
    artifact = parse("""agraph (float[N, 3] x) => (float[N, 3] y, float[N, 3] z) {
        a = Neg(x)\n b = Relu(a)\n c = Abs(b)\n y = Exp(b)\n d = Sin(a)\n z = Add(c, d)
    }""")
    operators, text = minimal(artifact, DropReluAfter(1))
    graph = onnx.parser.parse_model(text).graph
    assert operators == ["Neg", "Relu", "Abs", "Exp"]
    assert [[value.name for value in values] for values in (graph.input, graph.output)] == [["x"], ["a", "c", "y"]]


def test_a_part_that_runs_on_no_input_shows_nothing(parse):
    """Without the node that makes it, the shape is an input, which no generated value fits."""

    class DropReluAfterReshape(DropRelu):
        def rewrite(self, node, model):
            producer = node.inputs[0].producer()
            return producer is not None and producer.op_type == "Reshape" and super().rewrite(node, model)

    artifact = parse(
        """agraph (float[2, 3, 5] x) => (float[6, 5] y) {
            s = Neg(k)\n a = Reshape(x, s)\n b = Relu(a)\n c = Neg(b)\n y = Neg(c)
        }""",
        k=np.array([-6, -5]),
    )
    assert minimal(artifact, DropReluAfterReshape())[0] == ["Neg", "Reshape", "Relu", "Neg", "Neg"]


@pytest.mark.parametrize(("count", "is_shown"), [(16, True), (17, False)])
def test_weights_of_up_to_16_elements_are_shown(parse, count, is_shown):
    artifact = parse(
        f"agraph (float[N, {count}] x) => (float[N, {count}] y) {{ a = Relu(x)\n y = Add(a, w) }}",
        w=np.ones(count, np.float32),
    )

    class DropReluBeforeAdd(DropRelu):
        def rewrite(self, node, model):
            return bool(node.outputs[0].consumers()) and super().rewrite(node, model)

    (weight,) = onnx.parser.parse_model(minimal(artifact, DropReluBeforeAdd())[1]).graph.initializer
    assert bool(weight.raw_data or weight.float_data) is is_shown


@pytest.mark.parametrize("error", [ZeroDivisionError(), InvalidModel("the pass refuses it", "give another model")])
def test_a_pass_that_is_right_or_fails_shows_nothing(parse, error):
    class Fails(DropRelu):
        def rewrite(self, node, model):
            if len(model.graph) < 3:
                raise error
            return super().rewrite(node, model)

    artifact = parse("agraph (float[N, 3] x) => (float[N, 3] y) { a = Abs(x)\n b = Relu(a)\n c = Abs(b)\n y = Abs(c) }")
    assert minimal(artifact, IdentityElimination()) == ([], "")
    assert minimal(artifact, Fails())[0] == []


def test_nodes_around_a_branch_are_neighbours(parse):
    """The branch reads ``b``, and the pass is wrong only if it sees the If."""

    class DropReluBeforeIf(DropRelu):
        def rewrite(self, node, model):
            return any(use.op_type == "If" for use in model.graph) and super().rewrite(node, model)

    artifact = parse(
        """agraph (float[N, 3] x) => (float[N, 3] y) {
            a = Neg(x)
            b = Relu(a)
            z = If (flag) <
                then_branch = t () => (float[N, 3] t1) { t1 = Neg(b) },
                else_branch = e () => (float[N, 3] e1) { e1 = Abs(b) }
            >
            y = Neg(z)
        }""",
        flag=np.array(True),
    )
    assert minimal(artifact, DropReluBeforeIf())[0] == ["Neg", "Relu", "If"]


def test_applied_makes_the_first_applications(chain):
    proto = onnx.load_model_from_string(chain.data)
    for limit, dropped in ((0, 0), (1, 1), (3, 3), (None, 4), (9, 4)):
        operators = [node.op_type for node in applied(DropRelu(), proto, (), limit).graph]
        assert operators.count("Identity") == dropped
    operators = [node.op_type for node in applied(DropRelu(), proto, ("b", "y")).graph]
    assert operators == ["Identity", "Relu", "Mul", "Sub", "Identity", "Relu"]
