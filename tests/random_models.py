# ruff: noqa: E501 - a step is easier to read in one line
"""Valid random models for the offline half, each made from a few bytes.

They are grown node by node as in NNSmith (Liu et al., ASPLOS 2023): a step is kept if ONNX Runtime accepts the graph, and if the new
tensor has the model's float type and finite, moderate values. The first gene (two bytes) decides the opset, the float type and the
frame; every other gene decides one step, so that a message with fewer genes is a smaller model.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.offline.apart import apart
from penstock.tensor import Array
from tests.row_graphs import STEPS, RandomGraph, Step, session

GENE = 2
"""Bytes of a gene."""
_LARGEST = 1e3
_UNSTABLE = {"MeanVarianceNormalization"}
"""Operators that divide by almost nothing where rows are constant, so that rounding decides about NaN."""
_OF_PLACES = {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool"}
"""Operators on tensors [rows, channels, places …]."""
_ODD_NAMES = ("x_scale", "w_quantized", "x_zero_point", "a/b:0", "é", "a b", "w1_folded1", "0", "x_DequantizeLinear_Output", "QuantizeLinear", "-", "w_int8")  # fmt: skip
_LINEAR_SHARE = 0.5
_FLOATS = (np.float32,) * 12 + (np.float16, np.float64, ml_dtypes.bfloat16)


@functools.cache
def opsets() -> tuple[int, ...]:
    """Versions of the standard operators that ONNX Runtime takes, from 9 on."""
    found = []
    for version in range(9, onnx.defs.onnx_opset_version() + 1):
        value = [helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)
        try:
            session(model.SerializeToString())
        except Exception:  # noqa: BLE001 - whatever the runtime raises
            break
        found.append(version)
    return tuple(found)


class RandomModel(RandomGraph):
    """The model of ``genes``, and a sample of rows for it."""

    def __init__(self, genes: bytes) -> None:
        header, *steps = (genes[at : at + GENE] for at in range(0, max(len(genes), 1), GENE))
        self._header = random.Random(header)
        super().__init__(self._header.randrange(1 << 30), 0)
        self.float = self._header.choice(_FLOATS)
        self.opset = self._header.choice(opsets())
        inner = self._header.choice([[4], [6], [3, 4], [5, 6], [2, 6, 6], [3, 8, 8], [4, 5]])
        self._inputs = {"x": inner, "z": inner} if self._header.random() < 0.2 else {"x": inner}
        self.shapes = dict.fromkeys(self._inputs, (5, *inner))
        for gene in steps:
            self.random = random.Random(gene)
            self._rng = np.random.default_rng(list(gene))
            self._step()

    def draw(self) -> Step:
        return self.random.choice(LINEAR if self.random.random() < _LINEAR_SHARE else STEPS)

    def accepts(self, array: Array) -> bool:
        if any(node.op_type in _UNSTABLE for node in self._nodes[-2:]):
            return False
        magnitudes = np.abs(array.astype(np.float64))
        return bool(np.isfinite(magnitudes).all() and magnitudes.max() < _LARGEST)

    def op(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        is_flat = len(self.shapes.get(inputs[0], "NCW")) < 3 if inputs else False
        assert not (is_flat and operator in _OF_PLACES), (
            "ONNX Runtime takes it if it does not know the rank; ONNX forbids it"
        )
        return super().op(operator, *inputs, outputs=outputs, **attributes)

    def weight(self, array: Any, dtype: Any = None) -> str:
        """A new weight or, sometimes, an earlier one or its copy."""
        array = np.asarray(array, dtype or self.float)
        alike = [
            one
            for one in self._weights
            if tuple(one.dims) == array.shape and one.data_type == helper.np_dtype_to_tensor_dtype(array.dtype)
        ]
        if alike and array.ndim >= 2 and self.random.random() < 0.4:
            known = self.random.choice(alike)
            if self.random.random() < 0.6:
                return known.name
            array = numpy_helper.to_array(known)
        return super().weight(array, array.dtype.type)

    def axis(self, shape: tuple[int, ...]) -> int:
        """Before opset 11, axes are not negative."""
        axis = super().axis(shape)
        return axis % len(shape) if self.opset < 11 else axis

    def last(self, shape: tuple[int, ...]) -> int:
        return len(shape) - 1 if self.opset < 11 else -1

    def fan(self, *shape: int, fan_in: int = 1) -> str:
        return self.weight(self._rng.standard_normal(shape) * fan_in**-0.5)

    def known(self, *shape: int) -> list[str]:
        """Weights of this shape, or of this shape transposed."""
        return [one.name for one in self._weights if tuple(one.dims) in (shape, shape[::-1]) and len(shape) == 2]

    def rows(self, count: int, seed: int = 0) -> dict[str, Array]:
        """Normal values for the inputs."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((count, *size)).astype(self.float) for name, size in self._inputs.items()}

    def artifact(self) -> Artifact:
        """The model of all tensors that no node reads and, at times, of others; in a random frame."""
        model = onnx.ModelProto.FromString(self._model([], None))
        random, graph = self._header, model.graph
        read = {name for node in graph.node for name in _reads(node)}
        written = [name for name in self.shapes if name not in self._inputs]
        ends = [name for name in written if name not in read] or list(self._inputs)[:1]
        if written and random.random() < 0.25:
            ends.append(random.choice(written))
        for name in dict.fromkeys(ends):
            graph.output.append(onnx.ValueInfoProto(name=name))
        if self._inputs.keys() & {value.name for value in graph.output}:
            graph.node.append(helper.make_node("Identity", [graph.output[0].name], ["same"]))
            graph.output[0].name = "same"
        _drop_unread(graph)
        self._declare_outputs(model)
        self.fixed_rows = random.choice([None] * 9 + [1, 2]) if self._takes(model, (1, 2, 3, 7, 16, 30)) else 5
        if self.fixed_rows:
            assert self._takes(model, (self.fixed_rows,)), "the model takes no number of rows"
        _frame(model, random, self.fixed_rows)
        # ONNX Runtime takes some operators with ranks that ONNX forbids.
        onnx.checker.check_model(model, full_check=True)
        return Artifact.from_bytes(model.SerializeToString())

    def _declare_outputs(self, model: onnx.ModelProto) -> None:
        """Types and ranks of the outputs, without sizes."""
        for value, output in zip(model.graph.output, session(model.SerializeToString()).get_outputs(), strict=True):
            # The runtime gives an unknown rank as 0.
            rank = len(self.shapes.get(value.name, output.shape))
            dims = [f"{value.name}_{axis}" for axis in range(rank)]
            value.CopyFrom(helper.make_tensor_value_info(value.name, _TYPES[output.type], dims))

    def _takes(self, model: onnx.ModelProto, counts: Sequence[int]) -> bool:
        artifact, values = Artifact.from_bytes(model.SerializeToString()), self.rows(max(counts))
        try:  # in a child: for some sizes, ONNX Runtime ends the process
            found = [
                apart.forward(artifact, {name: array[:count] for name, array in values.items()}) for count in counts
            ]
        except PenstockError:
            return False
        return all(np.isfinite(array.astype(np.float64)).all() for outputs in found for array in outputs.values())


