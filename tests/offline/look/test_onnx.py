from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import input_models
import models
import odd_models
from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.look.onnx import read
from penstock.tensor import DataType
from row_graphs import parsed


@pytest.mark.parametrize(
    "artifact",
    [
        *(models.identity(kind) for kind in DataType),
        models.linear(),
        models.two_linear(),
        models.fixed_batch(),
        models.sum_and_difference(),
        input_models.voice_activity(),
        input_models.categories(),
        input_models.text_encoder(),
    ],
)
def test_the_file_says_the_signature_that_the_engine_reads(artifact: Artifact) -> None:
    assert read(artifact).signature == input_models.signature_of(artifact)


def test_odd_models_are_read_without_an_engine() -> None:
    for odd in odd_models.odd_models():
        found = read(Artifact.from_bytes(odd.data))
        assert {one.name for one in found.inputs} >= set(odd.requests[0] if odd.requests else ())
        assert found.outputs


def test_operators_of_subgraphs_parameters_and_bytes() -> None:
    found = read(input_models.voice_activity())
    assert found.operators["Neg"] == found.operators["If"] == 1
    assert found.parameters == 8 * 256
    assert found.weight_bytes == 8 * 256 * 4 + 3 * 8
    assert found.axes["input"] == ("N", "")


def test_types_that_no_tensor_has() -> None:
    value = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    output = helper.make_value_info("y", helper.make_sequence_type_proto(value))
    graph = helper.make_graph(
        [helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])],
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT8E4M3FN, [None, 2])],
        [output],
    )
    found = read(Artifact.from_bytes(helper.make_model(graph).SerializeToString()))
    assert found.inputs[0].datatype == "FLOAT8E4M3FN"
    assert found.outputs[0].datatype == "seq(map(INT64, tensor(FP32)))"
    assert found.outputs[0].shape is None
    assert found.signature is None


def test_quantised_models_are_recognised() -> None:
    assert read(models.linear()).quantised == ""
    assert read(models.product_of_bytes(3)).quantised == "2 DequantizeLinear, 1 QuantizeLinear"


def test_custom_operators_and_other_files_are_noted(tmp_path: Path) -> None:
    found = read(parsed("y = local.Twist(x)"))
    assert any("custom operators" in note and "local.Twist" in note for note in found.notes)
    path = models.external_linear(tmp_path)
    (tmp_path / "w.bin").unlink()
    assert read(Artifact.from_file(path)).notes == ("weights in other files: w.bin",)
    assert read(Artifact.from_file(path)).parameters == 6


def test_an_operator_that_the_model_defines_is_not_custom() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[N] x) => (float[N] y) { y = local.Twice(x) } '
        '<domain: "local", opset_import: ["" : 17]> Twice (a) => (b) { b = Add(a, a) }'
    )
    found = read(Artifact.from_bytes(onnx.parser.parse_model(text).SerializeToString()))
    assert found.notes == ()
    assert found.operators == {"Add": 1, "local.Twice": 1}


@pytest.mark.parametrize("data", [b"not a model", b"\xff" * 100])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidModel, match="not an ONNX model"):
        read(Artifact.from_bytes(data))


def test_four_bit_weights_take_half_a_byte() -> None:
    model = onnx.load_model_from_string(models.linear().data)
    model.graph.initializer.append(helper.make_tensor("q", TensorProto.INT4, [8], np.zeros(8, np.int8)))
    assert read(Artifact.from_bytes(model.SerializeToString())).weight_bytes == 6 * 4 + 4
