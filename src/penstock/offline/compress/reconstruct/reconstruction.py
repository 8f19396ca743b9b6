"""Change the integers of a quantised model's weights so that the results of its layers are closer to those of the float model.

The layers are reconstructed one by one, without labels, from the second moments of their inputs in the float model
(``second_order.py``). An integer changes by at most one step. Scales stay the same, and so does the speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact, sha256
from penstock.dataset import Dataset
from penstock.offline.compress.ptq.qdq_placement import LINEAR_OPS, attributes_of, float_model
from penstock.offline.compress.reconstruct.layer_inputs import LayerInput, layer_input, observe
from penstock.offline.compress.reconstruct.second_order import WeightGrid, rounded
from penstock.offline.compress.taps import Taps
from penstock.offline.deadline import BuildDeadline
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import mean_interval, sample_errors
from penstock.offline.model_store import remembered
from penstock.offline.optimize.linear import linear_form
from penstock.offline.optimize.mapped import array_of, artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

STEP = "reconstruct"
"""The name of the provenance step."""
_SAMPLES, _CHECKED = 256, 64
"""Maximum numbers of samples, evenly spaced, to choose integers by, and to compare the outputs on."""
_LEAST_BYTES = 128 << 20
"""Memory for moments: this, or the size of the float model if that is larger."""
_MIDDLE = 128
"""Zero point of weights of 8 bits in a MatMulNBits."""
_COPIES = 3
"""Maximum memory for a layer, relative to its moments."""


def reconstruct(original: Artifact, quantised: Artifact, data: Dataset, time_s: float = inf) -> Artifact:
    """``quantised``, made from ``original`` with weights rounded to nearest, with better integers for the weights of its layers.

    The layers are Conv, Gemm and MatMul with dequantised constant weights, and MatMulNBits. A layer keeps its integers unless its
    error falls, also on rows that did not choose the integers. Returns ``quantised`` unless the error of the outputs provably falls.
    After ``time_s`` seconds, the remaining layers keep their integers; the result then depends on the machine.
    Raises InvalidData if the data do not fit, and Unsupported if an output has no batch axis.
    """
    smallest = signature_of(original).smallest_batch
    chosen = data.few(_SAMPLES, smallest)
    layers = _Layers(original, quantised)
    changed = layers.reconstructed(chosen, BuildDeadline(time_s))
    proto = read_proto(quantised)
    for tensor in proto.graph.initializer:
        if tensor.name in changed:
            tensor.CopyFrom(numpy_helper.from_array(changed[tensor.name], tensor.name))
    made = artifact_of(proto)
    if made.digest == quantised.digest:
        return quantised
    before, after = errors_on(chosen, original, quantised, made)
    if not mean_interval(before - after).low > 0:
        return quantised
    asked = {"data": data.digest, "original": original.digest}
    facts = {
        "error": [float(before.mean()), float(after.mean())],
        "layers": len(layers.found),
        "changed": sorted(changed),
    }
    return quantised.derive(made, STEP, asked, facts)


def errors_on(data: Dataset, original: Artifact, *models: Artifact) -> list[Array]:
    """For each of ``models``, the relative errors of its outputs on some samples of ``data``."""
    few = data.few(_CHECKED, signature_of(original).smallest_batch)
    reference = answers_of(original, few, as_written=True)
    return [sample_errors(reference, answers_of(one, few, as_written=True)) for one in models]


class _Layer(NamedTuple):
    """A layer of both models."""

    before: onnx.NodeProto
    """The node in the float model."""
    holder: onnx.NodeProto
    """The node of the quantised model that reads the integers: a DequantizeLinear, or the product itself."""
    source: LayerInput

    @property
    def is_packed(self) -> bool:
        return str(self.holder.op_type) == "MatMulNBits"

    @property
    def constant(self) -> str:
        """The name of the integers."""
        return str(self.holder.input[int(self.is_packed)])


class _Layers:
    """The layers of a quantised model with integers that no other node reads, in graph order."""

    def __init__(self, original: Artifact, quantised: Artifact) -> None:
        self._original, self._float = original, float_model(original)
        graph = read_proto(quantised).graph
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        makers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
        readers = Counter(name for node in graph.node for name in node.input)
        known = {node.name: node for node in self._float.nodes if node.op_type in LINEAR_OPS - {"ConvTranspose"}}
        self.found: list[_Layer] = []
        for node in graph.node:
            before = known.get(node.name)
            weight = None if before is None else self._float.weights.get(before.input[1])
            holder = (
                node if node.op_type == "MatMulNBits" else makers.get(node.input[1]) if weight is not None else None
            )
            is_stack = node.op_type == "MatMul" and weight is not None and len(weight.dims) != 2
            if before is None or weight is None or holder is None or is_stack:
                continue
            layer = _Layer(before, holder, layer_input(before, tuple(weight.dims)))
            shared = readers[layer.constant] > 1 or readers[node.input[1]] > 1
            scale = self._tensors.get(holder.input[2 if layer.is_packed else 1])
            is_known = (
                layer.constant in self._tensors and scale is not None and (layer.is_packed or len(scale.dims) < 2)
            )
            if is_known and not shared:
                self.found.append(layer)

    def reconstructed(self, data: Dataset, deadline: BuildDeadline) -> dict[str, Array]:
        """The constants to change, by name. Within a build, each layer is reconstructed once for the same integers."""
        key = self._original.digest, self._original.path, data.digest
        known: dict[tuple[str, str], Array | None] = remembered(
            "reconstructed", key, dict, self._original.size_bytes // 4
        )
        keys = {layer.constant: self._key(layer) for layer in self.found}
        missing = [layer for layer in self.found if keys[layer.constant] not in known]
        taps = Taps(self._float.artifact(), data, signature=signature_of(self._original))
        for part in _parts(missing, max(_LEAST_BYTES, self._original.size_bytes)):
            if deadline.is_past():
                break
            moments = observe(taps, [layer.source for layer in part], lambda: deadline.is_past(0.5))
            for layer in part:
                if not deadline.is_past():
                    known[keys[layer.constant]] = rounded(*self._read(layer), moments[layer.source])
        better = ((layer, known.get(keys[layer.constant])) for layer in self.found)
        return {layer.constant: self._stored(layer, one) for layer, one in better if one is not None}

    def _key(self, layer: _Layer) -> tuple[str, str]:
        at = int(layer.is_packed)
        stored = b"".join(self._array(name).tobytes() for name in layer.holder.input[at : at + 2])
        return layer.before.name, sha256(stored)

    def _read(self, layer: _Layer) -> tuple[Array, WeightGrid]:
        """The weight and its grid."""
        weight = array_of(self._float.weights[layer.before.input[1]])
        found = _matrix(layer.before, weight)
        if layer.is_packed:
            integers, zero = self._unpacked(layer)
            size = attributes_of(layer.holder)["block_size"]
            scale = self._array(layer.holder.input[2]).reshape(len(integers), -1)
            along = np.repeat(scale, size, axis=1)[:, : layer.source.inputs].T[None]
            return found, WeightGrid(integers[:, : layer.source.inputs].T[None].astype(np.float32) - zero, along)
        integers, scale, *zeros = (self._array(name) for name in layer.holder.input)
        groups = layer.source.groups
        along, *offsets = (one.reshape(1 if one.size == 1 else groups, 1, -1) for one in (scale, *zeros))
        nearest = _matrix(layer.before, integers).astype(np.float32)
        return found, WeightGrid(nearest - offsets[0] if offsets else nearest, along)

    def _stored(self, layer: _Layer, integers: Array) -> Array:
        """The constant for ``integers``, which have the shape and the zero point of the grid."""
        if layer.is_packed:
            found, zero = self._unpacked(layer)
            found[:, : layer.source.inputs] = integers[0].T.astype(np.int16) + zero
            packed = found if zero == _MIDDLE else found[:, ::2] | (found[:, 1::2] << 4)
            return packed.reshape(self._array(layer.constant).shape)
        made = self._array(layer.constant).copy()
        zeros = [self._array(name) for name in layer.holder.input[2:]]
        offset = zeros[0].reshape(1 if zeros[0].size == 1 else layer.source.groups, 1, -1) if zeros else 0
        _matrix(layer.before, made)[...] = integers + offset
        return made

    def _unpacked(self, layer: _Layer) -> tuple[Array, int]:
        """A copy of the integers of a MatMulNBits, uint8 [outputs, inputs], and their zero point."""
        packed = self._array(layer.constant)
        packed = packed.reshape(len(packed), -1)
        if attributes_of(layer.holder)["bits"] == 8:
            return packed.copy(), _MIDDLE
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1), 8

    def _array(self, name: str) -> Array:
        return array_of(self._tensors[name])


def _matrix(node: onnx.NodeProto, array: Array) -> Array:
    """A view of ``array``, the weight of ``node``, with shape (groups, inputs, outputs)."""
    form = linear_form(node.op_type, attributes_of(node).get)
    assert form is not None
    if node.op_type == "Conv":
        return array.reshape(form.groups, len(array) // form.groups, -1).swapaxes(1, 2)
    return np.moveaxis(array, form.inputs, 0)[None]


def _parts(layers: Sequence[_Layer], memory_bytes: int) -> Iterator[list[_Layer]]:
    """The layers in groups whose moments fit in ``memory_bytes``. Layers that do not fit alone are left out."""
    part: list[_Layer] = []
    sources: set[LayerInput] = set()
    for layer in layers:
        if _COPIES * layer.source.moment_bytes > memory_bytes:
            continue
        if _COPIES * sum(one.moment_bytes for one in sources | {layer.source}) > memory_bytes:
            yield part
            part, sources = [], set()
        part.append(layer)
        sources.add(layer.source)
    if part:
        yield part
