from __future__ import annotations

from faulty_models import check_repaired, relu_tanh


def test_a_version_that_onnx_runtime_refuses() -> None:
    assert (
        check_repaired(relu_tanh(lambda proto: setattr(proto, "ir_version", 14)))
        == "the IR version was 14; it is now 13"
    )


def test_no_version() -> None:
    assert check_repaired(relu_tanh(lambda proto: proto.ClearField("ir_version"))).startswith("the IR version was 0")
