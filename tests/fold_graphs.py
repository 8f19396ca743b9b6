# ruff: noqa: E501 - a step is easier to read in one line
"""Random arithmetic with shapes, and the comparison of what the proof computes ahead of requests with what ONNX Runtime computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from penstock.rows.facts import Dependent, Fact
from penstock.rows.graph import read_graph
from penstock.rows.sizes import BATCH, Number, Size, symbol
from penstock.rows.walk import Walk
from penstock.tensor import Array

ROWS, LENGTH = 6, 5
"""The sizes of the free axes of the input."""
_INPUT = (ROWS, LENGTH, 4)
_NUMBERS = {
    np.int64: [0, 1, 2, 3, -1, -2, 4, 7, -7, 24, 2**31 - 1, -(2**31), 2**31, 2**33 + 5, 2**62, 2**63 - 1, -(2**63)],
    np.int32: [0, 1, 2, 3, -1, -2, 5, -7, 24, 2**16, 2**31 - 1, -(2**31)],
    np.float32: [0.0, -0.0, 1.0, 2.0, -1.0, 0.5, 0.1, -2.5, 3.5, 7.0, 4096.0, 2.0**24, 1e10, 3e38, np.nan, np.inf, -np.inf],
    np.float64: [0.0, 1.0, -3.0, 0.5, 0.1, 1e10, 1e300, np.nan, -np.inf],
    np.bool_: [False, True],
}  # fmt: skip
_TYPES = {
    np.int64: TensorProto.INT64,
    np.int32: TensorProto.INT32,
    np.float32: TensorProto.FLOAT,
    np.float64: TensorProto.DOUBLE,
    np.bool_: TensorProto.BOOL,
}
_SMALL = 300
"""Tensors stay small enough to be followed."""


class FoldGraph:
    """A graph of operators on sizes, indices, scales and conditions, grown node by node with the values of one request."""

    def __init__(self, seed: int, steps: int = 12) -> None:
        self.random = random.Random(seed)
        self.opset = self.random.choice([9, 11, 13, 17, 18, 21])
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values: dict[str, Array] = {"x": np.zeros(_INPUT, np.float32)}
        self._count = 0
        self.op("Shape", "x")
        self._run(0, 0)
        for _ in range(steps):
            nodes, weights = len(self.nodes), len(self.weights)
            try:
                self.random.choice(STEPS)(self)
                self._run(nodes, weights)
            except (IndexError, ValueError):
                del self.nodes[nodes:], self.weights[weights:]

    def _run(self, nodes: int, weights: int) -> None:
        """The values of the nodes from number ``nodes`` on, which are dropped if ONNX Runtime refuses them."""
        new, old = self.nodes[nodes:], {name for node in self.nodes[nodes:] for name in node.input}
        given = {name: self.values[name] for name in old & self.values.keys()}
        names = [name for node in new for name in node.output]
        graph = helper.make_graph(
            new,
            "g",
            [
                helper.make_tensor_value_info(name, _TYPES[array.dtype.type], array.shape)
                for name, array in given.items()
            ],
            [onnx.ValueInfoProto(name=name) for name in names],
            self.weights[weights:],
        )
        try:
            # NumPy has two types of 64 bits.
            found = [array.view(array.dtype.str) for array in session(graph, self.opset).run(names, given)]
        except Exception:  # noqa: BLE001 - whatever the runtime raises
            raise ValueError from None
        if any(array.size > _SMALL or array.dtype.type not in _TYPES for array in found):
            raise ValueError
        self.values.update(zip(names, found, strict=True))

    def model(self) -> bytes:
        """The graph with a free first and second axis of its input, and all its tensors as outputs."""
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", 1, ["N", "M", _INPUT[2]])],
            [onnx.ValueInfoProto(name=name) for node in self.nodes for name in node.output],
            self.weights,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())

    def op(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        self._count += 1
        names = [f"t{self._count}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def weight(self, array: Any, dtype: Any) -> str:
        self._count += 1
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), f"w{self._count}"))
        return f"w{self._count}"

    def constant(self, dtype: Any, *shape: int) -> str:
        """Odd numbers, or small ones."""
        few = _NUMBERS[dtype][: self.random.choice([5, None])]
        return self.weight(
            np.array(self.random.choices(few, k=int(np.prod(shape, dtype=int))), dtype).reshape(shape), dtype
        )

    def tensor(self, *dtypes: Any, rank: int | None = None) -> str:
        """A recent tensor of one of these types."""
        names = [
            name
            for name, array in self.values.items()
            if array.dtype.type in (dtypes or _TYPES) and rank in {None, array.ndim} and name != "x"
        ]
        return self.random.choice(names[-6:])

    def partner(self, name: str) -> str:
        """Another tensor of the type of ``name``: a tensor of the graph, or a constant of a shape that fits."""
        array = self.values[name]
        same = [each for each, other in self.values.items() if other.dtype == array.dtype and each != "x"]
        if self.random.random() < 0.4:
            return self.random.choice(same)
        shape = self.random.choice([(), (1,), array.shape, array.shape[-1:]])
        return self.constant(array.dtype.type, *shape)

    def ints(self, *numbers: int) -> str:
        return self.weight(numbers, self.random.choice([np.int64, np.int32]))

    def few(self, name: str) -> str:
        """``name``, the sizes of a tensor that is made. Raises ValueError if it would be large."""
        if np.prod([max(abs(int(each)), 1) for each in self.values[name].flat], dtype=object) > _SMALL:
            raise ValueError
        return name

    def long(self, *numbers: int) -> str:
        return self.weight(numbers, np.int64)

    def axes(self, operator: str, name: str, since: int, axes: list[int], **more: Any) -> str:
        """A node whose axes are an input since a version."""
        if not self.values[name].size:
            raise ValueError  # ONNX Runtime gives the sum of no elements a shape against ONNX
        if self.opset >= since:
            return self.op(operator, name, self.long(*axes), **more)
        return self.op(operator, name, axes=axes, **more)


def session(graph: onnx.GraphProto, opset: int) -> ort.InferenceSession:
    """``graph`` as it is, without ONNX Runtime's rewriting."""
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options)


