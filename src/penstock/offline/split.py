"""Splits a model in two: the head runs on a device, and the tail on a server.

A cut is a tensor through which all data flow, so that only this tensor crosses the link. The choice is that of J. Kang and others,
"Neurosurgeon: collaborative intelligence between the cloud and mobile edge", ASPLOS 2017, with measured times instead of a model of
each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import onnx
from onnx import shape_inference

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument, Unsupported
from penstock.offline.optimize.names import reads
from penstock.offline.sessions import loaded
from penstock.offline.synthetic import synthesize
from penstock.perf.measure import feed, interleave
from penstock.tensor import Array, DataType, TensorSpec, to_wire

_MOST = 12
"""Cuts that are measured: those of least bytes, in different parts of the model."""


class NetworkLink(msgspec.Struct, frozen=True):
    """The link to the server, and the server."""

    mbits_per_s: float
    round_trip_ms: float
    server_speed: float
    """Speed of the server, as a multiple of this machine's."""

    def ms(self, size: int) -> float:
        """Milliseconds in which ``size`` bytes and the answer to them cross the link."""
        return self.round_trip_ms + size * 8 / (self.mbits_per_s * 1e3)


class Cut(msgspec.Struct, frozen=True):
    """One way to run a call. Times are in milliseconds."""

    tensor: str
    """The tensor that crosses the link; empty if the whole model runs on one side."""
    device_ms: float
    link_ms: float
    server_ms: float
    sent_bytes: int

    @property
    def total_ms(self) -> float:
        return self.device_ms + self.link_ms + self.server_ms


class ModelSplit(msgspec.Struct, frozen=True):
    """A model split at the best cut."""

    cuts: tuple[Cut, ...]
    """All ways that were measured, in the order of the model: first all on the server, last all on the device."""
    best: Cut
    head: Artifact | None
    tail: Artifact | None
    """The parts; None if the best way does not split the model."""


def cut_tensors(graph: onnx.GraphProto) -> list[str]:
    """The tensors through which all data flow, in order. The graph's inputs and outputs are not among them."""
    constant = {one.name for one in graph.initializer}
    inputs = {one.name for one in graph.input} - constant
    outputs = {one.name for one in graph.output}
    nodes = _varying(graph, inputs)
    last: dict[str, int] = {}
    for at, node in enumerate(nodes):
        for name in reads(node):
            last[name] = at
    live, found = {name for name in inputs if name in last}, list[str]()
    for at, node in enumerate(nodes):
        live = {name for name in live if last[name] > at or name in outputs}
        live |= {name for name in node.output if last.get(name, -1) > at or name in outputs}
        if len(live) == 1 and not live & (inputs | outputs) and live <= set(node.output):
            found += live
    return found


def cut_specs(artifact: Artifact) -> list[TensorSpec]:
    """The types of the tensors at which an ONNX model can be cut, in order. A size that the model does not tell is -1."""
    proto = onnx.load_model_from_string(artifact.data)
    typed = {one.name: one.type.tensor_type for one in shape_inference.infer_shapes(proto).graph.value_info}
    return [
        TensorSpec(
            name,
            DataType.from_onnx(typed[name].elem_type),
            tuple(one.dim_value if one.HasField("dim_value") else -1 for one in typed[name].shape.dim),
        )
        for name in cut_tensors(proto.graph)
        if name in typed
    ]