def _reads(node: onnx.NodeProto) -> set[str]:
    inner = (inside for attribute in node.attribute for inside in attribute.g.node)
    return set(node.input).union(*map(_reads, inner))


def _drop_unread(graph: onnx.GraphProto) -> None:
    """Remove the nodes and weights that the outputs do not need."""
    needed, kept = {value.name for value in graph.output}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed |= _reads(node)
    nodes, weights = kept[::-1], [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(weights)


_TYPES = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(double)": 11, "tensor(bfloat16)": 16}


def _frame(model: onnx.ModelProto, random: random.Random, rows: int | None) -> None:
    """What exporters do differently: constants as nodes, overridable weights, free dimensions, names."""
    graph = model.graph
    if random.random() < 0.15:
        _weights_to_nodes(graph, random)
    if random.random() < 0.05 and graph.initializer:
        tensor = random.choice(list(graph.initializer))
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    if random.random() < 0.3:
        for axis, size in enumerate(graph.input[0].type.tensor_type.shape.dim[1:]):
            size.dim_param = f"d{axis}"
    for value in graph.input if rows is not None else ():
        dim = value.type.tensor_type.shape.dim
        if dim and dim[0].dim_param == "N":
            dim[0].dim_value = rows
    for number, node in enumerate(graph.node):
        node.name = random.choice(["", f"n{number}"])
    if random.random() < 0.3:
        _rename(graph, random)


def _weights_to_nodes(graph: onnx.GraphProto, random: random.Random) -> None:
    for tensor in list(graph.initializer):
        if random.random() < 0.5:
            graph.initializer.remove(tensor)
            graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))