_INTS, _FLOATS = (np.int64, np.int32), (np.float32, np.float64)


def _slice(g: FoldGraph) -> str:
    name = g.tensor()
    rank, draw = g.values[name].ndim, [0, 1, 2, -1, -2, -5, 9, 2**31 - 1, -(2**31), 2**62, -(2**62)]
    axes = g.random.sample(range(rank), g.random.randint(1, rank))
    starts, ends = g.random.choices(draw, k=len(axes)), g.random.choices(draw, k=len(axes))
    if g.opset < 10:
        return g.op("Slice", name, starts=starts, ends=ends, axes=axes)
    axes = [axis - g.random.choice([0, rank]) for axis in axes]
    steps = g.random.choices([1, 1, -1, 2, -2, 2**31], k=len(axes))
    return g.op("Slice", name, *(g.long(*each) for each in (starts, ends, axes, steps)))


def _split(g: FoldGraph) -> str:
    name = g.tensor(rank=1)
    parts = g.random.choice([1, 2, 3])
    if g.opset >= 18:
        return g.op("Split", name, outputs=parts, num_outputs=parts)
    return g.op("Split", name, outputs=parts)


def _range(g: FoldGraph) -> str:
    dtype = g.random.choice([*_INTS, *_FLOATS])
    sizes = [
        each for each, array in g.values.items() if array.dtype == dtype and array.ndim == 0 and abs(array) < _SMALL
    ]
    limit = g.random.choice(sizes) if sizes else g.weight(g.random.choice([0, 5, -4, 30]), dtype)
    return g.op(
        "Range", g.weight(g.random.choice([0, 0, 1, -3]), dtype), limit, g.weight(g.random.choice([1, 1, 2, -1]), dtype)
    )


def _pair(g: FoldGraph, operators: list[str], *dtypes: Any, **attributes: Any) -> str:
    name = g.tensor(*dtypes)
    names = [name, g.partner(name)]
    g.random.shuffle(names)
    return g.op(g.random.choice(operators), *names, **attributes)


def _squeeze(g: FoldGraph) -> str:
    name = g.tensor()
    rank = g.values[name].ndim
    return g.axes(g.random.choice(["Squeeze", "Unsqueeze"]), name, 13, [g.random.randint(-rank - 1, rank)])


