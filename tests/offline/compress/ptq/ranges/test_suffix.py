"""The part after a tensor, run separately, equals the whole model with that tensor rounded."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import networks
from penstock.artifact import Artifact
from penstock.offline.compress.ptq.qdq_placement import FloatModel
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.ranges.suffix import Suffix
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.taps import Taps
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

U8 = IntegerScheme(DataType.UINT8, DataType.INT8, False, "test")
S8 = IntegerScheme(DataType.INT8, DataType.INT8, False, "test")
X = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)


def answer(artifact: Artifact, x: Array) -> dict[str, Array]:
    with loaded(artifact) as model:
        return model.forward({"x": x})


def rounded(artifact: Artifact, tensor: str, x: Array, scheme: IntegerScheme, range: Range) -> dict[str, Array]:
    """The answers with ``tensor`` rounded, by its suffix."""
    suffix = Suffix(FloatModel(artifact), tensor)
    onnx.checker.check_model(suffix.artifact(scheme).data)
    batch = dict(Taps(artifact, {"x": x}).run([tensor, *suffix.beside]))
    with loaded(suffix.artifact(scheme)) as model:
        (outputs,) = suffix.rounded(model, [batch], tensor, range, scheme)
        return outputs


def by_hand(array: Array, scheme: IntegerScheme, range: Range) -> Array:
    """A plain implementation of the definition."""
    smallest, largest = scheme.activation_limits
    scale = np.float32((range.high - range.low) / 255)
    zero = round(smallest - range.low / float(scale))
    return (np.clip(np.round(array / scale) + zero, smallest, largest) - zero).astype(np.float32) * scale


@pytest.mark.parametrize("scheme", [U8, S8], ids=["u8", "s8"])
def test_one_tensor_is_rounded_and_the_others_are_not(scheme: IntegerScheme) -> None:
    range = Range(-0.5, 1.5)
    artifact = networks.mlp()
    wanted = answer(artifact, by_hand(X, scheme, range))["y"]
    # Where x / scale is half an integer to the last bit, the two may round to different sides: a step of one in 255.
    np.testing.assert_allclose(rounded(artifact, "x", X, scheme, range)["y"], wanted, atol=1e-4)
    assert np.abs(rounded(artifact, "hidden", X, scheme, range)["y"] - wanted).max() > 1e-3


def test_a_tensor_read_by_several_and_beside_them() -> None:
    n = networks.Network()
    n.op("Add", n.op("MatMul", "x", n.weight(np.eye(4, dtype=np.float32))), "x", name="y")
    artifact = n.artifact({"x": ["N", 4]}, {"y": ["N", 4]})
    x = np.float32([[0.1, 2.0, -1.0, 1.0]])
    got = rounded(artifact, "x", x, U8, Range(0.0, 1.0))
    np.testing.assert_allclose(got["y"], 2 * by_hand(x, U8, Range(0.0, 1.0)), atol=1e-6)


def branched() -> Artifact:
    """x to y and beside: y reads 'inner' in a subgraph of an If, which also reads x and an INT64 shape computed from x."""
    n = networks.Network()
    inner = n.op("MatMul", "x", n.weight(np.eye(4, dtype=np.float32)), name="inner")
    shape = n.op("Shape", "x", name="shape")
    n.op("Neg", "x", name="apart")
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Add", [inner, "x"], ["sum"]),
            onnx.helper.make_node("Reshape", ["sum", shape], ["shaped"]),
        ],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("shaped", onnx.TensorProto.FLOAT, None)],
    )
    n.op("If", n.weight(np.array(True)), name="y", then_branch=graph, else_branch=graph)
    return n.artifact({"x": ["N", 4]}, {"y": ["N", 4], "apart": ["N", 4]})


def test_graphs_within_and_what_lies_beside() -> None:
    artifact, x = branched(), np.random.default_rng(1).random((3, 4), np.float32)
    suffix = Suffix(FloatModel(artifact), "inner")
    assert suffix.outputs == ["y"]
    assert sorted(suffix.beside) == ["shape", "x"]
    range = Range(0.0, 0.5)
    got = rounded(artifact, "inner", x, U8, range)
    assert list(got) == ["y"]
    np.testing.assert_allclose(got["y"], by_hand(x, U8, range) + x, atol=1e-6)


@pytest.mark.parametrize("tensor", ["x", "hidden"])
def test_tensors_share_a_suffix_and_are_rounded_one_at_a_time(tensor: str) -> None:
    artifact, range = networks.mlp(), Range(-0.5, 1.5)
    suffix = Suffix(FloatModel(artifact), "x")
    assert suffix.take("hidden")
    assert not suffix.take("elsewhere")
    onnx.checker.check_model(suffix.artifact(U8).data)
    with loaded(suffix.artifact(U8)) as model:
        wanted = rounded(artifact, tensor, X, U8, range)["y"]
        for found in suffix.rounded(model, [{"x": X}, {"x": X}], tensor, range, U8):
            np.testing.assert_allclose(found["y"], wanted, rtol=1e-5, atol=1e-6)
