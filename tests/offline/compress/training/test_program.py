"""Reading a graph for training: constants, weights, the release of values, and the names of unsupported operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from networks import Network
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.compress.training.program import Program, constant_tensors, read_program


def proto(n: Network, opset: int = 17) -> onnx.ModelProto:
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 3]}, opset)
    return onnx.load_model_from_string(artifact.data)


def network() -> Network:
    n = Network()
    hidden = n.op("Relu", n.gemm("x", 4, 8, name="gemm"), name="hidden")
    n.gemm(hidden, 8, 3, name="y")
    return n


def read(model: onnx.ModelProto, frozen: tuple[str, ...] = (), trained: tuple[str, ...] = ()) -> Program:
    return read_program(model, frozen, trained)


def test_nodes_inputs_and_weights() -> None:
    program = read(proto(network()))
    assert program.inputs == {"x": (None, 4)}
    assert program.outputs == {"y": TensorProto.FLOAT}
    assert [step.node.op_type for step in program.steps] == ["Gemm", "Relu", "Gemm"]
    assert program.weights == set(program.constants) == {"w0", "w1", "w2", "w3"}


def test_values_are_freed_after_their_last_use_and_outputs_never() -> None:
    freed = [set(step.freed) & {"x", "gemm", "hidden", "y"} for step in read(proto(network())).steps]
    assert freed == [{"x"}, {"gemm"}, {"hidden"}]


def test_constants_can_be_frozen_and_only_constants() -> None:
    model = proto(network())
    assert read(model, frozen=("w0",)).weights == {"w1", "w2", "w3"}
    with pytest.raises(InvalidArgument, match=r"no constants of the model are called \['gemm', 'nothing'\]"):
        read(model, frozen=("nothing",), trained=("gemm",))


def test_a_constant_that_is_an_output_is_no_weight() -> None:
    model = proto(network())
    model.graph.output.append(helper.make_tensor_value_info("w2", TensorProto.FLOAT, [8, 3]))
    assert read(model).weights == {"w0", "w1", "w3"}
    assert read(model, trained=("w2",)).weights == {"w0", "w1", "w2", "w3"}


def test_masks_single_numbers_and_integers_are_no_weights() -> None:
    n = Network()
    x = n.op("Mul", n.gemm("x", 4, 3), n.weight(np.float32(2)))
    x = n.op("Add", x, n.weight(np.float32([0, -1e9, 0])))
    n.op("Gather", x, n.weight(np.array([2, 1, 0])), axis=1, name="y")
    program = read(proto(n))
    assert program.weights == {"w0", "w1"}
    assert read(proto(n), trained=("w2",)).weights == {"w0", "w1", "w2"}
    with pytest.raises(InvalidArgument, match=r"\['w4'\] are not FP32"):
        read(proto(n), trained=("w4",))


def test_constant_nodes_are_constants_too() -> None:
    n = network()
    value = numpy_helper.from_array(np.ones(3, np.float32))
    n.nodes.insert(0, helper.make_node("Constant", [], ["ones"], value=value))
    n.nodes[-1].output[0] = "before"
    n.op("Add", "before", "ones", name="y")
    model = proto(n)
    assert constant_tensors(model.graph).keys() == {"w0", "w1", "w2", "w3", "ones"}
    assert "ones" in read(model).weights
    assert "Constant" not in {step.node.op_type for step in read(model).steps}


def test_all_operators_that_cannot_be_trained_are_named_at_once() -> None:
    n = network()
    n.nodes[-1].output[0] = "before"
    for _ in range(2):
        n.op("Bernoulli", "before")
    n.op("RandomNormalLike", "before", name="y")
    with pytest.raises(Unsupported, match=r"cannot be trained: Bernoulli \(2\), RandomNormalLike \(1\)"):
        read(proto(n))


def test_old_opsets_are_refused() -> None:
    model = proto(network())
    model.opset_import[0].version = 8
    with pytest.raises(Unsupported, match="opset 8, but training needs 9 or newer"):
        read(model)