def _varying(graph: onnx.GraphProto, inputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes whose outputs depend on the inputs. All others can be in both parts."""
    known, found = set(inputs), []
    for node in graph.node:
        if reads(node) & known:
            known.update(node.output)
            found.append(node)
    return found


def parts(artifact: Artifact, tensor: str) -> tuple[Artifact, Artifact]:
    """The head and the tail of an ONNX model that is cut at ``tensor``. Raises InvalidArgument if not all data flow through it."""
    proto = onnx.load_model_from_string(artifact.data)
    if tensor not in (known := cut_tensors(proto.graph)):
        raise InvalidArgument(f"'{tensor}' is no tensor through which all data flow", f"cut at one of {known[:20]}")
    typed = shape_inference.infer_shapes(proto).graph
    info = next((one for one in typed.value_info if one.name == tensor), None)
    if info is None:
        raise Unsupported(f"the type of tensor '{tensor}' is unknown", "cut at another tensor")
    inputs = [one for one in proto.graph.input if one.name not in {given.name for given in proto.graph.initializer}]
    head = _part(proto, inputs, [info])
    tail = _part(proto, [info], list(proto.graph.output))
    return _derived(artifact, head, tensor, "head"), _derived(artifact, tail, tensor, "tail")


def _derived(artifact: Artifact, part: onnx.ModelProto, tensor: str, name: str) -> Artifact:
    return artifact.derive(part.SerializeToString(), "split", {"tensor": tensor, "part": name}, {})


def _part(
    proto: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """The nodes of ``proto`` that ``outputs`` need, up to ``inputs``."""
    given, needed, kept = {one.name for one in inputs}, {one.name for one in outputs}, []
    for node in reversed(proto.graph.node):
        if set(node.output) & needed - given:
            kept.append(node)
            needed |= reads(node)
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    for field in ("node", "input", "output", "initializer", "sparse_initializer", "value_info"):
        part.graph.ClearField(field)
    part.graph.node.extend(reversed(kept))
    part.graph.input.extend(inputs)
    part.graph.output.extend(outputs)
    part.graph.initializer.extend(one for one in proto.graph.initializer if one.name in needed)
    part.graph.sparse_initializer.extend(one for one in proto.graph.sparse_initializer if one.values.name in needed)
    return part


def split(artifact: Artifact, link: NetworkLink, threads: int = 1, at: str = "") -> ModelSplit:
    """Measure the cuts of ``artifact`` on this machine, and choose the one whose call takes least time over ``link``.

    With ``at``, only this cut is measured, besides both sides. Raises InvalidModel, InvalidArgument.
    """
    ((inputs,),) = synthesize(artifact, 1)
    whole, outputs = _timed(artifact, inputs, threads)
    sent, returned = _bytes(inputs), _bytes(outputs)
    cuts = [Cut("", 0.0, link.ms(sent + returned), whole / link.server_speed, sent)]
    for tensor in [at] if at else _candidates(artifact, inputs, threads):
        head, tail = parts(artifact, tensor)
        head_ms, between = _timed(head, inputs, threads)
        tail_ms, _ = _timed(tail, between, threads)
        crossing = _bytes(between)
        cuts.append(Cut(tensor, head_ms, link.ms(crossing + returned), tail_ms / link.server_speed, crossing))
    cuts.append(Cut("", whole, 0.0, 0.0, 0))
    best = next(one for one in cuts if one.tensor == at) if at else min(cuts, key=lambda one: one.total_ms)
    made = parts(artifact, best.tensor) if best.tensor else (None, None)
    return ModelSplit(tuple(cuts), best, *made)


def _candidates(artifact: Artifact, inputs: Mapping[str, Array], threads: int) -> list[str]:
    """The cuts of least bytes: of each stretch of the model, the one that sends least."""
    proto = onnx.load_model_from_string(artifact.data)
    names = cut_tensors(proto.graph)
    if not names:
        return []
    typed = {one.name: one for one in shape_inference.infer_shapes(proto).graph.value_info}
    names = [name for name in names if name in typed]
    watched = onnx.ModelProto()
    watched.CopyFrom(proto)
    watched.graph.output.extend(typed[name] for name in names)
    with loaded(artifact.derive(watched.SerializeToString(), "watched", {}, {}), threads) as model:
        values = model.forward(inputs)
    size = max(1, -(-len(names) // _MOST))
    stretches = [names[start : start + size] for start in range(0, len(names), size)]
    return [min(stretch, key=lambda name: _bytes({name: values[name]})) for stretch in stretches]


def _timed(artifact: Artifact, inputs: Mapping[str, Array], threads: int) -> tuple[float, dict[str, Array]]:
    """The median milliseconds of a call, and its outputs."""
    with loaded(artifact, threads) as model:
        outputs: dict[str, Any] = model.forward(inputs)
        timings = interleave({"call": feed(model, inputs)}, 0.1)
    return timings["call"].p50_ms, outputs


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(len(to_wire(array)) for array in arrays.values())
