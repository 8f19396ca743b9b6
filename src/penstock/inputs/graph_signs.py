"""Reads from an ONNX graph what its inputs mean: the first operators that compute with an input restrict its values.

An input is followed through operators that only move, cast or split its elements. Its end is the first other operator:

1. The indices of a Gather from a constant table are ids below the number of rows.
2. An initial state of a recurrent operator is a state; its sequence lengths are lengths.
3. An operator of ``ai.onnx.ml`` reads columns of a table. Its attributes contain the scale, the thresholds or the categories.
4. A one-dimensional convolution of a single channel reads audio; a two-dimensional convolution of 1, 3 or 4 channels reads an image.
5. A comparison of a single number with constants distinguishes these values.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from penstock.inputs.meaning import Meaning, Role
from penstock.rows.graph import OnnxGraph, OnnxModel, OnnxNode, OnnxTensor
from penstock.tensor import Signature, TensorSpec

_MOVES = frozenset(
    {"Cast", "CastLike", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"}
    | {"Tile", "Transpose", "Unsqueeze"}
)
"""Operators whose outputs contain the elements of their first input (Concat: of each input)."""
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "BatchNormalization"})
_ML = "ai.onnx.ml"
_MICROSOFT = "com.microsoft"
_MAX_TENSORS = 10_000
"""Maximum number of tensors that one search visits."""
_MAX_CONSTANT = 64
"""Maximum number of elements of a constant whose values are read."""
_MAX_COLUMNS = 4_096
_MAX_CHOICES = 1_000
_CHANNELS = (1, 3, 4)
_LARGEST = 3e38
_PIXELS = 64.0
"""Divisors above this value show that an image has values from 0 to 255."""


class _Use(NamedTuple):
    node: OnnxNode
    place: int
    """Index of the input of ``node``."""


class _Graph:
    """The readers and writers of all tensors, including those of subgraphs."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.readers: dict[str, list[_Use]] = defaultdict(list)
        self.writers: dict[str, OnnxNode] = {}
        self._tensors: dict[str, OnnxTensor] = {}
        self._inner: dict[str, list[str]] = defaultdict(list)
        pending = [graph]
        while pending:
            one = pending.pop()
            self._tensors.update(one.tensors)
            for node in one.nodes:
                for index, name in enumerate(node.inputs):
                    self.readers[name].append(_Use(node, index))
                self.writers.update(dict.fromkeys(node.outputs, node))
                bodies = [value for value in node.attributes.values() if isinstance(value, OnnxGraph)]
                pending += bodies
                if node.operator in ("Loop", "Scan"):
                    for body in bodies:
                        for outside, inside in zip(node.inputs, body.inputs, strict=False):
                            self._inner[outside].append(inside)

    def ends(self, name: str, through: frozenset[str] = frozenset()) -> Iterator[_Use]:
        """The first uses of the elements of ``name`` by other operators than ``_MOVES`` and ``through``."""
        seen, pending = {name}, deque([name])
        while pending and len(seen) < _MAX_TENSORS:
            current = pending.popleft()
            found = list(self._inner.get(current, ()))
            for use in self.readers.get(current, ()):
                is_move = use.node.operator in _MOVES and (use.place == 0 or use.node.operator == "Concat")
                if not use.node.domain and (is_move or use.node.operator in through):
                    found += use.node.outputs
                else:
                    yield use
            pending += dict.fromkeys(each for each in found if each not in seen)
            seen.update(found)

    def dims(self, name: str) -> tuple[int, ...] | None:
        """The shape of a constant; None if ``name`` is no constant."""
        turns: list[OnnxNode] = []
        for _ in range(_MAX_CONSTANT):
            tensor = self._constant(name)
            if tensor is not None:
                dims = tensor.dims
                for turn in reversed(turns):
                    order = turn.attributes.get("perm") or tuple(reversed(range(len(dims))))
                    dims = tuple(dims[axis] for axis in order if 0 <= axis < len(dims))
                return dims
            node = self.writers.get(name)
            if node is None or not node.inputs:
                return None
            if node.operator == "Transpose":
                turns.append(node)
            elif node.operator not in ("DequantizeLinear", "Cast", "Identity"):
                return None
            name = node.inputs[0]
        return None

    def values(self, name: str) -> tuple[float, ...]:
        """The elements of a small constant; empty if ``name`` is no small constant of numbers."""
        tensor = self._constant(name)
        if tensor is None:
            node = self.writers.get(name)
            found = node.attributes if node is not None and node.operator == "Constant" else {}
            value = found.get("value_int", found.get("value_float"))
            return () if value is None else (float(value),)
        count = 1
        for dim in tensor.dims:
            count *= dim
        array = tensor.array() if 0 < count <= _MAX_CONSTANT else None
        return () if array is None else tuple(float(each) for each in array.reshape(-1).tolist())

    def _constant(self, name: str) -> OnnxTensor | None:
        node = self.writers.get(name)
        if node is not None and node.operator == "Constant":
            value = node.attributes.get("value")
            return value if isinstance(value, OnnxTensor) else None
        return self._tensors.get(name)


