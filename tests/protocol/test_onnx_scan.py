from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper
from onnx.external_data_helper import uses_external_data

import models
from penstock.protocol.onnx_scan import (
    external_files,
    has_control_flow,
    has_external_data,
    may_have_half_constants,
    unranked_inputs,
)

_PLACES = [
    "initializer",
    "attribute",
    "attribute list",
    "subgraph",
    "sparse",
    "sparse attribute",
    "function",
    "training",
]


def _tensor(external: bool, name: str = "t") -> onnx.TensorProto:
    tensor = onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [2], b"\x70\x01\x70\x01\x70\x01\x70\x01", raw=True)
    if external:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    return tensor


def _put(model: onnx.ModelProto, place: str, tensor: onnx.TensorProto) -> None:
    graph = model.graph
    attribute = {"attribute": "t", "attribute list": "tensors", "subgraph": "g", "sparse attribute": "sparse_tensor"}
    if place == "initializer":
        graph.initializer.append(tensor)
    elif place == "sparse":
        graph.sparse_initializer.add().indices.CopyFrom(tensor)
    elif place == "function":
        model.functions.add(name="f").node.add(op_type="Constant").attribute.add(name="value").t.CopyFrom(tensor)
    elif place == "training":
        model.training_info.add().algorithm.initializer.append(tensor)
    else:
        held = graph.node.add(op_type="Constant", doc_string="p\x01").attribute.add(name="value")
        field = getattr(held, attribute[place])
        if place == "attribute list":
            field.append(tensor)
        elif place == "subgraph":
            field.node.add(op_type="If").attribute.add(name="then").g.initializer.append(tensor)
        elif place == "sparse attribute":
            field.values.CopyFrom(tensor)
        else:
            field.CopyFrom(tensor)


def _tensors(message: object) -> Iterator[onnx.TensorProto]:
    """Every TensorProto below ``message``, by protobuf's own reflection."""
    if isinstance(message, onnx.TensorProto):
        yield message
    for field, value in message.ListFields():  # type: ignore[attr-defined]
        if field.message_type is not None:
            for inner in value if not hasattr(value, "ListFields") else [value]:
                yield from _tensors(inner)


@given(st.lists(st.tuples(st.sampled_from(_PLACES), st.booleans()), max_size=6))
def test_agrees_with_onnx_wherever_a_tensor_is(tensors: list[tuple[str, bool]]) -> None:
    model = onnx.load_model_from_string(models.linear().data)
    for place, external in tensors:
        _put(model, place, _tensor(external))
    expected = any(uses_external_data(tensor) for tensor in _tensors(model))
    assert expected == any(external for _, external in tensors)
    assert has_external_data(model.SerializeToString()) is expected


@given(st.data())
def test_bytes_that_protobuf_reads_are_read_alike(data: st.DataObject) -> None:
    model = onnx.load_model_from_string(models.linear().data)
    _put(model, "attribute", _tensor(external=True))
    changed = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = onnx.ModelProto.FromString(bytes(changed))
    except DecodeError:
        return
    try:
        found = has_external_data(bytes(changed))
    except ValueError:
        return  # stricter than protobuf: groups, which ONNX has not
    # Where a message came twice, protobuf keeps the last word; any word is enough for us.
    assert found or not any(uses_external_data(tensor) for tensor in _tensors(read))


@pytest.mark.parametrize(
    "location", [b"\x70\x01", b"\x70\x81\x00", b"\xf0\x80\x00\x01", b"\x70\x81\x80\x80\x80\x10"], ids=bytes.hex
)
def test_numbers_written_at_length(location: bytes) -> None:
    graph = b"\x2a" + bytes([len(location)]) + location
    assert has_external_data(b"\x3a" + bytes([len(graph)]) + graph)


@pytest.mark.parametrize(
    "data",
    [b"\0", b"\x3a", b"\x3a\x05", b"\x3a\x02\x2a\x05", b"\xff" * 20, b"\x3b\x3c", b"<?xml version='1.0'?>", b"\x0d\0"],
    ids=["field 0", "no length", "cut", "leaves its parent", "endless", "group", "text", "short"],
)
def test_bytes_that_are_no_model(data: bytes) -> None:
    with pytest.raises(ValueError, match="byte"):
        has_external_data(data)


def test_depth_is_bounded() -> None:
    data = b""
    for _ in range(200):  # graph of a node of an attribute of a graph ...
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            size = len(data)
            length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F]) if size > 127 else bytes([size])
            data = tag + length + data
    length = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    with pytest.raises(ValueError, match="nested deeper than 100"):
        has_external_data(b"\x3a" + length + data)


def test_engines_do_not_import_onnx() -> None:
    script = "import sys, penstock.engines.onnxruntime; sys.exit('onnx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_every_external_file_is_named_once() -> None:
    model = onnx.load_model_from_string(models.linear().data)
    assert external_files(model.SerializeToString()) == set()
    for place, name in (("initializer", "w.bin"), ("subgraph", "deep/w.bin"), ("sparse", "w.bin"), ("attribute", "ü")):
        tensor = _tensor(external=True)
        tensor.external_data[0].value = name
        tensor.external_data.add(key="offset", value="4096")
        _put(model, place, tensor)
    _put(model, "function", _tensor(external=False))
    assert external_files(model.SerializeToString()) == {"w.bin", "deep/w.bin", "ü"}


def test_control_flow_is_seen() -> None:
    assert has_control_flow(models.count_to().data)
    assert not has_control_flow(models.linear().data)


@pytest.mark.parametrize("place", _PLACES)
def test_constants_in_fp16_are_seen_wherever_they_are(place: str) -> None:
    for kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16):
        model = onnx.load_model_from_string(models.linear().data)
        _put(model, place, helper.make_tensor("half", kind, [2], bytes(4 if kind != 1 else 8), raw=True))
        assert may_have_half_constants(model.SerializeToString()) is (kind == onnx.TensorProto.FLOAT16)


def test_casts_to_fp16_make_constants_by_folding() -> None:
    for kind in (onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE):
        model = onnx.load_model_from_string(models.linear().data)
        model.graph.node.append(helper.make_node("Cast", [model.graph.input[0].name], ["cast"], to=kind))
        assert may_have_half_constants(model.SerializeToString()) is (kind == onnx.TensorProto.FLOAT16)


def test_inputs_of_unknown_rank() -> None:
    values = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("a", None), ("b", []), ("c", ["N"]))]
    sequence = helper.make_tensor_sequence_value_info("d", 1, None)
    graph = helper.make_graph([], "g", [*values, sequence], [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph).SerializeToString()
    assert unranked_inputs(model) == {"a"}
    with pytest.raises(ValueError, match="byte"):
        unranked_inputs(model[:4] + b"\xff")
