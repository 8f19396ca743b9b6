"""Guard divisions of integers in an ONNX model, because ONNX Runtime ends the process if one divides the smallest number by −1.

The quotient does not fit the type, so x86 CPUs raise a signal. This concerns ``Div`` and ``Mod`` of INT32 and INT64; the kernels of
narrower types compute in 32 bits. The rewrite divides by 1 instead of −1 and negates the quotient, so results wrap around::

    is_minus_one = Cast(Equal(b, -1))
    Div(a, b) = Div(a, b + 2 * is_minus_one) * (1 - 2 * is_minus_one)
    Mod(a, b) = Mod(a, b + 2 * is_minus_one)

These operators exist in every opset that ONNX Runtime supports. The rewrite reads and writes the protobuf wire format, because the
server does not import ``onnx``. In the bodies of If, Loop and Scan, it covers the divisions whose types follow from declared types. It
does not cover functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.protocol.varint import read_fields, read_views, write_field, write_number, write_varint

_Field = tuple[int, int | memoryview]

_GRAPH = 7
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _VALUE_INFO = 1, 5, 11, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7
_TENSOR_TYPE, _TENSOR_NAME, _EXTERNAL_DATA = 2, 8, 13
_TYPES = (6, 7)
"""The numbers of INT32 and INT64 in ONNX."""
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
_GRAPHS = (6, 11)
"""The fields of an attribute that have graphs."""
_IS_INTEGER, _IS_TENSOR = b"\xa0\x01\x02", b"\xa0\x01\x04"
"""The type of an attribute, field 20."""
_MAX_DEPTH = 100
"""The nesting limit of protobuf itself."""
_MINUS_ONE = b"\xff\xff\xff\xff"
"""Bytes that occur in every serialized form of −1: packed, unpacked or raw, with 32 or 64 bits."""


class _Node(NamedTuple):
    operator: bytes
    inputs: list[bytes]
    output: bytes


def guarded(model: bytes, types: Callable[[bytes], Mapping[str, str]]) -> bytes:
    """``model`` with guarded divisions; the same object if it needs no guard.

    ``types`` loads a variant of the model and returns ONNX Runtime's types of its outputs. It is called only if the types of
    divisions do not follow from types that the model declares. Raises ValueError if the bytes are not well-formed protobuf.
    """
    if not any(operator in model for operator in _OPERATORS):
        return model

    def infer(names: list[bytes]) -> dict[bytes, int]:
        # An output without a type gets the inferred type.
        outputs = [write_field(_OUTPUT, write_field(1, name)) for name in names]
        inferred = types(model + write_field(_GRAPH, *outputs))
        return {name: _ORT_TYPES.get(inferred.get(name.decode("utf-8", "replace"), ""), 0) for name in names}

    prefix = b"penstock_division_"
    while prefix in model:
        prefix += b"_"
    fields = list(read_fields(model))
    graphs = [view for field, view in fields if field == _GRAPH and isinstance(view, memoryview)]
    # Protobuf merges the parts of a message that is written in parts.
    graph = graphs[0] if len(graphs) == 1 else memoryview(b"".join(graphs))
    changed = _guarded_graph(graph, {}, prefix, infer, 0)
    if changed is None:
        return model
    kept = [part for field, value in fields if field != _GRAPH for part in _parts(field, value)]
    return b"".join([*kept, write_varint(_GRAPH << 3 | 2), write_varint(sum(map(len, changed))), *changed])


def _guarded_graph(
    graph: memoryview,
    outer: Mapping[bytes, int],
    prefix: bytes,
    infer: Callable[[list[bytes]], dict[bytes, int]],
    depth: int,
) -> list[bytes | memoryview] | None:
    """The parts of ``graph`` with guarded divisions; None if nothing changes. ``outer`` has the types of values outside the graph."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    parts = list(read_fields(graph))
    kinds = {**outer, **_kinds(parts)}
    found = _suspects(parts, kinds)
    if unknown := [name for name, kind in found.items() if not kind]:
        found |= infer(unknown)
    written: list[bytes | memoryview] = []
    is_changed = False
    for number, (field, value) in enumerate(parts):
        replaced: list[bytes | memoryview] | None = None
        if field == _NODE and isinstance(value, memoryview):
            node, name = _node(value), b"%s%d_" % (prefix, number)
            if node.operator in _OPERATORS and found.get(node.output) in _TYPES:
                replaced = [*_guard(node, value, name, found[node.output])]
            elif any(operator in bytes(value) for operator in _OPERATORS):
                replaced = _with_guarded_bodies(value, kinds, name, depth)
        written += _parts(field, value) if replaced is None else replaced
        is_changed |= replaced is not None
    return written if is_changed else None


def _with_guarded_bodies(
    node: memoryview, kinds: Mapping[bytes, int], prefix: bytes, depth: int
) -> list[bytes | memoryview] | None:
    """``node`` with guarded divisions in the graphs of its attributes; None if nothing changes."""
    written: list[bytes | memoryview] = []
    is_changed = False
    for number, (field, value) in enumerate(read_fields(node)):
        attribute: list[bytes | memoryview] = []
        has_changed = False
        for part, inner in read_fields(value) if field == _ATTRIBUTE and isinstance(value, memoryview) else ():
            name = b"%s%d_%d_" % (prefix, number, len(attribute))
            is_body = part in _GRAPHS and isinstance(inner, memoryview)
            body = _guarded_graph(inner, kinds, name, lambda _: {}, depth + 1) if is_body else None  # type: ignore[arg-type]
            attribute += _parts(part, inner) if body is None else [write_field(part, *body)]
            has_changed |= body is not None
        # An attribute with numbers is kept as it is, because read_fields skips floats.
        written += [write_field(field, *attribute)] if has_changed else _parts(field, value)
        is_changed |= has_changed
    return [write_field(_NODE, *written)] if is_changed else None


