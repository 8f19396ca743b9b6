"""Reads the graph of an ONNX model from its bytes: operators, attributes, and the positions of the tensors' data.

Large data are neither copied nor decoded. ``onnx`` is not imported, which saves a server 5 MB of memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from penstock.protocol.varint import TAGGED_FLOATS, TAGGED_INTEGERS, TAGS, read_varint
from penstock.tensor import Array, DataType

Attribute = Any
"""The value of an attribute: an ``int``, ``float``, ``str``, ``OnnxTensor``, ``OnnxGraph``, a tuple of these, or an
``AttributeReference``. None for a value of any other type."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_INT, _FLOAT, _TEXT, _SPAN = "int", "float", "text", "span"
_MAX_DEPTH = 100
"""Maximum nesting depth of messages, as in protobuf."""

_SCHEMA = """
Model: 1 ir_version int, 7 graph Graph, 8 opset Opset, 25 functions Function
Opset: 1 domain text, 2 version int
Graph: 1 nodes Node, 5 tensors Tensor, 11 inputs Value, 12 outputs Value
Value: 1 name text
Function: 1 name text, 4 inputs text, 5 outputs text, 7 nodes Node, 9 opset Opset, 10 domain text, 11 defaults Attribute,
 13 overload text
Node: 1 inputs text, 2 outputs text, 3 name text, 4 operator text, 5 attributes Attribute, 7 domain text, 8 overload text
Attribute: 1 name text, 2 f float, 3 i int, 4 s text, 5 t Tensor, 6 g Graph, 7 floats float, 8 ints int, 9 strings text, 20 type int,
 21 reference text
Tensor: 1 dims int, 2 datatype int, 4 float32 span, 5 small span, 7 int64 span, 8 name text, 9 raw span, 10 float64 span,
 14 location int
"""
"""The fields of onnx.proto that are read, by message type. Each field has its number, its name, and its kind or message type."""
_FIELDS = {
    message: {int(number): (name, kind) for number, name, kind in (field.split() for field in fields.split(","))}
    for message, fields in (line.split(":") for line in _SCHEMA.replace(",\n", ",").strip().splitlines())
}
_ATTRIBUTE_KINDS = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings"}
"""The field that holds an attribute's value, by the attribute's ``type``. No operator with a rule needs other types."""
_PACKED = {"dims", "floats", "ints"}
"""Kinds of fields that may be packed, as protobuf allows for repeated numbers."""
_TAGGED_FLOAT = np.dtype([("tag", "u1"), ("value", "<f4")])
_TAGGED_INTEGER = re.compile(rb"\x40([\x80-\xff]*[\x00-\x7f])")
_BY_NUMBER = {each.onnx: each for each in DataType}


class AttributeReference(NamedTuple):
    """A reference to the attribute ``name`` of the node that calls the function."""

    name: str


class OnnxTensor(NamedTuple):
    """A constant of the model. ``data`` contains the bytes of the whole model; the constant is at ``start`` to ``end``."""

    name: str
    dims: tuple[int, ...]
    datatype: DataType | None
    field: str
    """The protobuf field with the elements; empty if the elements are in another file, or in several fields."""
    start: int
    end: int
    data: bytes

    def array(self) -> Array | None:
        """The elements as an array; None if the elements are not numbers, or are in another file."""
        datatype, count = self.datatype, int(np.prod(self.dims, dtype=object))
        if not self.field or datatype is None or datatype is DataType.BYTES:
            return None
        if self.field in {"int64", "small"}:
            numbers = _packed(self.data, self.start, self.end)
            is_half = self.field == "small" and datatype.is_float  # the elements are the bits of bfloat16 values
            found = np.array(numbers, np.uint16).view(datatype.dtype) if is_half else np.array(numbers, np.int64)
        else:
            dtype = datatype.dtype if self.field == "raw" else np.dtype(self.field)
            if count * dtype.itemsize != self.end - self.start:
                return None
            found = np.frombuffer(self.data, dtype, count, self.start)
        return found.reshape(self.dims) if found.size == count else None


