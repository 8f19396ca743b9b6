from __future__ import annotations

import onnx

from faulty_models import check_repaired, relu_tanh, runs
from penstock.offline.convert.repairs import repair


def test_the_alias_of_the_standard_domain() -> None:
    done = check_repaired(relu_tanh(lambda proto: setattr(proto.graph.node[0], "domain", "ai.onnx")))
    assert done == "the operator sets were [('', 17)]; they are now [('', 17)]"


def test_no_operator_set() -> None:
    check_repaired(relu_tanh(lambda proto: proto.ClearField("opset_import")))


def test_an_operator_set_that_is_listed_twice() -> None:
    def change(proto: onnx.ModelProto) -> None:
        proto.opset_import.extend([onnx.helper.make_opsetid("", 13), onnx.helper.make_opsetid("ai.onnx", 17)])

    repaired, (done,) = repair(relu_tanh(change))
    assert done.endswith("they are now [('', 17)]")
    assert runs(repaired).shape == (2, 3, 6, 8)
