"""Valid ONNX models that servers seldom meet, each with requests and, unless ONNX Runtime can judge them, the expected outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from penstock.tensor import Array, DataType

Request = dict[str, Array]
_SPECIAL = [0.0, -0.0, 1.0, -2.5, 1e-40, 6e-8, 65504.0, 3e38]
_NOT_FINITE = [np.nan, np.inf, -np.inf]
_TEXTS = [b"", b"a", b"the", "ü€𝄞".encode(), b'"\\\n', b"x" * 300]
_SIDES = (2, 3, 1, 2, 1, 2)
"""The sizes of the axes of a tensor."""
_OPSET = 17


class OddModel(NamedTuple):
    """A model and its requests. ``is_echo``: every output is a copy of the input of the same place."""

    name: str
    data: bytes
    requests: list[Request]
    is_echo: bool = False


def values(datatype: DataType, shape: Sequence[int], seed: int = 0, *, is_finite: bool = True) -> Array:
    """Elements at the limits of the type, and others."""
    rng, count = np.random.default_rng(seed), int(np.prod(shape, dtype=int))
    if datatype is DataType.BYTES:
        array = np.empty(count, object)
        array[:] = [_TEXTS[(seed + place) % len(_TEXTS)] for place in range(count)]
    elif datatype is DataType.BOOL:
        array = rng.random(count) > 0.5
    elif datatype.is_float:
        special = _SPECIAL if is_finite else _SPECIAL + _NOT_FINITE
        if datatype in {DataType.FP16, DataType.BF16}:
            special = [each for each in special if not 65504 < abs(each) < np.inf]
        array = np.where(rng.random(count) < 0.5, rng.choice(special, count), rng.standard_normal(count))
        array = array.astype(datatype.dtype)
    else:
        limits = np.iinfo(datatype.dtype)
        array = rng.choice(np.array([limits.min, limits.max, 0, 1, limits.max - 1], datatype.dtype), count)
    return array.reshape(shape)


def echoes() -> Iterator[OddModel]:
    """Every datatype in every rank from 0 to 6; the first axis is free from rank 1 on, the second from rank 3 on."""
    for datatype, rank in itertools.product(DataType, range(7)):
        sides = _SIDES[:rank]
        free = [["N"], [], ["M"]] if rank > 2 else [["N"]] if rank else []
        names = [each[0] if each else size for each, size in itertools.zip_longest(free, sides, fillvalue=[]) if size]
        requests = [{"x": values(datatype, sides, seed, is_finite=seed < 2)} for seed in range(3)]
        if rank > 2:
            requests.append({"x": values(datatype, (sides[0], sides[1], 0, *sides[3:]))})
        yield OddModel(
            f"echo_{datatype.value.lower()}_{rank}",
            _model([("Identity", "x", "y", {})], [("x", datatype, names)], [("y", datatype, names)]),
            requests,
            is_echo=True,
        )


def casts() -> Iterator[OddModel]:
    """From FP32 to every other type that ONNX Runtime casts to, and from every type to FP32."""
    for datatype in DataType:
        if datatype in {DataType.BYTES, DataType.BF16}:
            continue
        x = np.float32([[0, 1, 2.5], [-0.0, 100, 7]])
        yield OddModel(
            f"cast_to_{datatype.value.lower()}",
            _model(
                [("Cast", "x", "y", {"to": datatype.onnx})],
                [("x", DataType.FP32, ["N", 3])],
                [("y", datatype, ["N", 3])],
            ),
            [{"x": x}, {"x": x[:1]}],
        )
        yield OddModel(
            f"cast_of_{datatype.value.lower()}",
            _model(
                [("Cast", "x", "y", {"to": TensorProto.FLOAT})],
                [("x", datatype, ["N", 3])],
                [("y", DataType.FP32, ["N", 3])],
            ),
            [{"x": values(datatype, (2, 3))}],
        )


def control_flow() -> Iterator[OddModel]:
    """If, Loop and Scan, by the request, and with tensors of the graph around."""
    fp32, x = DataType.FP32, np.float32([[1, -2], [3, -4]])
    for operator in ("Relu", "Neg", "Identity", "Exp"):
        then = _graph([(operator, "x", "p", {})], [], [("p", fp32, ["N", 2])])
        other = _graph([("Abs", "x", "q", {})], [], [("q", fp32, ["N", 2])])
        yield OddModel(
            f"if_{operator.lower()}",
            _model(
                [("If", "c", "y", {"then_branch": then, "else_branch": other})],
                [("c", DataType.BOOL, []), ("x", fp32, ["N", 2])],
                [("y", fp32, ["N", 2])],
            ),
            [{"c": np.array(flag), "x": x} for flag in (True, False)],
        )
    for operator in ("Add", "Mul", "Max", "Sub"):
        body = _graph(
            [("Identity", "c", "d", {}), (operator, "s x", "t", {}), ("Neg", "t", "u", {})],
            [("i", DataType.INT64, []), ("c", DataType.BOOL, []), ("s", fp32, ["N", 2])],
            [("d", DataType.BOOL, []), ("t", fp32, ["N", 2]), ("u", fp32, ["N", 2])],
        )
        yield OddModel(
            f"loop_{operator.lower()}",
            _model(
                [("Loop", "n yes x", "y z", {"body": body})],
                [("n", DataType.INT64, []), ("x", fp32, ["N", 2])],
                [("y", fp32, ["N", 2]), ("z", fp32, ["T", "N", 2])],
                {"yes": np.array(True)},
            ),
            [{"n": np.array(count, np.int64), "x": x} for count in (0, 1, 4)],
        )
        body = _graph(
            [(operator, "s e", "t", {}), ("Identity", "t", "u", {})],
            [("s", fp32, [2]), ("e", fp32, [2])],
            [("t", fp32, [2]), ("u", fp32, [2])],
        )
        yield OddModel(
            f"scan_{operator.lower()}",
            _model(
                [("Scan", "start x", "last y", {"body": body, "num_scan_inputs": 1})],
                [("x", fp32, ["N", 2])],
                [("y", fp32, ["N", 2])],
                {"start": np.float32([0, 1])},
            ),
            [{"x": x}, {"x": x[:1]}],
        )


def rows_that_meet() -> Iterator[OddModel]:
    """Models whose rows depend on each other, some weakly or only for some values."""
    meetings: dict[str, list[Any]] = {
        "mean": [("ReduceMean", "x", "m", {"axes": [0]}), ("Sub", "x m", "y", {})],
        "large": [
            ("ReduceMean", "x", "m", {"axes": [0]}),
            ("Sub", "m hundred", "d", {}),
            ("Relu", "d", "r", {}),
            ("Sub", "x r", "y", {}),
        ],
        "weak": [("ReduceMax", "x", "m", {"axes": [0]}), ("Mul", "m tiny", "w", {}), ("Add", "x w", "y", {})],
        "range": [("DynamicQuantizeLinear", "x", "q s z", {}), ("DequantizeLinear", "q s z", "y", {})],
        "running": [("CumSum", "x zero", "y", {})],
        "softmax": [("Softmax", "x", "y", {"axis": 0})],
        "count": [("Size", "x", "n", {}), ("Cast", "n", "f", {"to": 1}), ("Mul", "x f", "y", {})],
        "bilinear": [("Resize", "x  ones", "y", {"mode": "linear"})],
        "reverse": [("Slice", "x last first zeros back", "y", {})],
    }
    weights = {
        "hundred": np.float32(100),
        "tiny": np.float32(0.02),
        "zero": np.int64(0),
        "ones": np.float32([1, 1]),
        "last": np.int64([-1]),
        "first": np.int64([-(2**60)]),
        "zeros": np.int64([0]),
        "back": np.int64([-1]),
    }
    for name, nodes in meetings.items():
        used = {word for _, words, _, _ in nodes for word in words.split(" ")}
        yield OddModel(
            f"meet_{name}",
            _model(
                nodes,
                [("x", DataType.FP32, ["N", 2])],
                [("y", DataType.FP32, ["N", 2])],
                {key: np.asarray(array) for key, array in weights.items() if key in used},
            ),
            [
                {"x": np.float32([[1, 2], [scale, -scale], [0, 5]])}
                for scale in (1, 1000, *[np.inf] * (name == "bilinear"))
            ],
        )


def traits() -> Iterator[OddModel]:
    """One model for each odd trait of a signature."""
    fp32, pair = DataType.FP32, ["N", 2]
    x, b = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([7, 8])
    one, two = ("x", fp32, pair), ("y", fp32, pair)
    table: dict[str, tuple[bytes, list[Request]]] = {
        "passed_on": (_model([("Neg", "x", "y", {})], [one], [("x", fp32, pair), two]), [{"x": x}]),
        "constant": (
            _model([("Neg", "x", "y", {}), ("Identity", "w", "c", {})], [one], [two, ("c", fp32, [2])], {"w": b}),
            [{"x": x}],
        ),
        "default": (
            _model([("Add", "x w", "y", {})], [one, ("w", fp32, [2])], [two], {"w": b}),
            [{"x": x}, {"x": x, "w": b * 2}],
        ),
        "any_rank": (
            _model([("Neg", "x", "y", {})], [("x", fp32, None)], [("y", fp32, None)]),
            [{"x": x}, {"x": np.array(3, np.float32)}, {"x": x[:0]}, {"x": x.reshape(1, 3, 1, 2)}],
        ),
        "many": (
            _model(
                [("Sum", " ".join(f"i{n}" for n in range(12)), "s", {})]
                + [(operator, "s", f"o{n}", {}) for n, operator in enumerate(["Neg", "Abs", "Exp", "Relu"] * 3)],
                [(f"i{n}", fp32, pair) for n in range(12)],
                [(f"o{n}", fp32, pair) for n in range(12)],
            ),
            [{f"i{n}": x * n for n in range(12)}],
        ),
        "shapes": (_model([("Shape", "x", "y", {})], [one], [("y", DataType.INT64, [2])]), [{"x": x}, {"x": x[:1]}]),
        "positions": (
            _model([("NonZero", "x", "y", {})], [one], [("y", DataType.INT64, [2, "K"])]),
            [{"x": x}, {"x": x * 0}],
        ),
        "bounded": (
            _model([("Gather", "w x", "y", {})], [("x", DataType.INT64, ["N"])], [("y", fp32, ["N"])], {"w": b}),
            [{"x": np.int64([0, 1, -1])}],
        ),
        "division": (
            _model(
                [("Div", "a x", "y", {})],
                [("a", DataType.INT32, ["N"]), ("x", DataType.INT32, ["N"])],
                [("y", DataType.INT32, ["N"])],
            ),
            [{"a": np.int32([7, -7]), "x": np.int32([2, 2])}],
        ),
        "square": (_model([("Neg", "x", "y", {})], [("x", fp32, ["N", "N"])], [("y", fp32, ["N", "N"])]), [{"x": x[:2]}]),
        "turned": (_model([("Transpose", "x", "y", {})], [one], [("y", fp32, [2, "N"])]), [{"x": x}]),
        "fixed": (_model([("Neg", "x", "y", {})], [("x", fp32, [3, 2])], [("y", fp32, [3, 2])]), [{"x": x}]),
        "no_elements": (_model([("Neg", "x", "y", {})], [("x", fp32, ["N", 0])], [("y", fp32, ["N", 0])]), [{"x": x[:, :0]}]),
        "unread": (_model([("Neg", "x", "y", {})], [one, ("z", fp32, [1])], [two]), [{"x": x, "z": b[:1]}]),
        "text_length": (
            _model(
                [("StringNormalizer", "x", "y", {"case_change_action": "UPPER", "locale": "C"})],
                [("x", DataType.BYTES, ["N"])],
                [("y", DataType.BYTES, ["N"])],
            ),
            [{"x": np.array([b"abc", b"d"], object)}],
        ),
    }  # fmt: skip
    for name, (data, requests) in table.items():
        yield OddModel(f"trait_{name}", data, requests)
    for number, (first, second) in enumerate(
        [("a b", "y\tz"), ("ü€", "𝄞"), ("a/b:0", "c:1"), ('q"\\', "{}"), ("x" * 200, "y" * 200)]
    ):
        node = helper.make_node("Neg", [first], [second])
        graph = helper.make_graph([node], "g", [_value(first, fp32, pair)], [_value(second, fp32, pair)])
        yield OddModel(f"trait_name_{number}", _whole(graph), [{first: x}])


def other_outputs() -> Iterator[OddModel]:
    """Outputs that are sequences and optionals, which are left out, beside a tensor."""
    x = np.float32([[1, 2], [3, 4]])
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, ["N", 2])
    optional = helper.make_value_info("s", helper.make_optional_type_proto(_value("", DataType.FP32, ["N", 2]).type))
    for operator, output in (("SequenceConstruct", sequence), ("Optional", optional)):
        graph = helper.make_graph(
            [helper.make_node("Neg", ["x"], ["y"]), helper.make_node(operator, ["x"], ["s"])],
            "g",
            [_value("x", DataType.FP32, ["N", 2])],
            [_value("y", DataType.FP32, ["N", 2]), output],
        )
        yield OddModel(f"other_{operator.lower()}", _whole(graph), [{"x": x}])


def odd_models() -> list[OddModel]:
    """All of them."""
    return [*echoes(), *casts(), *control_flow(), *rows_that_meet(), *traits(), *other_outputs()]


Node = tuple[str, str, str, dict[str, Any]]
Value = tuple[str, DataType, Sequence[int | str] | None]


def _value(name: str, datatype: DataType, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, datatype.onnx, shape)


def _graph(
    nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], weights: dict[str, Array] | None = None
) -> onnx.GraphProto:
    return helper.make_graph(
        [helper.make_node(operator, into.split(" "), out.split(" "), **more) for operator, into, out, more in nodes],
        "g",
        [_value(*each) for each in inputs],
        [_value(*each) for each in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )


def _model(
    nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], weights: dict[str, Array] | None = None
) -> bytes:
    return _whole(_graph(nodes, inputs, outputs, weights))


def _whole(graph: onnx.GraphProto) -> bytes:
    opsets = [helper.make_opsetid("", _OPSET)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