def _kinds(parts: Iterable[_Field]) -> dict[bytes, int]:
    """The element types of the values and initializers of a graph, as it declares them."""
    kinds = dict(_declared(parts))
    for field, tensor in parts:
        if field == _INITIALIZER and isinstance(tensor, memoryview):
            numbers = (value for part, value in read_fields(tensor) if part == _TENSOR_TYPE and isinstance(value, int))
            kinds[_text(tensor, _TENSOR_NAME)] = next(numbers, 0)
    return kinds


def _suspects(parts: list[_Field], kinds: dict[bytes, int]) -> dict[bytes, int]:
    """The outputs of divisions of integers whose divisor may be −1, with the number of their type; 0 if it is not known.

    Adds the types that follow from ``kinds`` to ``kinds``.
    """
    nodes = [(_node(view), view) for field, view in parts if field == _NODE and isinstance(view, memoryview)]
    divisions = [node for node, _ in nodes if node.operator in _OPERATORS and len(node.inputs) == 2]
    divisors = {node.inputs[1] for node in divisions}
    for node, view in nodes:
        if not kinds.get(node.output):
            kinds[node.output] = _kind(node, view, kinds)
    inputs = {_text(view, 1) for field, view in parts if field == _INPUT}
    constants = [(node.output, view) for node, view in nodes if node.operator == b"Constant"]
    tensors = [
        (_text(view, _TENSOR_NAME), view)
        for field, view in parts
        if field == _INITIALIZER and isinstance(view, memoryview)
    ]
    constants += [(name, view) for name, view in tensors if name not in inputs and kinds[name] in _TYPES]
    safe = {name for name, view in constants if name in divisors and not _may_have_minus_one(view)}
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
            value
            for attribute in read_views(message, _ATTRIBUTE)
            for field, value in read_fields(attribute)
            if field == 3
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
    """The types that a graph declares for its values: their names, and the numbers of their element types."""
    for field, value in parts:
        if field in (_INPUT, _OUTPUT, _VALUE_INFO) and isinstance(value, memoryview):
            for kind in read_views(value, 2):
                for tensor in read_views(kind, 1):
                    yield from (
                        (_text(value, 1), number)
                        for part, number in read_fields(tensor)
                        if part == 1 and isinstance(number, int)
                    )


def _guard(node: _Node, message: memoryview, name: bytes, kind: int) -> list[bytes]:
    """The nodes that replace the division ``node``."""
    flag, number, two, one, minus = (name + end for end in (b"is", b"flag", b"two", b"one", b"minus"))
    twice, divisor, sign, quotient = (name + end for end in (b"twice", b"divisor", b"sign", b"quotient"))
    nodes = [
        *_constants(minus, -1, kind),
        *_constants(two, 2, kind),
        _operator(b"Equal", [node.inputs[1], minus], flag),
        _cast(flag, number, kind),
        _operator(b"Mul", [number, two], twice),
        _operator(b"Add", [node.inputs[1], twice], divisor),
    ]
    is_quotient = node.operator == b"Div"
    inputs = [write_field(_NODE_INPUT, node.inputs[0]), write_field(_NODE_INPUT, divisor)]
    changed: list[bytes | memoryview] = [*inputs, write_field(_NODE_OUTPUT, quotient if is_quotient else node.output)]
    for field, value in read_fields(message):
        if field not in (_NODE_INPUT, _NODE_OUTPUT):
            changed += _parts(field, value)
    nodes.append(write_field(_NODE, *changed))
    if is_quotient:
        nodes += [
            *_constants(one, 1, kind),
            _operator(b"Sub", [one, twice], sign),
            _operator(b"Mul", [quotient, sign], node.output),
        ]
    return nodes


def _operator(operator: bytes, inputs: list[bytes], output: bytes, *attribute: bytes) -> bytes:
    written = [write_field(_NODE_INPUT, name) for name in inputs]
    written += [write_field(_NODE_OUTPUT, output), write_field(3, output), write_field(_OPERATOR, operator)]
    return write_field(_NODE, *written, *([write_field(_ATTRIBUTE, *attribute)] if attribute else []))


def _constants(name: bytes, value: int, kind: int) -> list[bytes]:
    """The nodes that make the scalar ``name``. Before opset 9, ``Constant`` only makes floats."""
    tensor = write_field(5, write_number(_TENSOR_TYPE, _FLOAT), write_field(9, struct.pack("<f", value)))
    return [
        _operator(b"Constant", [], name + b"_float", write_field(1, b"value"), tensor, _IS_TENSOR),
        _cast(name + b"_float", name, kind),
    ]


def _cast(source: bytes, name: bytes, kind: int) -> bytes:
    return _operator(b"Cast", [source], name, write_field(1, b"to"), write_number(3, kind), _IS_INTEGER)


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


def _text(message: int | memoryview, field: int) -> bytes:
    return b"" if isinstance(message, int) else b"".join(read_views(message, field))


def _parts(field: int, value: int | memoryview) -> list[bytes | memoryview]:
    if isinstance(value, int):
        return [write_number(field, value)]
    return [write_varint(field << 3 | 2) + write_varint(len(value)), value]
