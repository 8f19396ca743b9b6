"""Guard divisions of integers in an ONNX model, because ONNX Runtime ends the process if one divides the smallest number by −1.

The quotient does not fit the type, so x86 CPUs raise a signal. This concerns ``Div`` and ``Mod`` of INT32 and INT64; the kernels of
narrower types compute in 32 bits. The rewrite divides by 1 instead of −1 and negates the quotient, so results wrap around::

    is_minus_one = Cast(Equal(b, -1))
    Div(a, b) = Div(a, b + 2 * is_minus_one) * (1 - 2 * is_minus_one)
    Mod(a, b) = Mod(a, b + 2 * is_minus_one)

These operators exist in every opset that ONNX Runtime supports. The rewrite reads and writes the protobuf wire format, because the
server does not import ``onnx``. It covers the main graph, but not the bodies of If, Loop, Scan and functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from penstock.protocol.varint import read_fields, write_varint

_Field = tuple[int, int | memoryview]

_GRAPH = 7
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7
_TENSOR_TYPE, _TENSOR_NAME, _EXTERNAL_DATA = 2, 8, 13
_TYPES = {6: np.dtype("<i4"), 7: np.dtype("<i8")}
"""The integer types with this fault, by their number in ONNX."""
_ORT_TYPES = {"tensor(int32)": 6, "tensor(int64)": 7}
_OPERATORS = (b"Div", b"Mod")
_OF_FLOATS = frozenset(
    b"BatchNormalization Conv Erf Exp Gelu LayerNormalization Log Reciprocal Sigmoid Softmax Softplus Sqrt Tanh".split()
)
"""Common operators whose outputs are never integers."""
_KEEPS = frozenset(
    b"Abs Clip Concat Expand Flatten Gather Identity MatMul Neg Pow ReduceL2 ReduceMax ReduceMean ReduceSum Relu Reshape Slice "
    b"Squeeze Transpose Unsqueeze".split()
)
"""Common operators whose output has the type of the first input."""
_ARITHMETIC = frozenset((b"Add", b"Div", b"Mod", b"Mul", b"Sub"))
"""Common operators whose two inputs and output have the same type."""
_FLOAT, _INT64 = 1, 7
_MINUS_ONE = b"\xff\xff\xff\xff"
"""Bytes that occur in every serialized form of −1: packed, unpacked or raw, with 32 or 64 bits."""


class _Node(NamedTuple):
    operator: bytes
    inputs: list[bytes]
    output: bytes


def guarded(model: bytes, types: Callable[[bytes], Mapping[str, str]]) -> bytes:
    """``model`` with guarded divisions; the same object if it needs no guard.

    ``types`` loads a variant of the model and returns ONNX Runtime's types of its outputs. It is called only if the types of
    divisions are not declared in the model. Raises ValueError if the bytes are not well-formed protobuf.
    """
    if not any(operator in model for operator in _OPERATORS):
        return model
    fields = list(read_fields(model))
    found = _suspects([view for field, view in fields if field == _GRAPH and isinstance(view, memoryview)])
    if not found:
        return model
    unknown = [name for name, kind in found.items() if not kind]
    if unknown:
        # An output without a type gets the type that ONNX Runtime infers.
        more = [_field(_OUTPUT, _field(1, name)) for name in unknown]
        inferred = types(model + _field(_GRAPH, *more))
        found |= {name: _ORT_TYPES.get(inferred.get(name.decode("utf-8", "replace"), ""), 0) for name in unknown}
    divisions = {name: kind for name, kind in found.items() if kind in _TYPES}
    return _rewritten(model, fields, divisions) if divisions else model


def _suspects(graphs: list[memoryview]) -> dict[bytes, int]:
    """The outputs of divisions whose divisor may be −1, each with the number of its type; 0 if it is not declared."""
    parts = [part for graph in graphs for part in read_fields(graph)]
    nodes = [(_node(view), view) for field, view in parts if field == _NODE and isinstance(view, memoryview)]
    divisions = [node for node, _ in nodes if node.operator in _OPERATORS and len(node.inputs) == 2]
    if not divisions:
        return {}
    kinds = dict(_declared(parts))
    divisors = {node.inputs[1] for node in divisions}
    inputs = {_text(view, 1) for field, view in parts if field == _INPUT}
    safe = set()
    for tensor in (view for field, view in parts if field == _INITIALIZER and isinstance(view, memoryview)):
        name = _text(tensor, _TENSOR_NAME)
        kinds[name] = next(
            (value for field, value in read_fields(tensor) if field == _TENSOR_TYPE and isinstance(value, int)), 0
        )
        if name in divisors and kinds[name] in _TYPES and name not in inputs and not _may_have_minus_one(tensor):
            safe.add(name)
    for node, view in nodes:
        if not kinds.get(node.output):
            kinds[node.output] = _kind(node, view, kinds)
        if node.operator == b"Constant" and node.output in divisors and not _may_have_minus_one(view):
            safe.add(node.output)
    found = {}
    for node in divisions:
        kind = next((kinds[name] for name in (*node.inputs, node.output) if kinds.get(name)), 0)
        if node.inputs[1] not in safe and (not kind or kind in _TYPES):
            found[node.output] = kind
    return found


def _kind(node: _Node, message: memoryview, kinds: Mapping[bytes, int]) -> int:
    """The number of the type of the output of ``node``; 0 if it is not known."""
    if node.operator in _OF_FLOATS:
        return _FLOAT
    if node.operator in (b"Shape", b"Size"):
        return _INT64
    if node.operator == b"Cast":
        to = [
            value for attribute in _views(message, _ATTRIBUTE) for field, value in read_fields(attribute) if field == 3
        ]
        return next((value for value in to if isinstance(value, int)), 0)
    if node.operator not in _KEEPS | _ARITHMETIC:
        return 0
    names = node.inputs[: 1 + (node.operator in _ARITHMETIC)]
    return next((kinds[name] for name in names if kinds.get(name)), 0)


def _may_have_minus_one(constant: memoryview) -> bool:
    """True if ``constant``, a tensor or a node with a tensor, may contain −1. Data in an external file is not read."""
    is_external = any(field == _EXTERNAL_DATA for field, _ in read_fields(constant))
    return is_external or _MINUS_ONE in bytes(constant)


def _declared(parts: Iterable[_Field]) -> Iterator[tuple[bytes, int]]:
    """The names of values and the numbers of their element types, as far as the graph declares them."""
    for field, value in parts:
        if field in (_INPUT, _OUTPUT, _VALUE_INFO) and isinstance(value, memoryview):
            for kind in _views(value, 2):
                for tensor in _views(kind, 1):
                    yield from (
                        (_text(value, 1), number)
                        for part, number in read_fields(tensor)
                        if part == 1 and isinstance(number, int)
                    )


def _rewritten(model: bytes, fields: list[_Field], divisions: Mapping[bytes, int]) -> bytes:
    prefix = b"penstock_division"
    while prefix in model:
        prefix += b"_"
    written: list[bytes | memoryview] = []
    for field, value in fields:
        if field != _GRAPH or isinstance(value, int):
            written += _parts(field, value)
            continue
        graph: list[bytes | memoryview] = []
        for part, inner in read_fields(value):
            node = _node(inner) if part == _NODE and isinstance(inner, memoryview) else None
            if node and node.operator in _OPERATORS and node.output in divisions:
                name = b"%s_%d_" % (prefix, len(graph))
                graph += _guard(node, inner, name, divisions[node.output])  # type: ignore[arg-type]
            else:
                graph += _parts(part, inner)
        written += [write_varint(_GRAPH << 3 | 2), write_varint(sum(map(len, graph))), *graph]
    return b"".join(written)


def _guard(node: _Node, message: memoryview, name: bytes, kind: int) -> list[bytes]:
    """The nodes that replace the division ``node``."""
    flag, number, two, one, minus = (name + end for end in (b"is", b"flag", b"two", b"one", b"minus"))
    twice, divisor, sign, quotient = (name + end for end in (b"twice", b"divisor", b"sign", b"quotient"))
    nodes = [
        _constant(minus, -1, kind),
        _constant(two, 2, kind),
        _operator(b"Equal", [node.inputs[1], minus], flag),
        _operator(b"Cast", [flag], number, _field(1, b"to"), _parts(3, kind)[0], b"\xa0\x01\x02"),
        _operator(b"Mul", [number, two], twice),
        _operator(b"Add", [node.inputs[1], twice], divisor),
    ]
    is_quotient = node.operator == b"Div"
    inputs = [_field(_NODE_INPUT, node.inputs[0]), _field(_NODE_INPUT, divisor)]
    changed: list[bytes | memoryview] = [*inputs, _field(_NODE_OUTPUT, quotient if is_quotient else node.output)]
    for field, value in read_fields(message):
        if field not in (_NODE_INPUT, _NODE_OUTPUT):
            changed += _parts(field, value)
    nodes.append(_field(_NODE, *changed))
    if is_quotient:
        nodes += [
            _constant(one, 1, kind),
            _operator(b"Sub", [one, twice], sign),
            _operator(b"Mul", [quotient, sign], node.output),
        ]
    return nodes


def _operator(operator: bytes, inputs: list[bytes], output: bytes, *attribute: bytes) -> bytes:
    written = [_field(_NODE_INPUT, name) for name in inputs]
    written += [_field(_NODE_OUTPUT, output), _field(3, output), _field(_OPERATOR, operator)]
    return _field(_NODE, *written, *([_field(_ATTRIBUTE, *attribute)] if attribute else []))


def _constant(name: bytes, value: int, kind: int) -> bytes:
    tensor = _field(5, _parts(_TENSOR_TYPE, kind)[0], _field(9, np.array(value, _TYPES[kind]).tobytes()))
    return _operator(b"Constant", [], name, _field(1, b"value"), tensor, b"\xa0\x01\x04")


def _node(message: memoryview) -> _Node:
    inputs, outputs, operator, domain = [], [], b"", b""
    for field, value in read_fields(message):
        if isinstance(value, int) or field > _DOMAIN:
            continue
        if field == _NODE_INPUT:
            inputs.append(bytes(value))
        elif field == _NODE_OUTPUT:
            outputs.append(bytes(value))
        elif field == _OPERATOR:
            operator = bytes(value)
        elif field == _DOMAIN:
            domain = bytes(value)
    return _Node(operator if domain in (b"", b"ai.onnx") else b"", inputs, outputs[0] if outputs else b"")


def _views(message: memoryview, wanted: int) -> Iterator[memoryview]:
    return (value for field, value in read_fields(message) if field == wanted and isinstance(value, memoryview))


def _text(message: int | memoryview, field: int) -> bytes:
    return b"" if isinstance(message, int) else b"".join(_views(message, field))


def _parts(field: int, value: int | memoryview) -> list[bytes | memoryview]:
    if isinstance(value, int):
        return [write_varint(field << 3) + write_varint(value)]
    return [write_varint(field << 3 | 2) + write_varint(len(value)), value]


def _field(number: int, *parts: bytes | memoryview) -> bytes:
    content = b"".join(parts)
    return write_varint(number << 3 | 2) + write_varint(len(content)) + content