def graph_meanings(model: OnnxModel, signature: Signature) -> dict[str, Meaning]:
    """The meanings of those inputs of which the graph shows the meaning."""
    graph = _Graph(model.graph)
    found = {}
    for spec in signature.inputs:
        meaning = _meaning(graph, spec, signature)
        if meaning is not None:
            found[spec.name] = meaning
    return found


def _meaning(graph: _Graph, spec: TensorSpec, signature: Signature) -> Meaning | None:
    uses = list(graph.ends(spec.name))
    signs = [sign for use in uses if (sign := _sign(graph, use, spec)) is not None]
    ids = [sign for sign in signs if sign.role is Role.TOKEN_IDS]
    if ids:
        return min(ids, key=lambda sign: sign.high)
    if signs:
        return signs[0]
    if values := _compared(graph, uses, spec):
        return Meaning(Role.SCALAR, "compared with constants", choices=values)
    if spec.datatype.is_float or spec.datatype.value == "UINT8":
        return _picture(graph, spec, signature)
    return None


def _sign(graph: _Graph, use: _Use, spec: TensorSpec) -> Meaning | None:
    node, index = use
    if node.domain == _ML:
        return _columns(node, spec)
    rule = _RULES.get((node.domain, node.operator))
    return rule(graph, node, index) if rule is not None else None


def _ids(rows: int | None, table: str) -> Meaning | None:
    if rows is None or rows < 1:
        return None
    return Meaning(Role.TOKEN_IDS, f"index of {table} of {rows} rows", (0.0,), (float(rows - 1),))


