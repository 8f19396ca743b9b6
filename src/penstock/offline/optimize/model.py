"""Read an artifact as an ``onnx_ir`` model, and write it back."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from penstock.artifact import TITLES, Artifact, Format
from penstock.errors import InvalidModel, Unsupported
from penstock.offline.model_store import is_keeping, remembered
from penstock.offline.optimize.mapped import (
    WEIGHTS,
    artifact_of,
    exceeds_limit,
    is_large,
    is_mapped,
    map_tensor,
    size_of,
    with_inputs,
)
from penstock.protocol.onnx_scan import has_external_data
from penstock.storage.atomic import whole_file, write_whole

_NAMED = 3
_MAX_BYTES = 2 << 30
_MAP_TYPE = "map type"
"""Key under which a value keeps its ONNX type if that is of maps."""
_EXPORT_AGAIN = "export the model again, or fetch it again if it was downloaded"


def load_model(artifact: Artifact) -> ir.Model:
    """Load the model of ``artifact`` with its external data from the folder of ``artifact.path``.

    Before IR version 4, a model had to list initialisers as inputs; such inputs are removed. Raises InvalidModel if the bytes
    are corrupt, ``onnx.checker`` rejects the model, or external data is missing or outside the model's folder. Raises Unsupported
    for sparse initialisers, and if the main file has 2 GiB or more.
    """
    return from_proto(read_proto(artifact))


def read_proto(artifact: Artifact) -> onnx.ModelProto:
    """Read and check the protobuf of ``artifact``, with its external data. The caller may change the result.

    Large tensors are mapped (``mapped.py``) if the model exceeds the limit. Raises the errors of ``load_model``.
    """
    if not is_keeping():
        return _parse(artifact)
    proto = onnx.ModelProto()
    proto.CopyFrom(remembered("parse", (artifact.digest, artifact.path), lambda: _parse(artifact), artifact.size_bytes))
    return proto


def _parse(artifact: Artifact) -> onnx.ModelProto:
    if artifact.format is not Format.ONNX:
        raise Unsupported(
            f"the model's format is {TITLES[artifact.format]}, but only ONNX models can be optimised and compressed",
            "export the model as ONNX; `penstock serve` runs it as it is",
        )
    if len(artifact.data) >= _MAX_BYTES:
        raise Unsupported(
            f"the file has {len(artifact.data) / (1 << 30):.1f} GiB, but an ONNX file can hold at most 2 GiB",
            "export it with the weights in external files",
        )
    try:
        proto = onnx.load_model_from_string(artifact.data)
    except DecodeError as error:
        raise InvalidModel("the file is not an ONNX model, or it is truncated or corrupt", _EXPORT_AGAIN) from error
    _read_external_data(proto, artifact.path)
    if proto.graph.sparse_initializer:
        raise Unsupported("the model has sparse initialisers", "export it with dense weights")
    try:
        onnx.checker.check_model(with_inputs(proto))
    except Exception as error:  # the checker raises ValidationError and, on bad fields, ValueError
        raise InvalidModel(f"onnx.checker rejects the model: {_first_line(error)}", _EXPORT_AGAIN) from error
    if proto.ir_version < 4:
        _drop_initializers_from_inputs(proto.graph)
        proto.ir_version = 4
    return proto


def optional_inputs(proto: onnx.ModelProto) -> str:
    """Inputs with a default value, by name, at most three; empty if there are none."""
    weights = {tensor.name for tensor in proto.graph.initializer} if proto.ir_version >= 4 else set()
    found = [value.name for value in proto.graph.input if value.name in weights]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def infer_shapes(proto: onnx.ModelProto) -> ir.Model:
    """Add the types and shapes that ONNX shape inference finds. If inference fails, nothing is added."""
    # Shapes are optional: a rule that needs a shape skips nodes with an unknown shape.
    with contextlib.suppress(Exception):
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    return from_proto(proto)


def self_contained(artifact: Artifact) -> Artifact:
    """``artifact`` as one file, unless it exceeds the limit. Raises the errors of ``read_proto``."""
    proto = read_proto(artifact)
    if not has_external_data(artifact.data) or any(map(is_mapped, proto.graph.initializer)):
        return artifact
    return artifact.derive(artifact_of(proto), "embed", {}, {})


def save(artifact: Artifact, path: Path) -> None:
    """Write ``artifact`` to ``path``, and its weights to one file beside it if it exceeds the limit. Raises ResourceExhausted."""
    if artifact.beside and artifact.keeps is None:
        artifact = artifact_of(read_proto(artifact))
    if artifact.path is None or not artifact.beside:
        write_whole(path, artifact.data)
        return
    proto = onnx.load_model_from_string(artifact.data)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = weights_path(path).name if entry.key == "location" else entry.value
    with whole_file(weights_path(path)) as file, artifact.path.with_name(WEIGHTS).open("rb") as source:
        shutil.copyfileobj(source, file)
    write_whole(path, proto.SerializeToString(deterministic=True))


def check_one_file(artifact: Artifact, what: str) -> None:
    """Raise Unsupported if ``artifact`` exceeds the limit, because ``what`` needs a model in one file."""
    if self_contained(artifact).beside:
        raise Unsupported(
            f"the model has {artifact.size_bytes / (1 << 30):.1f} GiB, but {what} supports only models below 2 GiB",
            "make it smaller first, e.g. with penstock quantize --precision int8-weights",
        )


def weights_path(path: Path) -> Path:
    """The file with the large weights of a model that ``save`` writes to ``path``."""
    return path.with_name(f"{path.name}.data")


def to_artifact(model: ir.Model) -> Artifact:
    """The artifact of ``to_proto``. Equal models give equal bytes."""
    return artifact_of(to_proto(model))


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


def _read_external_data(proto: onnx.ModelProto, path: Path | None) -> None:
    """Map the large tensors if the model exceeds the limit, and embed the other external tensors."""
    # The list begins with the initialisers of the main graph.
    tensors = [(place, tensor) for place, tensor in enumerate(tensors_of(proto)) if uses_external_data(tensor)]
    if not tensors:
        return
    if path is None:
        raise InvalidModel(
            "the model has weights in external files, but its own path is not known",
            "load it from its file, or save it with the weights in the same file",
        )
    folder = path.parent.resolve()
    last = len(proto.graph.initializer) if exceeds_limit(proto) else 0
    for place, tensor in tensors:
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
        try:
            offset, size = int(entries.get("offset", 0)), file.stat().st_size
            length = int(entries.get("length", size - offset))
            if offset < 0 or length != size_of(tensor) or offset + length > size:
                raise ValueError(f"it takes {size_of(tensor)} bytes, but '{location}' has {length} at byte {offset}")
            if place < last and is_large(tensor):
                map_tensor(tensor, str(file), offset)
            else:
                load_external_data_for_tensor(tensor, str(folder))
        except Exception as error:  # invalid numbers, unreadable files
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


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:400] or type(error).__name__
