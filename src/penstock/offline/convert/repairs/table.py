"""``repair``: removes the known faults of an ONNX model, before anything checks or runs it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import onnx
from google.protobuf.message import DecodeError

from penstock.artifact import Artifact, digest_of_all, sha256
from penstock.errors import InvalidModel
from penstock.offline.convert.repairs import (
    branches,
    flat_groups,
    group_normalization,
    imports,
    ir_version,
    locale,
    node_names,
    node_order,
    upsample,
    value_info,
)

_REPAIRS: tuple[Callable[[onnx.ModelProto], str], ...] = (
    ir_version.repair,
    imports.repair,
    node_order.repair,
    node_names.repair,
    branches.repair,
    upsample.repair,
    group_normalization.repair,
    flat_groups.repair,
    locale.repair,
    value_info.repair,  # last, because it infers the types of the repaired graph
)
"""Each function removes one fault in place and returns a text about it, or an empty text if the model does not have the fault."""


def repair(artifact: Artifact) -> tuple[Artifact, tuple[str, ...]]:
    """Remove the known faults of ``artifact``. Returns the result and a text for each repair. Raises InvalidModel.

    External data is neither read nor changed.
    """
    try:
        proto = onnx.load_model_from_string(artifact.data)
    except DecodeError as error:
        raise InvalidModel("the file is not an ONNX model, or it is truncated or corrupt", "export it again") from error
    done = tuple(text for text in (one(proto) for one in _REPAIRS) if text)
    if not done:
        return artifact, ()
    data = proto.SerializeToString(deterministic=True)
    digest = digest_of_all(artifact.file_name, sha256(data), artifact.beside)
    path = artifact.path if artifact.beside else None  # the files beside it are still needed
    return msgspec.structs.replace(artifact, data=data, digest=digest, path=path), done