Step = Callable[[FoldGraph], str]
STEPS: list[Step] = [
    lambda g: g.op("Shape", "x"),
    lambda g: g.op("Shape", g.tensor()),
    lambda g: g.op("Shape", "x", start=g.random.randint(-5, 4), end=g.random.randint(-5, 4)) if g.opset >= 15 else g.op("Size", "x"),
    lambda g: g.op("Size", g.tensor()),
    lambda g: g.op("Gather", g.tensor(rank=1), g.ints(*g.random.choices([0, 1, -1, 2, -2], k=g.random.randint(1, 3)))),
    lambda g: g.op("Gather", g.tensor(rank=1), g.weight(g.random.choice([0, 1, -1]), np.int64)),
    lambda g: g.op("Gather", g.tensor(), g.long(0), axis=g.random.choice([0, 1, -1])),
    lambda g: _pair(g, ["Add", "Sub", "Mul", "Div"], *_INTS, *_FLOATS),
    lambda g: _pair(g, ["Add", "Sub", "Mul", "Div"], *_INTS, *_FLOATS),
    lambda g: _pair(g, ["Min", "Max"], *_INTS, *_FLOATS),
    lambda g: _pair(g, ["Equal", "Less", "Greater"], *_INTS, *_FLOATS),
    lambda g: _pair(g, ["LessOrEqual", "GreaterOrEqual"], *_INTS, *_FLOATS),
    lambda g: _pair(g, ["And", "Or", "Equal"], np.bool_),
    lambda g: _pair(g, ["Mod"], *_INTS),
    lambda g: _pair(g, ["Mod"], *_INTS, *_FLOATS, fmod=1),
    lambda g: g.op("Sum", *(g.tensor(*_FLOATS) for _ in range(3))),
    lambda g: g.op("Not", g.tensor(np.bool_)),
    lambda g: g.op(g.random.choice(["Neg", "Identity", "Abs"]), g.tensor(*_INTS, *_FLOATS)),
    lambda g: g.op(g.random.choice(["Floor", "Ceil", "Round", "Sqrt"]), g.tensor(*_FLOATS)),
    lambda g: g.op("Cast", g.tensor(), to=_TYPES[g.random.choice(list(_TYPES))]),
    lambda g: g.op("Cast", g.tensor(), to=_TYPES[g.random.choice(list(_TYPES))]),
    lambda g: g.op("Cast", g.op("Cast", g.tensor(), to=g.random.choice([2, 3, 5, 10, 12])), to=_TYPES[g.random.choice(list(_TYPES))]),
    lambda g: g.op("Where", g.tensor(np.bool_), name := g.tensor(*_INTS, *_FLOATS), g.partner(name)),
    lambda g: g.op("Concat", name := g.tensor(), g.partner(name), axis=g.random.choice([0, -1])),
    lambda g: g.op("Concat", name := g.tensor(rank=1), g.constant(g.values[name].dtype.type, 2), axis=0),
    lambda g: g.axes("ReduceSum", g.tensor(*_INTS, *_FLOATS), 13, [g.random.choice([0, -1])], keepdims=g.random.randint(0, 1)),
    lambda g: g.axes("ReduceProd", g.tensor(*_INTS, *_FLOATS), 18, [g.random.choice([0, -1])], keepdims=g.random.randint(0, 1)),
    lambda g: g.axes("ReduceMax", g.tensor(*_INTS, *_FLOATS), 18, [0]),
    lambda g: g.op("ReduceSum", g.tensor(*_INTS, *_FLOATS), noop_with_empty_axes=g.random.randint(0, 1)) if g.opset >= 13 else g.op("Size", "x"),
    _squeeze,
    _squeeze,
    lambda g: g.op("Squeeze", g.tensor()),
    _slice,
    _slice,
    _split,
    _range,
    lambda g: g.op("ConstantOfShape", g.few(g.tensor(np.int64, rank=1)), value=numpy_helper.from_array(np.array([g.random.choice([0, 7, -1])], g.random.choice(list(_TYPES))))),
    lambda g: g.op("ConstantOfShape", g.long(*g.random.choices([0, 1, 2, 3], k=g.random.randint(0, 2)))),
    lambda g: g.op("Expand", g.tensor(), g.long(*g.random.choices([1, 2, 3], k=2))),
    lambda g: g.op("Expand", g.tensor(), g.few(g.tensor(np.int64, rank=1))),
    lambda g: g.op("Tile", g.tensor(rank=1), g.long(g.random.choice([0, 1, 2]))),
    lambda g: g.op("Reshape", g.tensor(), g.long(*g.random.choice([(-1,), (1, -1), (-1, 1), (0,), (0, 1), (2, -1), ()]))),
    lambda g: g.op("Reshape", "x", g.tensor(np.int64, rank=1)),
    lambda g: g.op("Transpose", g.tensor()),
    lambda g: g.op("Flatten", g.tensor(), axis=g.random.choice([0, 1, -1])),
    lambda g: g.op("NonZero", g.tensor()),
    lambda g: g.op("Constant", value_ints=[1, -1, 2**40]) if g.opset >= 13 else g.constant(np.int64, 2),
    lambda g: g.op("Constant", value_float=g.random.choice([0.1, 3.0, 2.0**25])) if g.opset >= 13 else g.constant(np.int64, 2),
    lambda g: g.op("CumSum", g.tensor(*_INTS, *_FLOATS), g.weight(0, np.int64)),
    lambda g: g.op("OneHot", g.tensor(*_INTS), g.weight(3, np.int64), g.constant(np.int64, 2)),
    lambda g: g.op("Pad", g.tensor(rank=1), g.long(1, 2)),
    lambda g: g.op("TopK", g.tensor(*_INTS, *_FLOATS), g.long(1), outputs=2),
    lambda g: g.op("ArgMax", g.tensor(*_INTS, *_FLOATS), axis=0),
    lambda g: g.op("Identity", g.constant(g.random.choice(list(_TYPES)), *g.random.choice([(), (1,), (3,), (2, 2)]))),
    lambda g: g.op("Identity", g.constant(g.random.choice(list(_TYPES)), *g.random.choice([(), (1,), (3,), (2, 2)]))),
    lambda g: g.op("EyeLike", g.tensor(rank=2)),
    lambda g: g.op("ScatterElements", name := g.tensor(rank=1), g.long(0), g.constant(g.values[name].dtype.type, 1)),
]  # fmt: skip


