# ruff: noqa: E501 - a model is easier to read in one line
"""Models as text, random graphs, and the check that rows have the same outputs merged and alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper, parser

from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.rows.proof import unproven
from penstock.tensor import Array, Signature, TensorSpec

_MARK = 5
"""The batch size by which the generator recognises batch axes: no other axis has a multiple of it."""


def parsed(
    body: str, inputs: str = "float[N,4] x", outputs: str = "float[N,4] y", weights: str = "", opset: int = 17
) -> Artifact:
    """The model of ``body``, nodes in ONNX's text form; ``weights`` are initialisers in that form."""
    opsets = f'["": {opset}, "com.microsoft": 1, "ai.onnx.ml": 3, "local": 1]'
    head = f"<ir_version: 8, opset_import: {opsets}> g ({inputs}) => ({outputs}) <{weights}>"
    nodes, _, functions = body.partition("FUNCTIONS")
    return Artifact.from_bytes(parser.parse_model(f"{head} {{ {nodes} }} {functions}").SerializeToString())


def objection(artifact: Artifact) -> str:
    """Why ``artifact`` is not proven, without regard to the shapes that its outputs are said to have."""
    signature = OnnxRuntimeEngine().load(artifact, {"threads": 1}).signature
    outputs = tuple(TensorSpec(spec.name, spec.datatype, (-1,)) for spec in signature.outputs)
    return unproven(artifact, Signature(signature.inputs, outputs))


def session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options)


def samples(run: ort.InferenceSession, rows: int, free: int = 4) -> Iterator[dict[str, Array]]:
    """Normal, large, small and special values."""
    rng = np.random.default_rng(rows)
    for scale in (1.0, 1e3, 1e-3, 0.0, -300.0, np.nan):
        inputs: dict[str, Array] = {}
        for value in run.get_inputs():
            shape = [rows, *(size if isinstance(size, int) else free for size in value.shape[1:])]
            if value.type == "tensor(float)":
                array = rng.standard_normal(shape).astype(np.float32) * np.float32(1 if np.isnan(scale) else scale)
                if np.isnan(scale):
                    array[0] = np.inf
                    array[-1] = np.nan
            elif value.type == "tensor(string)":
                array = rng.choice(["a", "b", "the"], shape).astype(object)
            else:
                numpy = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
                array = rng.integers(0, 2, shape).astype(numpy.get(value.type, np.uint8))
            inputs[value.name] = array
        yield inputs


def apart(artifact: Artifact, free: int = 4) -> str:
    """How the outputs of rows differ between merged and alone; empty if they do not."""
    run = session(artifact.data)
    for rows in (2, 3, 8):
        for inputs in samples(run, rows, free):
            parts = [{name: array[i : i + 1] for name, array in inputs.items()} for i in range(rows)]
            together, *alone = (_outputs(run, given) for given in (inputs, *parts))
            if together is None or None in alone:
                if together is None and None in alone:
                    continue  # values that the model refuses
                return f"{rows} rows are refused {'together' if together is None else 'alone'}"
            for number, whole in enumerate(together):
                separate = np.concatenate([np.atleast_1d(outputs[number]) for outputs in alone])
                if whole.shape != separate.shape:
                    return f"{rows} rows give {whole.shape}, alone {separate.shape}"
                if whole.dtype == object or whole.dtype.kind != "f":
                    is_same = bool((whole == separate).all())
                else:
                    finite = np.abs(separate[np.isfinite(separate)])
                    limit = 2e-3 * float(finite.max(initial=0.0)) + 1e-5
                    is_same = np.allclose(whole, separate, rtol=2e-3, atol=limit, equal_nan=True)
                if not is_same:
                    return f"{rows} rows differ from rows alone"
    return ""


def _outputs(run: ort.InferenceSession, inputs: dict[str, Array]) -> list[Array] | None:
    try:
        return run.run(None, inputs)
    except Exception:  # noqa: BLE001 - whatever the runtime raises
        return None