def _gather(graph: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    dims = graph.dims(node.inputs[0])
    axis = node.attributes.get("axis", node.attributes.get("gather_axis", 0))
    if index != 1 or not dims or not isinstance(axis, int) or not -len(dims) <= axis < len(dims):
        return None
    return _ids(dims[axis], "a table")


def _one_hot(graph: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    depth = graph.values(node.inputs[1]) if len(node.inputs) > 1 else ()
    return _ids(int(depth[0]), "a one-hot code") if index == 0 and depth else None


def _embedding(graph: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    if index == 7:
        return Meaning(Role.MASK, "mask of an embedding layer", (0.0,), (1.0,))
    place = {0: 2, 1: 4, 8: 3}.get(index)
    if place is None or place >= len(node.inputs) or not (dims := graph.dims(node.inputs[place])):
        return None
    return _ids(dims[0], "a table")


def _recurrent(_: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    if index == 4:
        return Meaning(Role.LENGTHS, f"sequence lengths of {node.operator}")
    if index in (5, 6):
        return Meaning(Role.STATE, f"initial state of {node.operator}")
    return None


def _spectral(_: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    return Meaning(Role.AUDIO, f"read by {node.operator}") if index == 0 else None


def _selected(_: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    return Meaning(Role.MASK, f"condition of {node.operator}", (0.0,), (1.0,)) if index == 0 else None


def _complement(graph: _Graph, node: OnnxNode, index: int) -> Meaning | None:
    values = graph.values(node.inputs[0])
    is_complement = index == 1 and values and set(values) == {1.0}
    return Meaning(Role.MASK, "the graph computes 1 - x", (0.0,), (1.0,)) if is_complement else None


_RULES: Mapping[tuple[str, str], Callable[[_Graph, OnnxNode, int], Meaning | None]] = {
    ("", "Gather"): _gather,
    (_MICROSOFT, "GatherBlockQuantized"): _gather,
    ("", "OneHot"): _one_hot,
    (_MICROSOFT, "EmbedLayerNormalization"): _embedding,
    ("", "LSTM"): _recurrent,
    ("", "GRU"): _recurrent,
    ("", "RNN"): _recurrent,
    ("", "STFT"): _spectral,
    ("", "DFT"): _spectral,
    ("", "Where"): _selected,
    ("", "Sub"): _complement,
}


def _columns(node: OnnxNode, spec: TensorSpec) -> Meaning:
    """The columns that an operator of ``ai.onnx.ml`` reads, with the values that its attributes mention."""
    read, reason = node.attributes, f"read by {node.operator}"
    for name in ("cats_strings", "keys_strings", "cats_int64s", "keys_int64s", "keys_floats"):
        if found := read.get(name):
            values = [each.encode(errors="surrogateescape") if isinstance(each, str) else each for each in found]
            is_text = isinstance(values[0], bytes)
            if is_text == (spec.datatype.value == "BYTES"):
                return Meaning(Role.FEATURES, reason, choices=tuple(values[:_MAX_CHOICES]))
    low, high = _scaled(read) if node.operator == "Scaler" else _thresholds(read)
    columns = spec.shape[-1] if spec.shape else 1
    if len(low) > 1 and len(low) != columns and columns != -1:
        low, high = [min(low)], [max(high)]
    return Meaning(Role.FEATURES, reason, tuple(low), tuple(high))


def _scaled(read: Mapping[str, object]) -> tuple[list[float], list[float]]:
    """Two standard deviations around the mean of each column that a Scaler normalises."""
    offsets, scales = read.get("offset"), read.get("scale")
    if not isinstance(offsets, tuple) or not isinstance(scales, tuple) or not offsets or not scales:
        return [], []
    count = max(len(offsets), len(scales))
    if {len(offsets), len(scales)} - {1, count} or count > _MAX_COLUMNS or not all(scales):
        return [], []
    means, factors = offsets * (count // len(offsets)), scales * (count // len(scales))
    widths = [2 / abs(factor) for factor in factors]
    pairs = list(zip(means, widths, strict=True))
    return [mean - width for mean, width in pairs], [mean + width for mean, width in pairs]


def _thresholds(read: Mapping[str, object]) -> tuple[list[float], list[float]]:
    """The range of each column's thresholds in a tree ensemble, widened by its own width, so that all branches are taken.

    Thresholds near infinity do not count: exporters use them for nodes that only tell NaN from numbers.
    """
    columns, values, modes = (read.get(f"nodes_{name}") for name in ("featureids", "values", "modes"))
    if not isinstance(columns, tuple) or not isinstance(values, tuple) or not isinstance(modes, tuple):
        return [], []
    by_column: dict[int, list[float]] = defaultdict(list)
    for column, value, mode in zip(columns, values, modes, strict=False):
        if mode != "LEAF" and 0 <= column < _MAX_COLUMNS and abs(value) < _LARGEST:
            by_column[column].append(value)
    if not by_column:
        return [], []
    low, high = [0.0] * (max(by_column) + 1), [1.0] * (max(by_column) + 1)
    for column, found in by_column.items():
        margin = max(found) - min(found) or max(1.0, abs(found[0]))
        low[column], high[column] = min(found) - margin / 2, max(found) + margin / 2
    return low, high


def _compared(graph: _Graph, uses: list[_Use], spec: TensorSpec) -> tuple[int | float, ...]:
    """The constants with which the model compares an input that is a single number."""
    if any(dim != 1 for dim in spec.shape) or spec.datatype.value in ("BYTES", "BOOL"):
        return ()
    found: set[float] = set()
    for node, index in uses:
        if node.operator == "Equal" and len(node.inputs) == 2:
            found.update(graph.values(node.inputs[1 - index]))
    return tuple(sorted(each if spec.datatype.is_float else int(each) for each in found))


def _picture(graph: _Graph, spec: TensorSpec, signature: Signature) -> Meaning | None:
    """An image or audio, by the convolution that reads it."""
    rank = len(spec.shape)
    for node, index in graph.ends(spec.name, _ARITHMETIC):
        if node.operator not in ("Conv", "ConvInteger", "QLinearConv") or index or len(node.inputs) < 2:
            continue
        dims = graph.dims(node.inputs[1 if node.operator != "QLinearConv" else 3]) or ()
        channels = dims[1] * node.attributes.get("group", 1) if len(dims) > 2 else 0
        if len(dims) == 3 and channels == 1 and rank <= 3:
            return Meaning(Role.AUDIO, "read by a convolution of one channel over time")
        if len(dims) == 4 and channels in _CHANNELS and rank in (3, 4):
            layout = _layout(spec.shape, channels)
            if layout:
                low, high, why = _brightness(graph, spec, signature)
                return Meaning(Role.IMAGE, f"convolution of {channels} channel(s){why}", (low,), (high,), layout=layout)
    return None


def _layout(shape: tuple[int, ...], channels: int) -> str:
    batch = "N" if len(shape) == 4 else ""
    if shape[len(batch)] == channels:
        return f"{batch}CHW"
    if shape[-1] == channels:
        return f"{batch}HWC"
    return f"{batch}CHW" if shape[len(batch)] == -1 else ""


def _brightness(graph: _Graph, spec: TensorSpec, signature: Signature) -> tuple[float, float, str]:
    """The range of an image's values, and how it is known."""
    if spec.datatype.value == "UINT8":
        return 0.0, 255.0, ""
    for node, index in graph.ends(spec.name):
        others = [value for at, name in enumerate(node.inputs) if at != index for value in graph.values(name)]
        if not others:
            continue
        largest, least = max(map(abs, others)), min(map(abs, others))
        is_divided = node.operator == "Div" and not index and largest > _PIXELS
        if is_divided or (node.operator == "Mul" and largest < 1 / _PIXELS):
            return 0.0, 255.0, ", divided in the graph"
        if node.operator == "Sub" and not index and largest > _PIXELS:
            return 0.0, 255.0, ", a mean of pixels is subtracted"
        if node.operator == "Sub" and not index and 0 < least <= largest < 1:
            return 0.0, 1.0, ", a mean below 1 is subtracted"
    images = [each.name for each in signature.outputs if len(each.shape) == len(spec.shape)]
    if any(name in graph.writers and graph.writers[name].operator == "Tanh" for name in images):
        return -1.0, 1.0, "; the output is a Tanh"
    return 0.0, 1.0, "; range assumed"
