"""Serialized ModelInferRequests of all kinds: as clients send them, oddly written, damaged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.protocol import messages
from penstock.protocol.varint import write_varint
from penstock.tensor import DataType, to_wire

TYPED = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}
AN_EMPTY_GROUP = b"\x4b\x4c"
"""An unknown field of a kind that is left to the protobuf class, with all the rest of the message."""


@st.composite
def tensors(draw: st.DrawFn, among: list[DataType]) -> np.ndarray:
    datatype = draw(st.sampled_from(among))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if datatype is DataType.BYTES:
        count = int(np.prod(shape))
        array = np.empty(count, object)
        array[:] = draw(st.lists(st.binary(), min_size=count, max_size=count))
        return array.reshape(shape)
    if datatype in (DataType.FP16, DataType.BF16):
        return draw(arrays.arrays(np.float32, shape, elements=st.floats(-9, 9, width=32))).astype(datatype.dtype)
    return draw(arrays.arrays(datatype.dtype, shape))


def describe(name: str, array: np.ndarray) -> Any:
    datatype = DataType.from_numpy(array.dtype).value
    return messages.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=array.shape)


def raw_request(given_arrays: list[np.ndarray], **fields: Any) -> Any:
    message = messages.ModelInferRequest(model_name="m", **fields)
    for n, array in enumerate(given_arrays):
        message.inputs.append(describe(f"x{n}", array))
        message.raw_input_contents.append(bytes(to_wire(array)))
    return message


def typed_request(given_arrays: list[np.ndarray], **fields: Any) -> Any:
    message = messages.ModelInferRequest(model_name="m", **fields)
    for n, array in enumerate(given_arrays):
        tensor = describe(f"x{n}", array)
        tensor.contents.SetInParent()
        getattr(tensor.contents, TYPED[DataType.from_numpy(array.dtype)]).extend(array.ravel().tolist())
        message.inputs.append(tensor)
    return message


def field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + write_varint(len(content)) + content


def reencoded(data: bytes, source: random.Random) -> bytes:
    """``data`` with its outermost fields in another order, some lengths longer than they need be, and unknown fields between."""
    fields = list(fields_of(data))
    source.shuffle(fields)
    made = b""
    for tag, content in fields:
        size = len(content)
        padded = bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14))
        made += bytes((tag,)) + (padded if source.random() < 0.3 else write_varint(size)) + content
        made += source.choice(
            [b"", b"\x7a\x02ab", b"\x40\x96\x01", b"\x8a\x08\x00", b"\x45abcd", b"\x49abcdefgh", AN_EMPTY_GROUP]
        )
    return made


def fields_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        tag, size, at = data[0], 0, 1
        while True:
            size |= (data[at] & 0x7F) << 7 * (at - 1)
            at += 1
            if data[at - 1] < 128:
                break
        yield tag, data[at : at + size]
        data = data[at + size :]


@st.composite
def wire_messages(draw: st.DrawFn) -> bytes:
    """Requests as clients send them, or oddly written, or damaged."""
    make = draw(st.sampled_from([raw_request, typed_request]))
    message = make(draw(st.lists(tensors(list(TYPED)), max_size=3)), id=draw(st.text(max_size=3)))
    if draw(st.booleans()):
        message.outputs.add(name="y").parameters["classification"].int64_param = draw(st.integers(-1, 2))
    if draw(st.booleans()):
        message.parameters["p"].double_param = 0.5
    data = message.SerializeToString()
    if draw(st.booleans()):
        data = reencoded(data, draw(st.randoms(use_true_random=False)))
    if data and draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data = draw(
            st.sampled_from([data[:at], data[:at] + bytes((data[at] ^ draw(st.integers(1, 255)),)) + data[at + 1 :]])
        )
    return data


def parse(data: bytes) -> Any:
    try:
        return messages.ModelInferRequest.FromString(data)
    except DecodeError:
        return None