class RandomGraph:
    """A graph of random operators, grown node by node; a step that ONNX Runtime refuses is left out."""

    float: Any = np.float32
    """The type of all inputs, weights and outputs."""

    def __init__(self, seed: int, steps: int = 7) -> None:
        self.random = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self.opset = self.random.choice([11, 13, 17, 18, 21])
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        inner = [self.random.choice([2, 3, 4]) for _ in range(self.random.choice([1, 1, 2, 3]))]
        self._inputs = {"x": inner, "z": inner} if self.random.random() < 0.3 else {"x": inner}
        self.shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self._inputs, (_MARK, *inner))
        self._count = 0
        for _ in range(steps):
            self._step()

    def artifact(self) -> Artifact:
        """The model with the last tensor as its output, without nodes that it does not need: ONNX Runtime would run them, too."""
        name = list(self.shapes)[-1]
        needed = {name}
        for node in self._nodes[::-1]:
            if needed.isdisjoint(node.output):
                self._nodes.remove(node)
            else:
                inner = (inside for attribute in node.attribute for inside in attribute.g.node)
                needed.update(node.input, *(inside.input for inside in inner))
        return Artifact.from_bytes(self._model([name], self.shapes[name]))

    def _step(self) -> None:
        nodes, weights = len(self._nodes), len(self._weights)
        name = self.random.choice(list(self.shapes)[-3:])
        try:
            found = self.draw()(self, name, self.shapes[name])
            array = self._value(found)
        except Exception:  # noqa: BLE001 - whatever the runtime raises
            array = np.zeros(0)
        if array.dtype == self.float and 0 < array.size < 4000 and 0 < array.ndim < 6 and self.accepts(array):
            self.shapes[found] = array.shape
        else:
            del self._nodes[nodes:], self._weights[weights:]

    def draw(self) -> Step:
        return self.random.choice(STEPS)

    def accepts(self, array: Array) -> bool:
        """Whether a step may have this value."""
        return True

    def _value(self, name: str) -> Array:
        inputs = {
            key: self._rng.standard_normal((_MARK, *size)).astype(self.float) for key, size in self._inputs.items()
        }
        (array,) = session(self._model([name], None)).run(None, inputs)
        return np.asarray(array)

    @property
    def type(self) -> int:
        """ONNX's number of the float type."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.float)))

    def _model(self, outputs: list[str], shape: tuple[int, ...] | None) -> bytes:
        graph = helper.make_graph(
            self._nodes,
            "g",
            [helper.make_tensor_value_info(name, self.type, ["N", *size]) for name, size in self._inputs.items()],
            [
                helper.make_tensor_value_info(
                    name, self.type, None if shape is None else ["M", *(f"d{i}" for i in shape[1:])]
                )
                for name in outputs
            ],
            self._weights,
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())

    def op(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        self._count += 1
        names = [f"t{self._count}_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(operator, list(inputs), names, name=f"n{self._count}", **attributes))
        return names[0]

    def weight(self, array: Any, dtype: Any = None) -> str:
        self._count += 1
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype or self.float), f"w{self._count}"))
        return f"w{self._count}"

    def normal(self, *shape: int) -> str:
        return self.weight(self._rng.standard_normal(shape))

    def ints(self, *numbers: int) -> str:
        return self.weight(numbers, np.int64)

    def axis(self, shape: tuple[int, ...]) -> int:
        return self.random.randrange(-len(shape), len(shape))

    def size(self, name: str, axis: int) -> str:
        """The size of an axis, computed as exporters do."""
        return self.op("Gather", self.op("Shape", name), self.ints(axis), axis=0)

    def reduce(self, kind: str, x: str, axis: int, keep: int) -> str:
        if self.opset >= 18 or (kind == "Sum" and self.opset >= 13):
            return self.op(f"Reduce{kind}", x, self.ints(axis), keepdims=keep)
        return self.op(f"Reduce{kind}", x, axes=[axis], keepdims=keep)

    def split_rows(self, x: str, shape: tuple[int, ...]) -> str:
        """A Reshape that keeps some axes, joins others, or counts from -1."""
        kind = self.random.randrange(5)
        if kind == 0:
            return self.op("Reshape", x, self.ints(0, -1))
        if kind == 1:
            return self.op("Reshape", x, self.ints(-1, self.random.choice([2, 3, 4, 6, shape[-1]])))
        if kind == 2:
            return self.op("Flatten", x, axis=self.random.randrange(len(shape) + 1))
        if kind == 3:
            return self.op(
                "Reshape", x, self.op("Concat", self.size(x, 0), self.ints(self.random.choice([-1, 2])), axis=0)
            )
        order = [self.size(x, axis) for axis in self.random.sample(range(len(shape)), len(shape))]
        return self.op("Reshape", x, self.op("Concat", *order, axis=0))

    def branch(self, x: str, condition: str) -> str:
        def of(node: str, **attributes: Any) -> onnx.GraphProto:
            out = f"b{self._count}_{node}"
            value = helper.make_tensor_value_info(out, self.type, None)
            return helper.make_graph([helper.make_node(node, [x], [out], **attributes)], "b", [], [value])

        return self.op("If", condition, then_branch=of("Relu"), else_branch=of("Neg"))

    def loop(self, x: str) -> str:
        """Repeats a step that captures ``x``, a number of times that is known or is the size of an axis."""
        self._count += 1
        i, c, s, d, o, u = (f"{letter}{self._count}" for letter in "icsdou")
        step = self.random.choice(
            [("Add", [s, x], {}), ("Transpose", [s], {}), ("Concat", [s, x], {"axis": 1}), ("Relu", [s], {})]
        )
        body = helper.make_graph(
            [
                helper.make_node("Identity", [c], [d]),
                helper.make_node(step[0], step[1], [o], **step[2]),
                helper.make_node("Tanh", [o], [u]),
            ],
            "body",
            [
                helper.make_tensor_value_info(i, 7, []),
                helper.make_tensor_value_info(c, 9, []),
                helper.make_tensor_value_info(s, self.type, None),
            ],
            [
                helper.make_tensor_value_info(d, 9, []),
                helper.make_tensor_value_info(o, self.type, None),
                helper.make_tensor_value_info(u, self.type, None),
            ],
        )
        turns = self.random.choice(
            [self.weight(2, np.int64), self.op("Reshape", self.size(x, self.random.randrange(2)), self.ints(1))]
        )
        last = self.op("Loop", turns, self.weight(True, np.bool_), x, outputs=2, body=body)
        return last if self.random.random() < 0.5 else last[:-1] + "1"

    def scan(self, x: str, axis: int) -> str:
        self._count += 1
        s, e, o, c = (f"{letter}{self._count}" for letter in "seoc")
        values = {name: helper.make_tensor_value_info(name, self.type, None) for name in (s, e, o, c)}
        body = helper.make_graph(
            [helper.make_node("Add", [s, e], [o]), helper.make_node("Tanh", [o], [c])],
            "body",
            [values[s], values[e]],
            [values[o], values[c]],
        )
        start = self.reduce("Max", x, axis, 0)
        self.op("Scan", start, x, outputs=2, body=body, num_scan_inputs=1, scan_input_axes=[axis])
        return f"t{self._count}_1"


def _cast(g: RandomGraph, x: str) -> str:
    return g.op("Cast", x, to=g.type)


Step = Callable[[RandomGraph, str, tuple[int, ...]], str]
_COMBINE = ("Add", "Sub", "Mul", "Max")
STEPS: list[Step] = [
    lambda g, x, s: g.op(g.random.choice(["Relu", "Tanh", "Abs", "Sigmoid", "Neg", "Softplus"]), x),
    lambda g, x, s: g.op(g.random.choice(_COMBINE), x, g.normal(*s[g.random.randrange(len(s)) :])),
    lambda g, x, s: g.op(g.random.choice(_COMBINE), x, g.normal(*[g.random.choice([1, n]) for n in s])),
    lambda g, x, s: g.op(g.random.choice(_COMBINE), x, g.normal(*[1 if n % _MARK == 0 else n for n in s])),
    lambda g, x, s: g.op(g.random.choice(_COMBINE), x, g.random.choice(list(g.shapes))),
    lambda g, x, s: g.op("MatMul", x, g.normal(s[-1], g.random.choice([2, 3]))),
    lambda g, x, s: g.op("MatMul", g.normal(3, s[-2] if len(s) > 1 else 2), x),
    lambda g, x, s: g.op("MatMul", x, g.op("Transpose", g.random.choice(list(g.shapes)))),
    lambda g, x, s: g.op("Gemm", x, g.normal(3, s[-1]), g.normal(3), transB=1),
    lambda g, x, s: g.op("Gemm", g.normal(s[0], 3), x, transA=1),
    lambda g, x, s: g.op(
        g.random.choice(_COMBINE), x, g.reduce(g.random.choice(["Mean", "Max", "Sum"]), x, g.axis(s), 1)
    ),
    lambda g, x, s: g.reduce(g.random.choice(["Mean", "Sum", "L2"]), x, g.axis(s), g.random.randrange(2)),
    lambda g, x, s: g.op("Sub", x, g.op("Relu", g.op("Sub", g.reduce("Mean", x, 0, 1), g.weight(100)))),
    lambda g, x, s: g.op("Sub", x, g.op("Mul", g.reduce("Mean", x, 0, 1), g.weight(0.02))),
    lambda g, x, s: g.op(g.random.choice(["Softmax", "LogSoftmax"]), x, axis=g.axis(s)),
    lambda g, x, s: g.op("LpNormalization", x, axis=g.axis(s)),
    lambda g, x, s: g.op("CumSum", x, g.ints(g.axis(s))),
    lambda g, x, s: g.op("Transpose", x, perm=g.random.sample(range(len(s)), len(s))),
    lambda g, x, s: g.split_rows(x, s),
    lambda g, x, s: g.split_rows(x, s),
    lambda g, x, s: g.op("Concat", x, g.op("Neg", x), axis=g.axis(s)),
    lambda g, x, s: g.op("Concat", x, g.normal(*[1 if n % _MARK == 0 else n for n in s]), axis=g.axis(s)),
    lambda g, x, s: g.op("Slice", x, g.ints(g.random.randrange(2)), g.ints(2**40), g.ints(g.axis(s))),
    lambda g, x, s: g.op("Slice", x, g.ints(-1), g.ints(-(2**40)), g.ints(g.axis(s)), g.ints(-1)),
    lambda g, x, s: g.op("Slice", x, g.ints(0), g.size(x, 0), g.ints(g.axis(s))),
    lambda g, x, s: g.op("Gather", x, g.ints(0, 1, 0), axis=g.axis(s)),
    lambda g, x, s: g.op("Gather", x, g.weight(0, np.int64), axis=g.axis(s)),
    lambda g, x, s: g.op("Gather", g.normal(4, 2), g.op("Clip", g.op("Cast", x, to=7), g.weight(0, np.int64), g.weight(3, np.int64))),
    lambda g, x, s: g.op("TopK", x, g.ints(1), outputs=2, axis=g.axis(s)),
    lambda g, x, s: _cast(g, g.op("ArgMax", x, axis=g.axis(s), keepdims=g.random.randrange(2))),
    lambda g, x, s: g.op("Tile", x, g.ints(*[g.random.choice([1, 1, 2]) for _ in s])),
    lambda g, x, s: g.op("Expand", g.normal(*s[-1:]), g.op("Shape", x)),
    lambda g, x, s: g.op("Add", x, g.op("ConstantOfShape", g.op("Shape", x))),
    lambda g, x, s: g.op("Mul", x, _cast(g, g.size(x, g.random.randrange(len(s))))),
    lambda g, x, s: g.branch(x, g.op("Greater", g.size(x, g.random.randrange(len(s))), g.ints(2))),
    lambda g, x, s: g.branch(x, g.op("Greater", g.op("Size", x), g.weight(9, np.int64))),
    lambda g, x, s: g.scan(x, g.random.randrange(len(s))),
    lambda g, x, s: g.op("Add", x, _cast(g, g.op("Range", g.weight(0, np.int64), g.op("Squeeze", g.size(x, 0)), g.weight(1, np.int64)))),
    lambda g, x, s: g.op("LRN", x, size=3),
    lambda g, x, s: g.op("InstanceNormalization", x, g.normal(s[min(1, len(s) - 1)]), g.normal(s[min(1, len(s) - 1)])),
    lambda g, x, s: g.op("BatchNormalization", x, *(g.weight(np.abs(g._rng.standard_normal(s[min(1, len(s) - 1)])) + 0.1) for _ in range(4))),
    lambda g, x, s: g.op("LayerNormalization", x, g.normal(*s[-1:]), axis=-1),
    lambda g, x, s: g.op("LayerNormalization", x, g.weight(1.0), axis=g.axis(s)),
    lambda g, x, s: g.op("MeanVarianceNormalization", x, axes=g.random.choice([[0, 2, 3], [1], [2, 3], [0]])),
    lambda g, x, s: g.op("Conv", x, g.normal(2, s[min(1, len(s) - 1)], *[1] * (len(s) - 2))),
    lambda g, x, s: g.op("MaxPool", x, kernel_shape=[2] * max(1, len(s) - 2), strides=[2] * max(1, len(s) - 2)),
    lambda g, x, s: g.op("GlobalAveragePool", x),
    lambda g, x, s: g.op("Pad", x, g.ints(*[g.random.choice([0, 0, 1]) for _ in range(2 * len(s))])),
    lambda g, x, s: g.op("Unsqueeze", x, g.ints(g.axis(s))) if g.opset >= 13 else g.op("Unsqueeze", x, axes=[g.axis(s)]),
    lambda g, x, s: g.op("Squeeze", x),
    lambda g, x, s: g.op("Split", x, outputs=2, axis=g.axis(s), **({"num_outputs": 2} if g.opset >= 18 else {})),
    lambda g, x, s: g.op("Einsum", x, x, equation=g.random.choice(["ij,ij->ij", "ij,kj->ik", "ij,ik->ijk", "ij,ij->j", "ijk,ikl->ijl"])),
    lambda g, x, s: _quantized(g, x),
    lambda g, x, s: g.op("DequantizeLinear", g.op("QuantizeLinear", x, w := g.weight(0.05), z := g.weight(3, np.uint8)), w, z),
    lambda g, x, s: g.op("GatherElements", x, g.op("Cast", g.op("Sigmoid", x), to=7), axis=g.axis(s)),
    lambda g, x, s: g.op("ScatterElements", x, g.weight(np.zeros(s), np.int64), x, axis=g.axis(s)),
    lambda g, x, s: g.op("Where", g.op("Greater", x, g.weight(0)), x, g.random.choice(list(g.shapes))),
    lambda g, x, s: g.op("OneHot", g.op("Cast", g.op("Abs", x), to=7), g.ints(3), g.normal(2), axis=g.random.choice([-1, 0, 1])),
    lambda g, x, s: g.op("RNN", x, g.normal(1, 2, s[-1]), g.normal(1, 2, 2), outputs=2, hidden_size=2, layout=0),
    lambda g, x, s: g.op("Trilu", x),
    lambda g, x, s: g.op("Resize", x, "", g.weight([g.random.choice([1, 1, 2]) for _ in s])),
    lambda g, x, s: g.op("ScatterND", x, g.weight([[g.random.randrange(2)]], np.int64), g.op("Slice", x, g.ints(0), g.ints(1), g.ints(0))),
    lambda g, x, s: g.op("ScatterND", x, g.weight([[0, 1]], np.int64), g.normal(1, *s[2:])),
    lambda g, x, s: g.op("GatherND", x, g.weight([[[0]], [[1]]], np.int64), batch_dims=0),
    lambda g, x, s: g.op("GatherND", x, g.op("Cast", g.op("Slice", g.op("Sigmoid", x), g.ints(0), g.ints(1), g.ints(-1)), to=7), batch_dims=len(s) - 1),
    lambda g, x, s: g.op("ReverseSequence", x, g.weight([2] * s[0], np.int64), time_axis=1, batch_axis=0),
    lambda g, x, s: g.op("ReverseSequence", x, g.op("Expand", g.weight(1, np.int64), g.size(x, 0)), time_axis=1, batch_axis=0),
    lambda g, x, s: g.op("ReverseSequence", x, g.op("Expand", g.weight(2, np.int64), g.size(x, 1)), time_axis=0, batch_axis=1),
    lambda g, x, s: g.op("LSTM", x, g.normal(1, 8, s[-1]), g.normal(1, 8, 2), outputs=2, hidden_size=2, direction=g.random.choice(["forward", "reverse"])),
    lambda g, x, s: g.op("GRU", x, g.normal(2, 6, s[-1]), g.normal(2, 6, 2), "", g.op("Cast", g.op("Expand", g.weight(2, np.int64), g.size(x, 1)), to=6), outputs=2, hidden_size=2, direction="bidirectional"),
    lambda g, x, s: g.op("ConvTranspose", x, g.normal(s[min(1, len(s) - 1)], 2, *[2] * (len(s) - 2)), strides=[2] * max(1, len(s) - 2)),
    lambda g, x, s: g.op("Conv", x, g.normal(2, s[min(1, len(s) - 1)], *[2] * (len(s) - 2)), auto_pad=g.random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])),
    lambda g, x, s: g.op(g.random.choice(["AveragePool", "MaxPool"]), x, kernel_shape=[2] * max(1, len(s) - 2), strides=[2] * max(1, len(s) - 2), ceil_mode=1, pads=[1] * 2 * max(1, len(s) - 2)),
    lambda g, x, s: g.op("Resize", x, "", "", g.op("Concat", g.size(x, 0), g.ints(*[2 * n for n in s[1:]]), axis=0), mode=g.random.choice(["nearest", "linear", "cubic"])),
    lambda g, x, s: g.op("Resize", x, "", "", g.ints(*[g.random.choice([n, n + 1]) for n in s]), coordinate_transformation_mode=g.random.choice(["asymmetric", "align_corners", "half_pixel"])),
    lambda g, x, s: g.op("Slice", x, g.ints(g.random.choice([-(2**40), -9, -1, 9])), g.ints(g.random.choice([-(2**40), 2**40])), g.ints(g.axis(s)), g.ints(g.random.choice([-1, -2, 1]))),
    lambda g, x, s: g.op("Gather", x, g.weight([[0, -1]], np.int64), axis=g.axis(s)),
    lambda g, x, s: g.op("Pad", x, g.ints(*[g.random.choice([0, 0, 1, -1]) for _ in range(2 * len(s))]), mode=g.random.choice(["reflect", "edge", "constant"])),
    lambda g, x, s: g.op("Expand", x, g.ints(*[g.random.choice([1, 2]), *[1] * len(s)])),
    lambda g, x, s: g.op("Expand", g.normal(*s[1:]), g.op("Concat", g.size(x, 0), g.ints(*s[1:]), axis=0)),
    lambda g, x, s: g.op("Tile", g.normal(1, *s[1:]), g.op("Concat", g.size(x, 0), g.ints(*[1] * (len(s) - 1)), axis=0)),
    lambda g, x, s: g.op("Tile", g.normal(2, s[-1]), g.op("Concat", g.size(x, 0), g.ints(1), axis=0)),
    lambda g, x, s: g.op("Reshape", x, g.op("Concat", g.op("Mul", g.size(x, 0), g.ints(2)), g.ints(-1), axis=0)),
    lambda g, x, s: g.op("Reshape", x, g.op("Concat", g.ints(-1), g.op("Div", g.size(x, len(s) - 1), g.ints(2)), axis=0)),
    lambda g, x, s: g.op("Reshape", x, g.op("Concat", g.ints(-1), g.size(x, 0), axis=0)),
    lambda g, x, s: g.op("Reshape", x, g.op("Cast", g.op("Mul", g.op("Cast", g.op("Shape", x), to=1), g.weight([1.0] * len(s))), to=7)),
    lambda g, x, s: g.op("Transpose", g.op("Reshape", g.op("Transpose", x, perm=[*range(1, len(s)), 0]), g.op("Concat", g.ints(-1), g.size(x, 0), axis=0))),
    lambda g, x, s: g.op("Einsum", x, g.normal(*s[1:]), equation=g.random.choice(["i...,...->i...", "ij...,j...->i...", "...,...->...", "i...,...->..."])),
    lambda g, x, s: g.op("Einsum", x, x, equation=g.random.choice(["i...,i...->i", "i...,j...->ij", "...,...->...", "ia...,ib...->iab...", "ia...,ja...->ij..."])),
    lambda g, x, s: g.op("TopK", x, g.op("Reshape", g.size(x, len(s) - 1), g.ints(1)), outputs=2, axis=g.axis(s)),
    lambda g, x, s: g.op("Softmax", g.op("Transpose", x)),
    lambda g, x, s: g.op("BatchNormalization", x, *(g.weight(np.ones(s[min(1, len(s) - 1)])) for _ in range(4)), **({"training_mode": 1} if g.opset > 13 else {})),
    lambda g, x, s: g.op("Dropout", x, g.weight(0.0), g.weight(g.random.randrange(2), np.bool_), outputs=2) if g.opset > 11 else g.op("Dropout", x),
    lambda g, x, s: g.op("DepthToSpace", x, blocksize=2, mode=g.random.choice(["DCR", "CRD"])),
    lambda g, x, s: g.op("SpaceToDepth", x, blocksize=2),
    lambda g, x, s: g.op("QuantizeLinear", x, g.weight(np.full(s[k := g.random.randrange(len(s))], 0.1)), g.weight(np.zeros(s[k]), np.uint8), axis=k) and g.op("DequantizeLinear", f"t{g._count}_0", g.weight(0.1)),
    lambda g, x, s: _cast(g, g.op("NonZero", g.op("Slice", x, g.ints(0), g.ints(1), g.ints(0)))),
    lambda g, x, s: g.op("Add", x, _cast(g, g.op("NonZero", g.op("ConstantOfShape", g.size(x, len(s) - 1))))),
    lambda g, x, s: g.op("OneHot", g.op("ArgMax", x, axis=-1), g.ints(4), g.normal(2), axis=g.axis(s)),
    lambda g, x, s: g.op("CumSum", x, g.op("Reshape", g.op("Sub", g.op("Size", g.op("Shape", x)), g.weight(1, np.int64)), g.ints(1))),
    lambda g, x, s: g.op("Where", g.weight(g._rng.random((s[0], *[1] * (len(s) - 1))) > 0.5, np.bool_), x, g.op("Neg", x)),
    lambda g, x, s: g.op("Min", x, g.op("Identity", g.op("ReduceMax" if g.opset < 18 else "Relu", x))),
    lambda g, x, s: g.op("GroupNormalization", x, *(g.normal(s[1] if g.opset >= 21 else 1) for _ in "sb"), num_groups=1),
    lambda g, x, s: g.loop(x),
    lambda g, x, s: g.loop(x),
    lambda g, x, s: g.op("Reshape", g.op("ReduceSum", x) if g.opset >= 13 else x, g.ints(-1, 1)),
]  # fmt: skip


def _quantized(g: RandomGraph, x: str) -> str:
    first = g.op("DynamicQuantizeLinear", x, outputs=3)
    return g.op("DequantizeLinear", *(first[:-1] + str(i) for i in range(3)))


def keeps_rows(artifact: Artifact, free: int = 4) -> None:
    """Assert that the model is proven, and that ONNX Runtime agrees."""
    assert objection(artifact) == ""
    assert apart(artifact, free) == ""
