"""Weights stored as integers with scales, while the arithmetic stays FP32. All operators are standard, so every engine runs them.

A table, which only Gathers along its first axis read, has one scale per row, or with 4 bits one per block of a row. The model gathers
integers and scales, and multiplies only the gathered rows::

    ids ── Gather(integers) ── Cast ── Mul ── rows
     └──── Gather(scales) ─────────────┘

ONNX Runtime's ``GatherBlockQuantized`` does this in one operator, but it reads beyond the table if an id is too large.

Weights of convolutions, products and recurrent layers have one scale per output channel. A Cast and a Mul restore them. Engines run
these two operators once, when they load the model.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np
import onnx
from onnx import helper

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.precision.weight_only import (
    BLOCK_SIZES,
    BlockSize,
    WeightOnlyOptions,
    block_integers,
    block_values,
    quantize_weights,
)
from penstock.offline.compress.ptq.qdq_placement import KEPT_FLOAT, attributes_of
from penstock.offline.optimize.linear import linear_form
from penstock.offline.optimize.mapped import array_of, artifact_of, row_slices, tensor_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array, DataType

_LEAST_OPSET, _LEAST_FOR_BLOCKS = 7, 11
"""The first opsets whose Mul broadcasts, and whose Concat takes a negative axis."""
_LEVELS = 127
_LEAST_SHARING = 8
"""Fewest weights that share a scale, so that the scales are small beside the integers."""
_TINY = np.finfo(np.float32).tiny


class StorageOptions(msgspec.Struct, frozen=True):
    """Options of ``store_weights``."""

    table_bits: Literal[4, 8] = 8
    """Bits per number of a table. A table whose rows cannot be divided into blocks of at least 16 numbers takes 8 bits."""
    block_size: BlockSize = 32
    """Largest number of 4-bit numbers that share a scale."""
    tables_only: bool = False
    """Leave all weights but tables in FP32."""
    least_weights: int = 4096
    """Smaller weights stay FP32, since they are a small part of a model."""
    max_weight_error: float = 0.05
    """An 8-bit weight with a larger relative error stays FP32: a few large values determine its scales."""


_TABLES = StorageOptions(tables_only=True, least_weights=16384)
"""Options of ``store_tables``. Smaller tables are not worth the additional operators."""


def store_weights(artifact: Artifact, options: StorageOptions | None = None) -> Artifact:
    """``artifact`` with its large FP32 weights stored in 8 bits, and tables in ``table_bits``.

    The provenance step lists under ``kept`` the weights that stay FP32 because integers would be too inaccurate. Raises Unsupported if
    no weight can be stored as integers.
    """
    options = options or StorageOptions()
    proto = read_proto(artifact)
    storage = _Storage(proto, options)
    layers = storage.run()
    if not layers:
        raise Unsupported(
            f"the model has no {'table' if options.tables_only else 'weight'} of at least {options.least_weights} numbers "
            "that can be stored as integers",
            f"these lose too much: {', '.join(storage.kept[:5])}"
            if storage.kept
            else "integers would not make it smaller",
        )
    made = artifact_of(proto)
    facts = {
        "layers": layers,
        "kept": storage.kept,
        "weight_error": max(facts["error"] for facts in layers.values()),
        "size_ratio": round(made.size_bytes / artifact.size_bytes, 4),
    }
    return artifact.derive(made, "store_weights", msgspec.to_builtins(options), facts)


def store_tables(artifact: Artifact) -> Artifact:
    """``artifact`` with its large tables in INT8; unchanged if it has none."""
    with contextlib.suppress(Unsupported):
        return store_weights(artifact, _TABLES)
    return artifact


def store_in(artifact: Artifact, blocks: WeightOnlyOptions, data: Dataset | None = None) -> Artifact:
    """``artifact`` with its large products (``quantize_weights``) and tables in ``blocks.bits``, and other large weights in 8 bits.

    Raises Unsupported if it has none of them.
    """
    options = StorageOptions(table_bits=blocks.bits, block_size=blocks.block_size)
    try:
        products = quantize_weights(artifact, data, blocks)
    except Unsupported as error:
        with contextlib.suppress(Unsupported):
            return store_weights(artifact, options)
        raise error from None
    with contextlib.suppress(Unsupported):
        return store_weights(products, options)
    return products


def share_of_tables(artifact: Artifact) -> float:
    """The fraction of the model's bytes that ``store_tables`` would store as integers."""
    storage = _Storage(read_proto(artifact), _TABLES)
    return float(sum(4 * prod(tensor.dims) for tensor, _ in storage.candidates()) / artifact.size_bytes)


