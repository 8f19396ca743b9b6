# ruff: noqa: E501 - a model is easier to read in one line
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import models
from penstock.protocol.onnx_scan import has_control_flow
from penstock.rows.graph import AttributeReference, OnnxGraph, OnnxTensor, read_graph
from penstock.tensor import DataType
from row_graphs import RandomGraph, parsed


@pytest.mark.parametrize(
    "field",
    [
        b"\x08\x01",  # graph.node as a number
        b"\x0d\x00\x00\x00\x00",  # graph.node as 4 bytes
        b"\x0a\x09\x2a\x07\x0a\x01a\x1a\x02\x01\x02",  # attribute.i as a list of numbers
        b"\x0a\x0a\x2a\x08\x0a\x01a\x1d\x00\x00\x80\x3f",  # attribute.i as 4 bytes
    ],
)
def test_fields_of_another_wire_type_than_the_schema_has_are_refused(field: bytes) -> None:
    # Parsers ignore them, so what they say must not count.
    assert read_graph(b"\x3a\x03\x12\x01g").graph == OnnxGraph((), (), (), {})
    with pytest.raises(ValueError, match="wire type"):
        read_graph(b"\x3a%c%b" % (len(field), field))


@pytest.mark.parametrize("seed", range(30))
def test_nodes_and_tensors_are_those_that_onnx_reads(seed: int) -> None:
    data = RandomGraph(seed).artifact().data
    proto, model = onnx.load_model_from_string(data), read_graph(data)
    assert dict(model.opsets) == {each.domain: each.version for each in proto.opset_import}
    assert model.graph.inputs == tuple(each.name for each in proto.graph.input)
    assert model.graph.outputs == tuple(each.name for each in proto.graph.output)
    for node, like in zip(model.graph.nodes, proto.graph.node, strict=True):
        assert (node.name, node.operator, node.inputs, node.outputs) == (
            like.name,
            like.op_type,
            (*like.input,),
            (*like.output,),
        )
        for attribute in like.attribute:
            expected, found = helper.get_attribute_value(attribute), node.attributes[attribute.name]
            if isinstance(found, OnnxGraph):
                assert found.outputs == tuple(each.name for each in expected.output)
            elif not isinstance(found, OnnxTensor):
                assert found == (
                    expected.decode()
                    if isinstance(expected, bytes)
                    else tuple(expected)
                    if isinstance(expected, list)
                    else expected
                )
    for tensor in proto.graph.initializer:
        np.testing.assert_array_equal(model.graph.tensors[tensor.name].array(), numpy_helper.to_array(tensor))


@pytest.mark.parametrize("datatype", [each for each in DataType if each is not DataType.BYTES])
@pytest.mark.parametrize("raw", [False, True])
def test_elements_however_they_are_stored(datatype: DataType, raw: bool) -> None:
    array = np.array([[0, 1, 1], [0, 0, 1]]).astype(datatype.dtype)
    tensor = numpy_helper.from_array(array, "t")
    if not raw:
        tensor = helper.make_tensor("t", datatype.onnx, array.shape, array.ravel().tolist())
    graph = helper.make_graph([], "g", [], [], [tensor])
    found = read_graph(helper.make_model(graph).SerializeToString()).graph.tensors["t"].array()
    if raw or datatype not in {DataType.UINT32, DataType.UINT64}:
        assert found is not None
        np.testing.assert_array_equal(found.astype(np.float64), array.astype(np.float64))
    else:
        assert found is None  # no shape or axis has this type


def test_negative_numbers() -> None:
    tensor = helper.make_tensor("t", TensorProto.INT64, [3], [-1, -(2**63), 2**63 - 1])
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=-1)], "g", [], [], [tensor])
    model = read_graph(helper.make_model(graph).SerializeToString())
    assert model.graph.nodes[0].attributes == {"axis": -1}
    assert model.graph.tensors["t"].array().tolist() == [-1, -(2**63), 2**63 - 1]


def test_data_outside_the_file_and_texts_have_no_elements() -> None:
    outside = numpy_helper.from_array(np.zeros(3), "outside")
    outside.data_location = TensorProto.EXTERNAL
    text = helper.make_tensor("text", TensorProto.STRING, [1], [b"a"])
    model = read_graph(helper.make_model(helper.make_graph([], "g", [], [], [outside, text])).SerializeToString())
    assert [tensor.array() for tensor in model.graph.tensors.values()] == [None, None]
    assert model.graph.tensors["outside"].dims == (3,)


def test_functions_and_references() -> None:
    body = 'y = local.f<k = 1>(x) FUNCTIONS <opset_import: ["": 17], domain: "local"> f <k>(a) => (b) { b = Softmax<axis: int = @k>(a) }'
    model = read_graph(parsed(body).data)
    function = model.functions["local", "f", ""]
    assert (function.body.inputs, function.body.outputs, function.opsets) == (("a",), ("b",), {"": 17})
    assert function.body.nodes[0].attributes == {"axis": AttributeReference("k")}


def test_weights_are_not_copied() -> None:
    data = models.linear(300, 200).data
    (tensor,) = read_graph(data).graph.tensors.values()
    assert tensor.data is data
    assert np.shares_memory(tensor.array(), np.frombuffer(data, np.uint8))


def test_a_graph_in_two_parts_is_refused() -> None:
    data = models.linear().data
    graph = onnx.load_model_from_string(data).graph.SerializeToString()
    with pytest.raises(ValueError, match="field 'graph' appears 2 times"):
        read_graph(data + b"\x3a" + bytes([len(graph) & 0x7F | 0x80, len(graph) >> 7]) + graph)


@given(st.binary(max_size=60), st.integers(0, 400), st.binary(max_size=6))
def test_any_bytes_are_read_or_refused(noise: bytes, at: int, change: bytes) -> None:
    whole = parsed("y = Softmax<axis = 1>(x)").data
    for data in (noise, whole[:at] + change + whole[at + len(change) :], whole[: at % len(whole)]):
        try:
            read_graph(data)
        except ValueError:
            continue


@given(
    integers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    floats=st.lists(st.floats(width=32, allow_nan=False), min_size=1),
    texts=st.lists(st.text(), min_size=1),
)
def test_lists_of_attributes(integers: list[int], floats: list[float], texts: list[str]) -> None:
    node = helper.make_node("Trees", [], ["y"], integers=integers, floats=floats, texts=texts, last=7)
    data = helper.make_model(helper.make_graph([node], "g", [], [])).SerializeToString()
    found = read_graph(data).graph.nodes[0].attributes
    assert found == {"integers": (*integers,), "floats": (*floats,), "texts": (*texts,), "last": 7}
    assert not has_control_flow(data)