def _rename(graph: onnx.GraphProto, random: random.Random) -> None:
    names = {name for node in graph.node for name in (*node.input, *node.output) if name}
    names -= {value.name for value in graph.input} - {"x"}
    chosen = random.sample(sorted(names), min(len(names), len(_ODD_NAMES)))
    new = dict(zip(chosen, random.sample(_ODD_NAMES, len(chosen)), strict=True))
    for old in sorted(names - new.keys()):  # in the same order in every process
        base = random.choice(sorted(new.values()) or ["w"])
        if random.random() < 0.3:
            new[old] = f"{base}_{random.choice(['scale', 'zero_point', 'quantized', 'folded1', old])}"
    if len(set(new.values())) < len(new) or set(new.values()) & (names - new.keys()):
        return
    _apply_names(graph, new)


def _apply_names(graph: onnx.GraphProto, new: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = new.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new.get(name, name) for name in names]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _apply_names(attribute.g, new)


def _gemm(g: Any, x: str, s: tuple[int, ...]) -> str:
    if len(s) != 2:
        x, s = g.op("Flatten", x), (s[0], int(np.prod(s[1:])))
    trans, outputs = g.random.randrange(2), g.random.choice([2, 3, s[1]])
    shape = (outputs, s[1]) if trans else (s[1], outputs)
    shared = [name for name in g.known(*shape) if tuple(next(w.dims for w in g._weights if w.name == name)) == shape]
    weight = g.random.choice(shared) if shared and g.random.random() < 0.5 else g.fan(*shape, fan_in=s[1])
    bias = g.random.choice([(), (1,), (outputs,), (1, outputs), (outputs,), None])
    more = {"alpha": g.random.choice([1.0, 1.0, 0.5, 3.0, 2.0]), "beta": g.random.choice([1.0, 1.0, 0.25, 3.0, 0.0])}
    if bias is None and g.opset < 11:
        bias = (outputs,)
    rest = [] if bias is None else [g.fan(*bias)]
    return str(g.op("Gemm", x, weight, *rest, transB=trans, **more))


def _conv(g: Any, x: str, s: tuple[int, ...]) -> str:
    """A convolution with every attribute; over one axis or two."""
    axes, channels = len(s) - 2, s[1]
    assert axes, "ONNX has no convolution without axes"
    groups = g.random.choice([1, 1, 1, channels])
    outputs = groups * g.random.choice([1, 2, 4])
    kernel = [g.random.choice([1, 2, 3]) for _ in range(axes)]
    more: dict[str, Any] = g.random.choice(
        [
            {},
            {"pads": [1] * 2 * axes},
            {"pads": [1, *[0] * (2 * axes - 1)]},
            {"auto_pad": "SAME_UPPER"},
            {"strides": [2] * axes},
            {"dilations": [2] * axes},
        ]
    )
    weight = g.fan(outputs, channels // groups, *kernel, fan_in=channels // groups * int(np.prod(kernel)))
    rest = [g.fan(outputs)] if g.random.random() < 0.6 else []
    return str(g.op("Conv", x, weight, *rest, group=groups, **more))


def _layer_norm(g: Any, x: str, s: tuple[int, ...]) -> str:
    """LayerNormalization as exporters decompose it."""
    centred = g.op("Sub", x, g.reduce("Mean", x, g.last(s), 1))
    power = g.op("Pow", centred, g.weight(2.0)) if g.random.random() < 0.5 else g.op("Mul", centred, centred)
    root = g.op("Sqrt", g.op("Add", g.reduce("Mean", power, g.last(s), 1), g.weight(1e-3)))
    return str(g.op("Add", g.op("Mul", g.op("Div", centred, root), g.normal(s[-1])), g.normal(s[-1])))


def _attention(g: Any, x: str, s: tuple[int, ...]) -> str:
    q, k, v = (g.op("MatMul", x, g.fan(s[-1], s[-1], fan_in=s[-1])) for _ in "qkv")
    order = [*range(len(s) - 2), len(s) - 1, len(s) - 2]
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=order)), g.weight(s[-1] ** -0.5))
    return str(g.op("MatMul", g.op("Softmax", scores, axis=g.last(s)), v))