def wrong_folds(graph: FoldGraph) -> list[str]:
    """The tensors of which the proof claims a shape or elements that ONNX Runtime does not find."""
    inputs = {"x": Fact([BATCH, symbol("M"), _INPUT[2]])}
    found, seen = [], {BATCH.symbols[0]: float(ROWS), symbol("M").symbols[0]: float(LENGTH)}
    read = read_graph(graph.model())
    for name, array in graph.values.items():
        if name == "x":
            continue
        try:
            (fact,) = Walk(read).run(inputs, [name])
        except Dependent:
            continue
        value = fact.value
        # Each walk numbers its unknown sizes from 0.
        symbols = {key: number for key, number in seen.items() if not key.startswith("#?")}
        if len(fact.shape) != array.ndim or not all(map(_agrees, fact.shape, array.shape, [symbols] * array.ndim)):
            found.append(f"{name}: shape {fact.shape}, but {array.shape}")
        elif value is not None and not all(
            _agrees(one, other, symbols) for one, other in zip(value.flat, array.flat, strict=True)
        ):
            found.append(f"{name}: {value.tolist()}, but {array.tolist()}")
        seen.update(symbols)
    return found


def _agrees(number: Number, actual: Any, symbols: dict[str, float]) -> bool:
    """Whether ``number`` can be ``actual``. A symbol has the first value that it is seen with."""
    if not isinstance(number, Size):
        value = np.asarray(actual).item()
        return bool(number == value or (number != number and value != value))  # noqa: PLR0124 - NaN
    unknown = [each for each in number.symbols if each not in symbols]
    if not unknown:
        with np.errstate(all="ignore"):
            product = number.factor * np.prod([symbols[each] for each in number.symbols])
        return bool(np.isclose(product, float(actual), rtol=1e-9, equal_nan=True))
    if len(number.symbols) == 1 and number.factor == 1:
        symbols[unknown[0]] = float(actual)
    return True
