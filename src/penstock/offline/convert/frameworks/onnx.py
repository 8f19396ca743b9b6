"""ONNX: models of any opset since 7 are converted to a newer one, and compared with themselves in ONNX Runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from penstock.artifact import Artifact, Format, format_of, local_path
from penstock.engines.base import LoadedModel
from penstock.engines.custom_ops import custom_ops
from penstock.engines.registry import get_engine
from penstock.errors import InvalidArgument, PenstockError, Unsupported
from penstock.offline.convert.base import (
    RANDOM,
    Axis,
    ConvertOptions,
    Exported,
    FrameworkModel,
    TensorLink,
    UnsupportedOperator,
    UnsupportedOperators,
)
from penstock.offline.convert.declarations import check_inputs, chosen_outputs
from penstock.offline.convert.reading import read_file
from penstock.offline.convert.repairs import repair
from penstock.offline.convert.repairs.graphs import called_python_ops, nodes_of, opset_of
from penstock.offline.convert.upgrade import upgrade
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto, save
from penstock.tensor import Array, Signature

_OLDEST = 7
"""The oldest opset that ONNX Runtime runs."""
_OWN = ("com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc", "ai.onnx.training", "ai.onnx.preview.training")
"""Domains whose operators ``onnx`` does not know, but ONNX Runtime does."""
_AS_WRITTEN = {"threads": 1, "graph_level": "disabled", "arena": False}


class OnnxConverter:
    name = "onnx"
    version: str = onnx.__version__

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        custom_ops(options.ops)
        return OnnxSource(_artifact(source), options)


CONVERTER = OnnxConverter()


class OnnxSource:
    """An ONNX model as the source: its own tensors are the expected values."""

    def __init__(self, given: Artifact, options: ConvertOptions) -> None:
        """Raises InvalidModel, InvalidArgument, Unsupported, UnsupportedOperators."""
        artifact, self._warnings = repair(given)
        self._proto = read_proto(artifact)
        version = opset_of(self._proto)
        if 0 < version < _OLDEST:
            hint = "export it again, or convert it with onnx.version_converter and compare the results"
            raise Unsupported(f"the model has opset {version}, but the oldest that runs is {_OLDEST}", hint)
        _check_operators(self._proto)
        _choose(self._proto, options)
        self._source, self._model = self._proto, _load(self._proto)
        if self._warnings and not given.beside:
            with contextlib.suppress(PenstockError):  # compare with the model as it was given, if it runs at all
                original = onnx.load_model_from_string(given.data)
                _choose(original, options)
                self._model, self._source = _load(original), original
        self._shown: tuple[frozenset[str], LoadedModel | None] = frozenset(), None
        self.signature: Signature = self._model.signature
        self.axes: Mapping[str, tuple[Axis, ...]] = {
            value.name: tuple(
                Axis(axis, dim.dim_param or f"{value.name}_{axis}")
                for axis, dim in enumerate(value.type.tensor_type.shape.dim)
                if not dim.HasField("dim_value")
            )
            for value in self._proto.graph.input
            if value.name in self.signature.input_names
        }

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._model.forward(inputs)

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        wanted, shown = self._shown
        if shown is None or not wanted.issuperset(names):
            if shown is not None:
                shown.unload()
            shown = _load(self._source, names)
            self._shown = frozenset(names), shown
        found = shown.forward(inputs)
        return {name: found[name] for name in names if name in found}

    def export(self, target: Path, opset: int) -> Exported:
        version = opset_of(self._proto)
        warnings = list(self._warnings)
        converted = upgrade(self._proto, opset)
        if version > opset:
            warnings.append(
                f"the opset is {version}, which is newer than {opset}; models are never converted to an older one"
            )
        save(artifact_of(converted), target)
        made = {name: node for node in self._source.graph.node for name in node.output if name}
        tensors = [name for node in converted.graph.node for name in node.output if name in made]
        links = [TensorLink(name, name, f"node '{made[name].name}' ({made[name].op_type})") for name in tensors]
        random = [
            f"{node.op_type} '{node.name or node.output[0]}'" for node in nodes_of(converted) if node.op_type in RANDOM
        ]
        exporter = "onnx.version_converter" if version < opset else "unchanged, onnx"
        needs = called_python_ops(converted)
        return Exported(
            f"{exporter} {onnx.__version__}", tuple(links), tuple(random), tuple(warnings), python_ops=needs
        )

    def close(self) -> None:
        self._model.unload()
        if self._shown[1] is not None:
            self._shown[1].unload()


def _choose(proto: onnx.ModelProto, options: ConvertOptions) -> None:
    """Keep the outputs, and set the dimensions, that the user chose. Raises InvalidArgument."""
    graph = proto.graph
    known = {value.name: value for value in (*graph.value_info, *graph.output)}
    made = {name for node in graph.node for name in node.output}
    if options.outputs:
        chosen_outputs(options, [*(value.name for value in graph.output), *(made | set(known))])
        chosen = [known.get(name) or onnx.ValueInfoProto(name=name) for name in options.outputs]
        copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in chosen]
        del graph.output[:]
        graph.output.extend(copies)
    values = {value.name: value.type.tensor_type for value in graph.input}
    check_inputs(options, values)
    for spec in options.inputs:
        _set_dimensions(spec.name, values[spec.name], dict(enumerate(spec.shape or ())), spec.shape)
    for name, axes in options.dynamic.items():
        _set_dimensions(name, values[name], axes)
    if options.inputs or options.dynamic:  # the shapes of the other tensors follow from those of the inputs
        del graph.value_info[:]
        for value in graph.output:
            # The rank stays, because inference ends at operators of the user.
            for dim in value.type.tensor_type.shape.dim:
                dim.Clear()


def _set_dimensions(
    name: str, tensor: onnx.TypeProto.Tensor, dims: Mapping[int, int | str], shape: Sequence[int | str] | None = None
) -> None:
    rank = len(tensor.shape.dim)
    if (shape and len(shape) != rank) or any(not 0 <= axis < rank for axis in dims):
        raise InvalidArgument(f"input '{name}' has {rank} dimensions", "give it the shape or the axes of the model")
    for axis, dim in dims.items():
        tensor.shape.dim[axis].Clear()
        setattr(tensor.shape.dim[axis], "dim_param" if isinstance(dim, str) else "dim_value", dim)


def _artifact(source: Any) -> Artifact:
    """The artifact of a path of any suffix, of bytes, or of a model in memory."""
    if isinstance(source, onnx.ModelProto):
        return artifact_of(source)
    if isinstance(source, bytes):
        return Artifact.from_bytes(source)
    path = local_path(source)
    if format_of(path) is Format.ONNX:
        return Artifact.from_file(path)
    return Artifact.from_bytes(read_file(path))


def _check_operators(proto: onnx.ModelProto) -> None:
    """Raises UnsupportedOperators with all operators that neither ONNX, ONNX Runtime, the model itself nor the user defines."""
    defined = {(one.domain, one.name) for one in proto.functions}
    defined |= {(one.domain, one.operator) for one in custom_ops() if one.form == "python"}
    found: dict[tuple[str, str], UnsupportedOperator] = {}
    for node in nodes_of(proto):
        key = node.domain, node.op_type
        if node.domain in _OWN or key in defined or onnx.defs.has(node.op_type, node.domain):
            continue
        title = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        way_out = (
            "add a function with this name to the model, export it again without the operator, or define the operator in a "
            "file for --ops with @penstock.register_op(..., form='python')"
        )
        found.setdefault(key, UnsupportedOperator(title, f"node '{node.name or node.output[0]}'", way_out))
    if found:
        raise UnsupportedOperators.of(tuple(found.values()))


def _load(proto: onnx.ModelProto, shown: Sequence[str] = ()) -> LoadedModel:
    """``proto`` in ONNX Runtime, which runs every node as it is written, with the tensors ``shown`` as further outputs."""
    whole = proto
    if shown:
        whole = onnx.ModelProto()
        whole.CopyFrom(proto)
        outputs = {value.name for value in proto.graph.output}
        made = {name for node in proto.graph.node for name in node.output} - outputs
        whole.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown if name in made)
    return get_engine("onnxruntime").load(artifact_of(whole), _AS_WRITTEN)