def _both(g: Any, x: str, s: tuple[int, ...]) -> str:
    """One weight in two roles."""
    n = s[-1]
    w = g.fan(n, n, fan_in=n)
    one = g.op("MatMul", x, w)
    two = g.random.choice(
        [
            lambda: g.op("Gemm", one, w, transB=1, **({} if g.opset >= 11 else {"beta": 1.0})),
            lambda: g.op("MatMul", w, one),
            lambda: g.op("MatMul", one, g.op("Transpose", w)),
            lambda: g.op("Mul", one, w),
        ]
    )()
    return str(two)


def _outer_matmul(g: Any, x: str, s: tuple[int, ...]) -> str:
    y = g.op("MatMul", x, g.fan(s[-1], s[-1], fan_in=s[-1]))
    return str(g.branch(y, g.op("Greater", g.op("Size", x), g.weight(g.random.choice([0, 10**6]), np.int64))))


def _after(g: Any, x: str) -> str:
    """What often follows a linear operator."""
    kind = g.random.randrange(6)
    if kind == 0:
        return (
            str(g.op("Clip", x, g.weight(g.random.choice([0.0, -1.0])), g.weight(6.0)))
            if g.opset >= 11
            else str(g.op("Clip", x, min=0.0, max=6.0))
        )
    return x if kind == 1 else str(g.op(["Relu", "Relu", "Sigmoid", "LeakyRelu", "Tanh", "Relu"][kind], x))


def _norm(g: Any, x: str, s: tuple[int, ...]) -> str:
    weights = (g.weight(g._rng.uniform(0.5, 1.5, s[1])) for _ in range(4))
    return str(g.op("BatchNormalization", x, *weights, epsilon=g.random.choice([1e-5, 1e-2, 0.5])))


def _linear(step: Step) -> Step:
    return lambda g, x, s: _after(g, step(g, x, s))


LINEAR: list[Step] = [
    _linear(_gemm),
    _linear(_gemm),
    _linear(_conv),
    _linear(_conv),
    _linear(lambda g, x, s: g.op("MatMul", x, g.fan(s[-1], g.random.choice([2, 4, s[-1]]), fan_in=s[-1]))),  # type: ignore[attr-defined]
    lambda g, x, s: g.op("MatMul", x, g.fan(*s[1:-2], s[-1], 3, fan_in=s[-1])),  # type: ignore[attr-defined]
    lambda g, x, s: g.op("MatMul", g.fan(3, s[-2], fan_in=s[-2]), x),  # type: ignore[attr-defined]
    lambda g, x, s: g.op("Add", g.op("MatMul", x, g.fan(s[-1], 4, fan_in=s[-1])), g.normal(4)),  # type: ignore[attr-defined]
    lambda g, x, s: g.op("Add", x, _conv(g, x, s)),
    lambda g, x, s: g.op("MatMul", x, g.random.choice(g.known(s[-1], s[-1]))),  # type: ignore[attr-defined]
    _layer_norm,
    _attention,
    _both,
    _both,
    _outer_matmul,
    _norm,
    lambda g, x, s: _norm(g, _conv(g, x, s), (s[0], next(w.dims[0] for w in g._weights[::-1] if len(w.dims) == len(s)))),
    lambda g, x, s: g.op("ConvTranspose", x, g.fan(s[1], 2, *[2] * (len(s) - 2), fan_in=s[1]), g.fan(2)),  # type: ignore[attr-defined]
    lambda g, x, s: g.op(g.random.choice(["Mul", "Add"]), x, g.normal(s[1], *[1] * (len(s) - 2))),
    lambda g, x, s: g.op("PRelu", x, g.normal(*s[1:2], *[1] * (len(s) - 2))),
    lambda g, x, s: g.op(g.random.choice(["Erf", "HardSigmoid", "Elu", "Selu", "Exp", "Sin"]), x),
    lambda g, x, s: g.op("Add", x, g.op("Mul", x, g.op("Sigmoid", x))),
]  # fmt: skip


def make_genes(seed: int, steps: int | None = None) -> bytes:
    """Genes that follow from a seed."""
    source = random.Random(seed)
    return source.randbytes(GENE * (1 + (steps or source.randint(3, 12))))


def described(data: bytes) -> str:
    """A model as text, for a finding."""
    return str(onnx.printer.to_text(onnx.load_model_from_string(data)))[:4000]
