"""Read an artifact as an ``onnx_ir`` model, and write it back."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from penstock.artifact import TITLES, Artifact, Format
from penstock.errors import InvalidModel, Unsupported
from penstock.offline.model_store import remembered
from penstock.protocol.onnx_scan import has_external_data

_LIMIT_BYTES = 2 << 30
_MAP_TYPE = "map type"
"""Key under which a value keeps its ONNX type if that is of maps."""
_EXPORT_AGAIN = "export the model again, or fetch it again if it was downloaded"


def load_model(artifact: Artifact) -> ir.Model:
    """Load the model of ``artifact`` with its external data from the folder of ``artifact.path``.

    Before IR version 4, a model had to list initialisers as inputs; such inputs are removed. Raises InvalidModel if the bytes
    are corrupt, ``onnx.checker`` rejects the model, or external data is missing or outside the model's folder. Raises Unsupported
    for models over 2 GiB and for sparse initialisers.
    """
    return from_proto(read_proto(artifact))


def read_proto(artifact: Artifact) -> onnx.ModelProto:
    """Read and check the protobuf of ``artifact``, with its external data. The caller may change the result.

    Raises the errors of ``load_model``.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(remembered("parse", (artifact.digest, artifact.path), lambda: _parse(artifact), artifact.size_bytes))
    return proto


def _parse(artifact: Artifact) -> onnx.ModelProto:
    if artifact.format is not Format.ONNX:
        raise Unsupported(
            f"the model's format is {TITLES[artifact.format]}, but only ONNX models can be optimised and compressed",
            "export the model as ONNX; `penstock serve` runs it as it is",
        )
    if artifact.size_bytes >= _LIMIT_BYTES:
        raise _too_large(artifact.size_bytes)
    try:
        proto = onnx.load_model_from_string(artifact.data)
    except DecodeError as error:
        raise InvalidModel("the file is not an ONNX model, or it is truncated or corrupt", _EXPORT_AGAIN) from error
    _embed_external_data(proto, artifact.path)
    if proto.graph.sparse_initializer:
        raise Unsupported("the model has sparse initialisers", "export it with dense weights")
    try:
        onnx.checker.check_model(proto)
    except Exception as error:  # the checker raises ValidationError and, on bad fields, ValueError
        raise InvalidModel(f"onnx.checker rejects the model: {_first_line(error)}", _EXPORT_AGAIN) from error
    if proto.ir_version < 4:
        _drop_initializers_from_inputs(proto.graph)
        proto.ir_version = 4
    return proto


def infer_shapes(proto: onnx.ModelProto) -> ir.Model:
    """Add the types and shapes that ONNX shape inference finds. If inference fails, nothing is added."""
    # Shapes are optional: a rule that needs a shape skips nodes with an unknown shape.
    with contextlib.suppress(Exception):
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    return from_proto(proto)


def self_contained(artifact: Artifact) -> Artifact:
    """Merge ``artifact`` and its external weights into one file. Raises the errors of ``read_proto``."""
    proto = read_proto(artifact)
    if not has_external_data(artifact.data):
        return artifact
    return artifact.derive(bytes(proto.SerializeToString(deterministic=True)), "embed", {}, {})


def to_bytes(model: ir.Model) -> bytes:
    """The serialised protobuf of ``to_proto``. Equal models give equal bytes."""
    return bytes(to_proto(model).SerializeToString(deterministic=True))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The protobuf of ``model``. Types and shapes of initialisers are left out, since the tensors contain them."""
    proto: onnx.ModelProto = ir.to_proto(model)
    for value, output in zip(model.graph.outputs, proto.graph.output, strict=True):
        if _MAP_TYPE in value.meta:
            output.type.CopyFrom(value.meta[_MAP_TYPE])
    infos = [value for value in proto.graph.value_info if value.name not in model.graph.initializers]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)
    return proto


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """The model of ``proto``. An output of maps, such as that of a classifier with ZipMap, has no type in it: ``onnx_ir`` has none for
    maps, so ``to_proto`` restores it. Raises InvalidModel.
    """
    maps = {value.name: value.type for value in proto.graph.output if _has_map(value.type)}
    if maps or any(_has_map(value.type) for value in proto.graph.value_info):
        original, proto = proto, onnx.ModelProto()
        proto.CopyFrom(original)
        for value in (*proto.graph.output, *proto.graph.value_info):
            if _has_map(value.type):
                value.ClearField("type")
    try:
        model: ir.Model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many kinds
        raise InvalidModel(f"the model cannot be read: {_first_line(_innermost(error))}", _EXPORT_AGAIN) from error
    for value in model.graph.outputs:
        if value.name in maps:
            value.meta[_MAP_TYPE] = maps[value.name]
    return model


def _has_map(kind: onnx.TypeProto) -> bool:
    """True if ``kind`` is a map, or a sequence or an optional of maps."""
    held = kind.WhichOneof("value")
    return held == "map_type" or (
        held in ("sequence_type", "optional_type") and _has_map(getattr(kind, held).elem_type)
    )


def _innermost(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _innermost(error.__cause__)


def _embed_external_data(proto: onnx.ModelProto, path: Path | None) -> None:
    tensors = [tensor for tensor in tensors_of(proto) if uses_external_data(tensor)]
    if not tensors:
        return
    if path is None:
        raise InvalidModel(
            "the model has weights in external files, but its own path is not known",
            "load it from its file, or save it with the weights in the same file",
        )
    folder = path.parent.resolve()
    size = proto.ByteSize()
    for tensor in tensors:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder):
            raise InvalidModel(
                f"external data of '{tensor.name}' is outside the model's folder: '{location}'",
                "save the weights in the model's folder",
            )
        if not file.is_file():
            raise InvalidModel(
                f"external data file '{location}' of '{tensor.name}' is missing", "put it in the model's folder"
            )
        length = entries.get("length", "")
        size += int(length) if length.isdigit() else file.stat().st_size
        if size >= _LIMIT_BYTES:
            raise _too_large(size)
        try:
            load_external_data_for_tensor(tensor, str(folder))
        except Exception as error:  # offsets beyond the file, unreadable files
            raise InvalidModel(
                f"external data of '{tensor.name}' cannot be read: {_first_line(error)}", _EXPORT_AGAIN
            ) from error


def tensors_of(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Every initialiser and tensor attribute of the model, including those of subgraphs and functions."""
    found = list(proto.graph.initializer)
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while nodes:
        for attribute in nodes.pop().attribute:
            found += [attribute.t] if attribute.HasField("t") else attribute.tensors
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                found += graph.initializer
                nodes += graph.node
    return found


def _drop_initializers_from_inputs(graph: onnx.GraphProto) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)


def _too_large(size_bytes: int) -> Unsupported:
    return Unsupported(
        f"the model has {size_bytes / (1 << 30):.1f} GiB, but an ONNX file can hold at most 2 GiB",
        "export it in FP16 or in parts",
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:400] or type(error).__name__
