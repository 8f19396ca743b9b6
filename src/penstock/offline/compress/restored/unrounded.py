"""Undo a quantisation: put the original weights back, and remove the rounding of activations.

A lost bias, a wrong attribute or a wrong connection remains in the result. The outputs must equal those of the float model, except for
differences in the order of summation. A weight is put back only if it rounds to the integers of the quantised model. This proves that
each element of a quantised weight is off by at most half a step. The integers of each scale must use at least half of their range, so
that the steps are not coarser than the bits require.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from penstock.artifact import Artifact
from penstock.errors import Unsupported, WrongResult
from penstock.offline.compress.precision.products import MICROSOFT
from penstock.offline.compress.ptq.qdq_placement import ACTIVATIONS, FloatModel, attributes_of, float_model
from penstock.offline.optimize.mapped import array_of, artifact_of, tensor_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array

FIX = "use the original or another method, and report the model: this is a defect of the method"
_HALF = 0.501
"""Half a step, and the error of computing in FP32."""
_PROBED = 512
"""Number of elements that are compared first."""
_TINY = np.finfo(np.float32).tiny
_LARGE_BIAS = 2**29
"""A bias of at least this many steps may need a larger scale than the weights of its channel."""
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def unrounded(made: onnx.ModelProto, source: Artifact) -> onnx.ModelProto:
    """Remove the rounding from ``made``, a quantised version of ``source``. Raises WrongResult if a number in ``made`` is not a
    rounded number of ``source``, or if a tensor is quantised and dequantised with different parameters.
    """
    return _Unrounding(made, source).run()


def with_float_products(made: Artifact) -> Artifact:
    """Return ``made`` with FP32 activations in all block-quantised products, whose kernels may otherwise round activations."""
    proto = read_proto(made)
    levels = [
        one
        for node in proto.graph.node
        if node.op_type == "MatMulNBits"
        for one in node.attribute
        if one.name == "accuracy_level"
    ]
    for one in levels:
        one.i = 1
    return artifact_of(proto) if levels else made


def constants(graph: onnx.GraphProto) -> Iterator[Array]:
    """The initialisers of ``graph``, and the values of its Constant nodes."""
    for tensor in graph.initializer:
        yield array_of(tensor)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from (array_of(one.t) for one in node.attribute if one.name == "value")


class Integers(NamedTuple):
    """A rounded constant: ``(integers - zero) * scale``. Values beyond ``limits`` were clipped."""

    integers: Array
    scale: Array
    zero: Array
    limits: tuple[float, float]

    def steps_from(self, weight: Array) -> Array:
        """The distance of each element from ``weight``, in steps."""
        with np.errstate(over="ignore"):
            exact = np.divide(weight, self.scale, dtype=_wide(self.integers)) + self.zero
        return np.asarray(np.abs(exact.clip(*self.limits) - self.integers))

    def part(self) -> Integers:
        """The first elements along every axis."""
        side = max(1, int(_PROBED ** (1 / max(1, self.integers.ndim))))
        scale, zero = (np.broadcast_to(one, self.integers.shape) for one in (self.scale, self.zero))
        corner = _corner(self.integers, side)
        return Integers(self.integers[corner], scale[corner], zero[corner], self.limits)

    def is_coarse(self, weight: Array) -> Array:
        """For each scale, True if the integers use less than half of their range, and ``weight`` is not practically zero."""
        axes = tuple(at for at in range(self.integers.ndim) if not self.scale.ndim or self.scale.shape[at] == 1)
        low, high = self.limits
        used = np.abs(self.integers.astype(np.int64) - self.zero).max(axis=axes, initial=0)
        is_zero = np.abs(weight).max(axis=axes, initial=0.0) <= high * _TINY
        return np.asarray(~is_zero & (used < (high - low) // 4))

    def fits(self, weight: Array) -> bool:
        return bool((self.steps_from(weight) <= _HALF).all())


class _Unrounding:
    def __init__(self, made: onnx.ModelProto, source: Artifact) -> None:
        self._proto = onnx.ModelProto()
        self._proto.CopyFrom(made)
        self._graph = self._proto.graph
        self._tensors = {tensor.name: tensor for tensor in self._graph.initializer}
        self._by_output = {name: node for node in self._graph.node for name in node.output}
        self._names = {node.name for node in self._graph.node}
        self._fresh = FreshNames(self._graph)
        before = read_proto(source).graph
        self._floats: FloatModel | None = None
        known = [*constants(before)]
        with contextlib.suppress(Unsupported):  # rounded already, or of an opset without INT8
            self._floats = float_model(source)
            known += map(array_of, self._floats.weights.values())
        self._known: dict[tuple[int, ...], list[Array]] = {}
        for array in known:
            if array.dtype in (np.float32, np.float64):
                self._known.setdefault(array.shape, []).append(array)
        # These nodes are no part of the change: an earlier step may have rounded them.
        self._unchanged = {node.SerializeToString(deterministic=True) for node in before.node}
        self._stored = {(array.shape, array.tobytes()) for array in known if array.dtype.itemsize == 2}

    def run(self) -> onnx.ModelProto:
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            nodes += self._undone(node)
        used = {value.name for value in self._graph.output}.union(*map(reads, nodes))
        kept = [node for node in nodes if not used.isdisjoint(node.output)]
        del self._graph.node[:]
        self._graph.node.extend(kept)
        used = {value.name for value in self._graph.output}.union(*map(reads, kept))
        tensors = [tensor for tensor in self._tensors.values() if tensor.name in used]
        del self._graph.initializer[:]
        self._graph.initializer.extend(tensors)
        return self._proto

    def _undone(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """``node`` without rounding."""
        is_unchanged = node.SerializeToString(deterministic=True) in self._unchanged
        match node.domain, "" if is_unchanged else node.op_type:
            case "" | "ai.onnx", "DequantizeLinear" if self._floats is not None:
                return self._constant(node) if node.input[0] in self._tensors else self._activation(node)
            case "" | "ai.onnx", "MatMulInteger":
                return self._integer_product(node)
            case "" | "ai.onnx", "Cast" if node.input[0] in self._tensors:
                return self._half(node)
            case domain, "MatMulNBits" | "DynamicQuantizeLSTM" if domain == MICROSOFT:
                return self._block_product(node) if node.op_type == "MatMulNBits" else self._recurrent(node)
        return [node]

    def _constant(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        integers, scale = (self._array(name) for name in node.input[:2])
        zero = self._zero_point(node, 2, integers)
        axis = attributes_of(node).get("axis", 1)
        along = [-1 if at == axis % integers.ndim else 1 for at in range(integers.ndim)] if scale.size > 1 else []
        if along and scale.size != integers.shape[axis]:
            raise wrong_weight(node.input[0])
        scale, zero = (one.reshape(along if one.size > 1 else ()) for one in (scale, zero))
        rounded = Integers(integers, scale, zero, _limits(integers))
        self._put(node.output[0], rounded, node.input[0])
        if integers.dtype.itemsize == 1:
            self._check_steps(rounded, node.output[0], node.input[0])
        return []

    def _check_steps(self, rounded: Integers, name: str, what: str) -> None:
        """Raise WrongResult if a scale of the constant ``name`` is too large. The bias of a channel may require a larger scale."""
        is_coarse = rounded.is_coarse(self._array(name))
        for node in self._graph.node if is_coarse.any() else ():
            maker = self._by_output.get(node.input[2]) if name in node.input[1:2] and len(node.input) > 2 else None
            if maker is not None and maker.input[0] in self._tensors:
                is_large = np.abs(self._array(maker.input[0]).astype(np.int64)) >= _LARGE_BIAS
                is_coarse &= ~(is_large if is_coarse.ndim else is_large.any())
        if is_coarse.any():
            raise WrongResult(f"the steps of weight '{what}' of the compressed model are too large for its values", FIX)

    def _activation(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        first = self._by_output.get(node.input[0])
        if first is None or first.op_type != "QuantizeLinear":
            return [node]
        pairs = list(zip(first.input[1:], node.input[1:], strict=False))
        if len(first.input) != len(node.input) or any(
            one != other and self._array(one).tobytes() != self._array(other).tobytes() for one, other in pairs
        ):
            raise WrongResult(f"tensor '{node.output[0]}' is quantised and dequantised differently", FIX)
        absorbed = self._absorbed(node, first)
        if absorbed is None:
            return [helper.make_node("Identity", first.input[:1], node.output)]
        return [absorbed]

    def _absorbed(self, node: onnx.NodeProto, first: onnx.NodeProto) -> onnx.NodeProto | None:
        """The activation function that the range of a tensor replaces."""
        assert self._floats is not None
        known = self._floats.producers.get(node.output[0])
        if known is None or known.op_type not in ACTIVATIONS or known.name in self._names:
            return None
        made = onnx.NodeProto()
        made.CopyFrom(known)
        made.input[0] = first.input[0]
        bounds = [0.0 if known.op_type == "Relu" else -np.inf, np.inf]
        for place, name in enumerate(known.input[1:]):
            if name:
                self._tensors.setdefault(name, self._floats.weights[name])
                bounds[place] = float(self._array(name).reshape(()))
        scale, zero = (self._array(name).astype(np.float64) for name in first.input[1:3])
        low, high = ((limit - zero) * scale for limit in _limits(self._array(first.input[2])))
        if low < bounds[0] - _HALF * scale or high > bounds[1] + _HALF * scale:
            raise WrongResult(f"the range of tensor '{node.output[0]}' exceeds the bounds of {known.op_type}", FIX)
        return made

    def _half(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor = self._tensors[node.input[0]]
        array = array_of(tensor)
        if tensor.data_type not in _HALVES or (self._stored and (array.shape, array.tobytes()) in self._stored):
            return [node]
        for weight in self._known.get(array.shape, ()):
            with np.errstate(over="ignore"):
                if np.array_equal(weight.astype(array.dtype), array):
                    self._tensors[node.output[0]] = tensor_of(weight, node.output[0])
                    return []
        raise wrong_weight(tensor.name)

    def _block_product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        given: dict[str, Any] = attributes_of(node)
        packed, scales = self._array(node.input[1]), self._array(node.input[2])
        rows, columns, bits, size = (given[name] for name in ("K", "N", "bits", "block_size"))
        if bits == 4:
            packed = np.stack([packed & 15, packed >> 4], axis=-1)
        integers = packed.reshape(columns, -1)[:, :rows].T
        along = np.repeat(scales.reshape(columns, -1), size, axis=1)[:, :rows].T
        along = np.where(along == 0, _TINY, along)  # such blocks are zero
        found = Integers(integers, along, np.array(1 << (bits - 1)), (0, (1 << bits) - 1))
        name = self._fresh(f"{node.output[0]}_weight")
        self._put(name, found, node.input[1])
        return [helper.make_node("MatMul", [node.input[0], name], node.output)]

    def _integer_product(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """DynamicQuantizeLinear ── MatMulInteger ── Cast ── Mul, with the scale of the weight in another Mul."""
        rounding = self._by_output.get(node.input[0])
        last = node
        for op_type in ("Cast", "Mul"):
            readers = [one for one in self._graph.node if last.output[0] in one.input]
            last = readers[0] if len(readers) == 1 and readers[0].op_type == op_type else last
        both = self._by_output.get(last.input[-1])
        known = [name for name in both.input if name in self._tensors] if both is not None else []
        if rounding is None or rounding.op_type != "DynamicQuantizeLinear" or both is None or len(known) != 1:
            return [node]
        if {*both.input} - {*known} != {rounding.output[1]} or node.input[2] != rounding.output[2]:
            raise WrongResult(f"tensor '{node.input[0]}' is quantised and dequantised differently", FIX)
        scale, integers = self._array(known[0]), self._array(node.input[1])
        zero = self._zero_point(node, 3, integers)
        name, exact = (self._fresh(f"{node.output[0]}_{what}") for what in ("weight", "exact"))
        rounded = Integers(integers, scale.reshape(1, -1), zero, _limits(integers))
        self._put(name, rounded, node.input[1])
        self._check_steps(rounded, name, node.input[1])
        weight = self._array(name) / scale
        self._tensors[name] = tensor_of(weight, name)
        return [
            helper.make_node("Div", [rounding.input[0], rounding.output[1]], [exact]),
            helper.make_node("MatMul", [exact, name], node.output),
        ]

    def _recurrent(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """An LSTM whose weights are transposed in each direction, with scales and zero points as its last inputs."""
        names = []
        for place in (1, 2):
            integers, scale, zero = (self._array(node.input[at]) for at in (place, 2 * place + 6, 2 * place + 7))
            turned = np.ascontiguousarray(integers.swapaxes(1, 2))
            names.append(self._fresh(f"{node.output[0]}_weight"))
            rounded = Integers(turned, scale[..., None], zero[..., None], _limits(integers))
            self._put(names[-1], rounded, node.input[place])
            self._check_steps(rounded, names[-1], node.input[place])
        layer = onnx.NodeProto()
        layer.CopyFrom(node)
        layer.domain, layer.op_type = "", "LSTM"
        del layer.input[1:]
        layer.input.extend([*names, *node.input[3:8]])
        return [layer]

    def _put(self, name: str, rounded: Integers, what: str) -> None:
        """Add the weight of the float model that rounds to ``rounded``, as the constant ``name``."""
        shape, part = rounded.integers.shape, rounded.part()
        turned = (array.T for array in self._known.get(shape[::-1], ())) if len(shape) == 2 else ()
        found = [
            weight
            for weight in (*self._known.get(shape, ()), *turned)
            if part.fits(weight[_corner(weight, max(part.integers.shape, default=1))]) and rounded.fits(weight)
        ]
        if not found:
            raise wrong_weight(what)
        # Of the weights beyond a limit, the one that is not far beyond it.
        exact = rounded._replace(limits=(-np.inf, np.inf))
        nearest = min(found, key=lambda weight: float(exact.steps_from(weight).sum()))
        self._tensors[name] = tensor_of(np.asarray(nearest, np.float32).reshape(shape), name)

    def _zero_point(self, node: onnx.NodeProto, place: int, integers: Array) -> Array:
        """The zero point that ``node`` has as input ``place``; 0 if the input is left out."""
        return self._array(node.input[place]) if len(node.input) > place else np.zeros((), integers.dtype)

    def _array(self, name: str) -> Array:
        return array_of(self._tensors[name])


def wrong_weight(name: str) -> WrongResult:
    return WrongResult(f"weight '{name}' of the compressed model is no rounded weight of the original", FIX)


def _corner(array: Array, side: int) -> tuple[slice, ...]:
    return (slice(side),) * array.ndim


def _limits(integers: Array) -> tuple[int, int]:
    limits = np.iinfo(integers.dtype)
    return int(limits.min), int(limits.max)


def _wide(integers: Array) -> np.dtype[Any]:
    return np.dtype(np.float32 if integers.dtype.itemsize == 1 else np.float64)