class OnnxNode(NamedTuple):
    """A node of a graph, which calls an operator or a model function."""

    name: str
    domain: str
    operator: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


class OnnxGraph(NamedTuple):
    """A graph: its nodes in order, and its constants."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    tensors: Mapping[str, OnnxTensor]
    """Constants by name."""


class OnnxFunction(NamedTuple):
    """A model function: an operator that the model itself defines."""

    body: OnnxGraph
    opsets: Mapping[str, int]
    defaults: Mapping[str, Attribute]


class OnnxModel(NamedTuple):
    """A graph, with the opsets and functions that define its operators."""

    graph: OnnxGraph
    opsets: Mapping[str, int]
    """Opset version by domain; the default domain is the empty string."""
    functions: Mapping[tuple[str, str, str], OnnxFunction]
    """Functions by domain, name and overload."""


def read_graph(model: bytes) -> OnnxModel:
    """Read the graph of ``model``, a serialized ModelProto. Raises ValueError if the bytes are not well-formed protobuf."""
    try:
        found = _message(model, 0, len(model), "Model", 0)
    except IndexError:
        raise ValueError("the model is truncated") from None
    functions = {
        (_domain(each), _one(each, "name", ""), _one(each, "overload", "")): OnnxFunction(
            OnnxGraph(tuple(each["inputs"]), tuple(each["outputs"]), tuple(each["nodes"]), {}),
            _opsets(each),
            dict(each["defaults"]),
        )
        for each in found["functions"]
    }
    return OnnxModel(_one(found, "graph", OnnxGraph((), (), (), {})), _opsets(found), functions)


def _message(data: bytes, position: int, end: int, kind: str, depth: int) -> dict[str, list[Any]]:
    """The fields of one message: a list of values for each name, in the order of the bytes."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"the model is nested deeper than {_MAX_DEPTH} levels")
    fields, found = _FIELDS[kind], defaultdict[str, list[Any]](list)
    while position < end:
        is_number = kind == "Attribute" and data[position] in TAGS
        if is_number and (after := _read_numbers(data, position, end, found)) > position:
            position = after
            continue
        tag = data[position]
        position += 1
        if tag > 0x7F:
            tag, position = read_varint(data, position - 1, end)
        field, wire = fields.get(tag >> 3), tag & 7
        stop = position + {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
        number = 0
        if wire in {_LENGTH, _VARINT}:
            number = data[position]
            position += 1
            if number > 0x7F:
                number, position = read_varint(data, position - 1, end)
            stop = position + (number if wire == _LENGTH else 0)
        elif stop == position:
            raise ValueError(f"invalid wire type {wire} at byte {position}")
        if stop > end:
            raise ValueError(f"the field at byte {position} ends after its message, which ends at byte {end}")
        if field is not None:
            name, of = field
            if wire == _LENGTH and (of not in {_INT, _FLOAT} or name in _PACKED):
                found[name] += _values(data, position, stop, of, depth)
            else:
                found[name].append(_number(data, position, number, of, wire))
        position = stop
    return found


def _read_numbers(data: bytes, position: int, end: int, found: dict[str, list[Any]]) -> int:
    """Add the elements of ``floats`` and ``ints`` that begin at ``position`` to ``found``. Returns the position after them."""
    if floats := TAGGED_FLOATS.match(data, position, end):
        count = (floats.end() - position) // _TAGGED_FLOAT.itemsize
        found["floats"] += np.frombuffer(data, _TAGGED_FLOAT, count, position)["value"].tolist()
        position = floats.end()
    if integers := TAGGED_INTEGERS.match(data, position, end):
        for each in _TAGGED_INTEGER.findall(integers.group()):
            found["ints"].append(each[0] if len(each) == 1 else _signed(read_varint(each, 0, len(each))[0]))
        position = integers.end()
    return position


def _number(data: bytes, position: int, number: int, kind: str, wire: int) -> int | float | None:
    """The value of a field that is not length-delimited. None for an unpacked element of a constant, and for a field of an
    unexpected wire type.
    """
    if (kind, wire) == (_INT, _VARINT):
        return _signed(number)
    if (kind, wire) == (_FLOAT, _FIXED32):
        return float(np.frombuffer(data, "<f4", 1, position)[0])
    if kind == _SPAN:
        return None
    raise ValueError(f"a field of kind '{kind}' has wire type {wire}")


def _values(data: bytes, start: int, end: int, kind: str, depth: int) -> list[Any]:
    if kind == _TEXT:
        return [data[start:end].decode("utf-8", "surrogateescape")]
    if kind == _SPAN:
        return [(start, end)]
    if kind == _INT:
        return _packed(data, start, end)
    if kind == _FLOAT:
        return [*np.frombuffer(data, "<f4", (end - start) // 4, start).tolist()]
    return [_MAKERS[kind](_message(data, start, end, kind, depth + 1), data)]


def _packed(data: bytes, position: int, end: int) -> list[int]:
    numbers = []
    while position < end:
        number, position = read_varint(data, position, end)
        numbers.append(_signed(number))
    return numbers


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _one(found: Mapping[str, list[Any]], name: str, default: Any) -> Any:
    """The last value of a field. Raises ValueError if a message appears several times, because this reader does not merge them."""
    values = found.get(name)
    if not values:
        return default
    if len(values) > 1 and isinstance(values[0], tuple):
        raise ValueError(f"field '{name}' appears {len(values)} times")
    return values[-1]


def _domain(found: Mapping[str, list[Any]]) -> str:
    domain: str = _one(found, "domain", "")
    return "" if domain == "ai.onnx" else domain


def _opsets(found: Mapping[str, list[Any]]) -> dict[str, int]:
    opsets = dict(found["opset"])
    if len(opsets) < len(set(found["opset"])):
        raise ValueError("a domain imports two opsets")
    return opsets


def _tensor(found: dict[str, list[Any]], data: bytes) -> OnnxTensor:
    datatype = _BY_NUMBER.get(_one(found, "datatype", 0))
    name, dims = _one(found, "name", ""), tuple(found["dims"])
    spans = [(field, span) for field in ("small", "int64", "float32", "raw", "float64") for span in found[field]]
    if len(spans) != 1 or spans[0][1] is None or _one(found, "location", 0):
        return OnnxTensor(name, dims, datatype, "", 0, 0, b"")
    field, (start, end) = spans[0]
    return OnnxTensor(name, dims, datatype, field, start, end, data)


def _attribute(found: dict[str, list[Any]], _: bytes) -> tuple[str, Attribute]:
    name, number = _one(found, "name", ""), _one(found, "type", 0)
    if reference := _one(found, "reference", ""):
        return name, AttributeReference(reference)
    kind = _ATTRIBUTE_KINDS.get(number) if number else next((k for k in _ATTRIBUTE_KINDS.values() if found[k]), None)
    if kind in {"floats", "ints", "strings"}:
        return name, tuple(found[kind])
    return name, _one(found, kind, {"i": 0, "f": 0.0, "s": ""}.get(kind)) if kind else None


def _node(found: dict[str, list[Any]], _: bytes) -> OnnxNode:
    return OnnxNode(
        _one(found, "name", ""),
        _domain(found),
        _one(found, "operator", ""),
        _one(found, "overload", ""),
        tuple(found["inputs"]),
        tuple(found["outputs"]),
        dict(found["attributes"]),
    )


def _graph(found: dict[str, list[Any]], _: bytes) -> OnnxGraph:
    tensors = {tensor.name: tensor for tensor in found["tensors"]}
    return OnnxGraph(tuple(found["inputs"]), tuple(found["outputs"]), tuple(found["nodes"]), tensors)


_MAKERS: dict[str, Any] = {
    "Tensor": _tensor,
    "Attribute": _attribute,
    "Node": _node,
    "Graph": _graph,
    "Function": lambda found, _: found,
    "Opset": lambda found, _: (_domain(found), _one(found, "version", 0)),
    "Value": lambda found, _: _one(found, "name", ""),
}