class _Storage:
    """Rewrites one model in place."""

    def __init__(self, proto: onnx.ModelProto, options: StorageOptions) -> None:
        self._proto, self._graph, self._options = proto, proto.graph, options
        self._opset = next((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), 0)
        self._fresh = FreshNames(proto.graph)
        self._replaced: dict[int, list[onnx.NodeProto]] = {}
        """The nodes that replace a Gather, by its identity."""
        self._first: list[onnx.NodeProto] = []
        self._constants: dict[float, str] = {}
        self.kept: list[str] = []
        self._uses: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        for node in self._graph.node:
            for place, name in enumerate(node.input):
                self._uses[name].append((node, place))
            for name in reads(node).difference(node.input):
                self._uses[name].append((node, -1))  # in a subgraph

    def candidates(self) -> Iterator[tuple[onnx.TensorProto, tuple[int, ...]]]:
        """The weights that may be stored as integers, with the axes along which scales differ."""
        given = {value.name for value in (*self._graph.input, *self._graph.output)}
        for tensor in self._graph.initializer if self._opset >= _LEAST_OPSET else ():
            uses, size = self._uses.get(tensor.name), prod(tensor.dims)
            if tensor.data_type != DataType.FP32.onnx or tensor.name in given or not uses:
                continue
            if any(node.doc_string == KEPT_FLOAT for node, _ in uses):
                continue
            found = [_scaled_axes(node, place, len(tensor.dims)) for node, place in uses]
            if None in found or size < self._options.least_weights:
                continue
            axes = next(axes for axes in found if axes is not None)
            if self._options.tables_only and not self._is_table(tensor.name):
                continue
            if size >= _LEAST_SHARING * prod(tensor.dims[axis] for axis in axes):
                yield tensor, axes

    def run(self) -> dict[str, dict[str, Any]]:
        """Rewrite the graph. Returns facts on each stored weight."""
        ranks = _ranks(self._proto) if self._opset >= _LEAST_FOR_BLOCKS and self._options.table_bits == 4 else {}
        layers = {}
        for tensor, axes in list(self.candidates()):
            weight = array_of(tensor)
            facts = self._block_table(tensor.name, weight, ranks) or self._weight(tensor.name, weight, axes)
            if facts:
                layers[tensor.name] = facts
            else:
                self.kept.append(tensor.name)
        nodes = [*self._first, *(made for node in self._graph.node for made in self._replaced.get(id(node), [node]))]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        for place in reversed(range(len(self._graph.initializer))):
            if self._graph.initializer[place].name in layers:
                del self._graph.initializer[place]
        return layers

    def _weight(self, name: str, weight: Array, axes: tuple[int, ...]) -> dict[str, Any] | None:
        """Store ``weight`` in 8 bits; None if that is too inaccurate."""
        found = _integers(weight, axes)
        if found is None or (error := _error(weight, *found)) > self._options.max_weight_error:
            return None
        integers, scale = self._add(found[0], f"{name}_int8"), self._add(found[1], f"{name}_scale")
        if self._is_table(name):
            restored = [self._gathered(node, integers, scale) for node, _ in self._uses[name]]
        else:
            value, restored = self._fresh(f"{name}_float"), [name]
            self._first += [
                helper.make_node("Cast", [integers], [value], to=DataType.FP32.onnx),
                helper.make_node("Mul", [value, scale], [name]),
            ]
        return {"bits": 8, "error": error, "scale": scale, "restored": restored}

    def _gathered(self, node: onnx.NodeProto, integers: str, scale: str) -> str:
        """Replace a Gather of a table. Returns its output."""
        ids, output = node.input[1], str(node.output[0])
        rows, value, scales = (self._fresh(f"{output}_{what}") for what in ("int8", "float", "scale"))
        self._replaced[id(node)] = [
            helper.make_node("Gather", [integers, ids], [rows]),
            helper.make_node("Cast", [rows], [value], to=DataType.FP32.onnx),
            helper.make_node("Gather", [scale, ids], [scales]),
            helper.make_node("Mul", [value, scales], [output]),
        ]
        return output

    def _block_table(self, name: str, weight: Array, ranks: Mapping[str, int]) -> dict[str, Any] | None:
        """Store a table in blocks of 4 bits; None if this is not wanted or not possible."""
        fitting = [size for size in BLOCK_SIZES if size <= self._options.block_size and weight.shape[-1] % size == 0]
        if self._options.table_bits != 4 or weight.ndim != 2 or not fitting or not self._is_table(name):
            return None
        if any(node.input[1] not in ranks for node, _ in self._uses[name]) or not np.isfinite(weight).all():
            return None
        size = max(fitting)
        integers, scales = block_integers(weight.T, WeightOnlyOptions(4, size))
        half = size // 2
        # The first half of each block is in the low bits.
        packed = self._add(integers[..., :half] | (integers[..., half:] << 4), f"{name}_int4")
        scale = self._add(scales[..., None], f"{name}_scale")
        restored = []
        for node, _ in self._uses[name]:
            rank = ranks[node.input[1]]
            nodes, value = self._unpacked(node, packed)
            rows, blocks = self._fresh(f"{node.output[0]}_scale"), self._fresh(f"{node.output[0]}_blocks")
            shape = self._add(np.array([0] * rank + [weight.shape[1]], np.int64), f"{node.output[0]}_shape")
            self._replaced[id(node)] = [
                *nodes,
                helper.make_node("Gather", [scale, node.input[1]], [rows]),
                helper.make_node("Mul", [value, rows], [blocks]),
                helper.make_node("Reshape", [blocks, shape], node.output),
            ]
            restored.append(blocks)
        error = _error(weight, block_values(integers, scales, weight.shape[1], 4).T, np.ones((1, 1), np.float32))
        return {"bits": 4, "error": error, "scale": scale, "restored": restored}

    def _unpacked(self, gather: onnx.NodeProto, packed: str) -> tuple[list[onnx.NodeProto], str]:
        """Nodes that gather bytes and divide each into its low and high half, and the tensor of the integers, as floats around 0."""
        nodes: list[onnx.NodeProto] = []

        def op(op_type: str, *inputs: str, **attributes: int) -> str:
            nodes.append(
                helper.make_node(op_type, inputs, [self._fresh(f"{gather.output[0]}_{op_type.lower()}")], **attributes)
            )
            return str(nodes[-1].output[0])

        both = op("Cast", op("Gather", packed, gather.input[1]), to=DataType.FP32.onnx)
        high = op("Floor", op("Mul", both, self._constant(1 / 16)))
        low = op("Sub", both, op("Mul", high, self._constant(16)))
        return nodes, op("Sub", op("Concat", low, high, axis=-1), self._constant(8))

    def _is_table(self, name: str) -> bool:
        return all(node.op_type == "Gather" for node, _ in self._uses[name])

    def _constant(self, value: float) -> str:
        if value not in self._constants:
            self._constants[value] = self._add(np.array(value, np.float32), f"constant_{value:g}")
        return self._constants[value]

    def _add(self, array: Array, like: str) -> str:
        name = self._fresh(like)
        self._graph.initializer.append(tensor_of(array, name))
        return name


