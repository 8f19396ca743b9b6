from __future__ import annotations

from onnx import TensorProto

from benchmarks.zoo.onnx import value
from faulty_models import check_repaired, relu_tanh, runs
from penstock.offline.convert.repairs import repair


def test_a_wrong_type_within_the_graph() -> None:
    done = check_repaired(relu_tanh(lambda proto: proto.graph.value_info.append(value("a", [1], TensorProto.INT64))))
    assert done == "declared types or shapes contradicted the nodes: 'a'"


def test_a_wrong_type_of_an_output() -> None:
    check_repaired(
        relu_tanh(lambda proto: setattr(proto.graph.output[0].type.tensor_type, "elem_type", TensorProto.INT64))
    )


def test_an_output_without_a_type() -> None:
    check_repaired(relu_tanh(lambda proto: proto.graph.output[0].ClearField("type")))


def test_a_wrong_shape() -> None:
    repaired, done = repair(relu_tanh(lambda proto: proto.graph.value_info.append(value("a", [1, 3, 6, 9]))))
    assert len(done) == 1
    assert runs(repaired).shape == (2, 3, 6, 8)


def test_right_declarations_are_kept() -> None:
    artifact = relu_tanh(lambda proto: proto.graph.value_info.append(value("a", ["N", 3, "H", 8])))
    assert repair(artifact) == (artifact, ())