def _scaled_axes(node: onnx.NodeProto, place: int, rank: int) -> tuple[int, ...] | None:
    """The axes along which the scales of a weight differ that ``node`` reads as input ``place``; None if it is no known weight."""
    if node.domain not in ("", "ai.onnx"):
        return None
    attributes = attributes_of(node)
    match node.op_type, place:
        case "Gather", 0:
            return (0,) if rank > 1 and attributes.get("axis", 0) in (0, -rank) else None
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return (0, 1)
        case "MatMul", (0 | 1):
            return tuple(axis for axis in range(rank) if axis != rank - 1 - place) if rank > 1 else None
    form = linear_form(node.op_type, attributes.get)
    return (form.outputs,) if form is not None and place == 1 else None


def _integers(weight: Array, axes: Sequence[int]) -> tuple[Array, Array] | None:
    """``weight`` in 8 bits, and its scales, which differ along ``axes``; None if a value is not finite or would overflow."""
    others = tuple(axis for axis in range(weight.ndim) if axis not in axes)
    largest = np.maximum(weight.max(axis=others, keepdims=True), -weight.min(axis=others, keepdims=True))
    # Rows of zeros, such as those for padding, stay zero. Numbers below the least normal float lose their precision anyway.
    scale = np.where(largest == 0, 1, np.maximum(largest / _LEVELS, _TINY)).astype(np.float32)
    with np.errstate(over="ignore"):
        is_safe = bool(np.isfinite(scale * np.float32(_LEVELS)).all())
    if not is_safe:
        return None
    integers = np.empty(weight.shape, np.int8)
    for rows in row_slices(weight):
        rounded = weight[rows] / _at(scale, rows)
        integers[rows] = np.rint(rounded, out=rounded).clip(-_LEVELS, _LEVELS)
    return integers, scale


def _at(scale: Array, rows: slice) -> Array:
    return scale[rows] if len(scale) > 1 else scale


def _error(weight: Array, integers: Array, scale: Array) -> float:
    lost = norm = 0.0
    for rows in row_slices(weight):
        lost += _square(integers[rows] * _at(scale, rows) - weight[rows])
        norm += _square(weight[rows])
    return round((lost / norm) ** 0.5, 8) if norm else 0.0


def _square(array: Array) -> float:
    return float(np.einsum("i,i->", array.ravel(), array.ravel(), dtype=np.float64))


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    """The ranks of all tensors whose rank is known."""
    with contextlib.suppress(Exception):
        proto = onnx.shape_inference.infer_shapes(proto)
    graph = proto.graph
    values = (*graph.value_info, *graph.input, *graph.output)
    found = {value.name: value.type.tensor_type for value in values}
    ranks = {name: len(kind.shape.dim) for name, kind in found.items() if kind.HasField("shape")}
    return ranks | {tensor.name: len(tensor.dims) for tensor in graph.initializer}
