"""Models of any size: the large tensors of a model that exceeds protobuf's limit stay in files, and are mapped into memory.

Such a tensor is *mapped*: its external data has an absolute location, so it does not depend on a folder. ``array_of`` reads a tensor
of either kind. ``artifact_of`` writes a model of any size. Only initialisers of the main graph are mapped.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError, Message
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact, FileEntry, Format, digest_of_all, sha256, sha256_of_file
from penstock.errors import ResourceExhausted, Unsupported
from penstock.tensor import Array

LIMIT_BYTES = (2 << 30) - (64 << 20)
"""Models whose tensors together have this size or more are written with external data. Protobuf's limit is 2 GiB, with the graph."""
LEAST_BYTES = 1 << 20
"""Smaller tensors are never mapped. Shape inference needs some of them."""
_DATA = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")
_BITS = {int(one): one.bitwidth for one in ir.DataType if one not in (ir.DataType.UNDEFINED, ir.DataType.STRING)}
_ALIGNMENT = 4096
_BLOCK_ELEMENTS = 1 << 22
_USED_SHARE = 0.95
"""A model shares the file of another model's weights if it uses at least this part of the file."""
_MAIN, WEIGHTS = "model.onnx", "model.onnx.data"


class Scratch:
    """A temporary folder with the weights of one or several models. It is removed when this object is, or when the process ends."""

    def __init__(self, external: Iterable[tuple[Array, TensorProto]]) -> None:
        """Write the arrays of ``external``, and give the tensors their places. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix="penstock-weights-")).resolve()
        weakref.finalize(self, _remove, self.path, os.getpid())
        with (self.path / WEIGHTS).open("wb") as file:
            for array, tensor in external:
                file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
                map_tensor(tensor, WEIGHTS, file.tell())
                np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
        digest, size = sha256_of_file(self.path / WEIGHTS)
        self.weights = FileEntry(WEIGHTS, size, digest)
        self._numbers = itertools.count()
        _scratches[str(self.path / WEIGHTS)] = self

    def add(self, model: bytes) -> Artifact:
        """The artifact of a model that has these weights. Raises OSError."""
        path = self.path / f"{next(self._numbers)}-{_MAIN}"
        path.write_bytes(model)
        beside = (self.weights,)
        digest = digest_of_all(_MAIN, sha256(model), beside)
        return Artifact(model, Format.ONNX, digest, path, name=_MAIN, beside=beside, keeps=self)


_scratches: weakref.WeakValueDictionary[str, Scratch] = weakref.WeakValueDictionary()
"""Each folder, by the path of its weights."""


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)


def size_of(tensor: TensorProto) -> int:
    """The size of the tensor's data in bytes, 0 for strings."""
    bits: int = math.prod(tensor.dims) * _BITS.get(tensor.data_type, 0)
    return -(-bits // 8)


def is_large(tensor: TensorProto) -> bool:
    """True if ``tensor`` is mapped in a model that exceeds the limit."""
    return size_of(tensor) >= LEAST_BYTES and _BITS[tensor.data_type] >= 8


def is_mapped(tensor: TensorProto) -> bool:
    """True if the data of ``tensor`` is in a file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def exceeds_limit(proto: onnx.ModelProto) -> bool:
    """True if the initialisers of ``proto`` are too large for one file."""
    return sum(map(size_of, proto.graph.initializer)) >= LIMIT_BYTES


def map_tensor(tensor: TensorProto, file: str, offset: int) -> None:
    """Give ``tensor`` the data at ``offset`` of ``file``."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", file), ("offset", offset), ("length", size_of(tensor))):
        tensor.external_data.add(key=key, value=str(value))


def array_of(tensor: TensorProto) -> Array:
    """The values of ``tensor``, read-only."""
    if not is_mapped(tensor):
        return np.asarray(numpy_helper.to_array(tensor))
    file, offset = _place(tensor)
    data = np.memmap(file, np.uint8, "r", offset, (size_of(tensor),))
    array: Array = np.asarray(data).view(helper.tensor_dtype_to_np_dtype(tensor.data_type)).reshape(tuple(tensor.dims))
    return array


def tensor_of(array: Array, name: str) -> TensorProto:
    """The tensor of ``array``. It is mapped if ``array`` is a part of a mapped tensor, with the same order of elements."""
    base: object = array
    while not isinstance(base, np.memmap) and isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, np.memmap) or not array.flags.c_contiguous or not array.size:
        return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
    map_tensor(tensor, str(base.filename), base.offset + array.ctypes.data - base.ctypes.data)
    return tensor


def row_slices(array: Array) -> Iterator[slice]:
    """Slices of the first axis that together cover ``array``, for calculations that need little memory."""
    rows = max(1, _BLOCK_ELEMENTS * len(array) // max(1, array.size))
    return (slice(start, start + rows) for start in range(0, len(array), rows))


def replace_data(tensor: TensorProto, data: bytes) -> None:
    """Give ``tensor`` other values of the same type and shape."""
    for field in (*_DATA, "data_location"):
        tensor.ClearField(field)
    tensor.raw_data = data


def artifact_of(proto: onnx.ModelProto) -> Artifact:
    """The artifact of ``proto``, which stays unchanged. A large model is written to a temporary folder that lives as long as the
    artifact. Raises ResourceExhausted, Unsupported.
    """
    is_small = not exceeds_limit(proto)
    if is_small and not any(map(is_mapped, proto.graph.initializer)):
        return Artifact.from_bytes(_serialized(proto))
    made = _light(proto)
    pairs = zip(proto.graph.initializer, made.graph.initializer, strict=True)
    external = ((array_of(before), tensor) for before, tensor in pairs if is_mapped(tensor))
    if is_small:
        for array, tensor in external:
            replace_data(tensor, array.tobytes())
        return Artifact.from_bytes(_serialized(made))
    try:
        scratch = _holder(proto)
        if scratch is None:
            scratch = Scratch(external)
        else:
            for tensor in filter(is_mapped, made.graph.initializer):
                map_tensor(tensor, WEIGHTS, _place(tensor)[1])
        return scratch.add(_serialized(made))
    except OSError as error:
        hint = "free some space, or set TMPDIR to a folder with more"
        raise ResourceExhausted(f"cannot write the model's weights: {error.strerror or error}", hint) from error


def are_equal(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """True if the models are equal. The places of mapped tensors do not matter."""
    return bool(_hashed(one) == _hashed(other))


def with_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """``proto`` with its mapped tensors as inputs, for functions of ``onnx`` that cannot read them."""
    if not any(map(is_mapped, proto.graph.initializer)):
        return proto
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    del made.graph.initializer[:]
    given = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        if not is_mapped(tensor):
            made.graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in given:
            made.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return made


def _hashed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``proto`` that has digests instead of large tensors; ``proto`` itself if it has none."""
    if not any(is_large(tensor) or is_mapped(tensor) for tensor in proto.graph.initializer):
        return proto
    made = _light(proto)
    for before, tensor in zip(proto.graph.initializer, made.graph.initializer, strict=True):
        if is_mapped(tensor):
            data = np.ascontiguousarray(array_of(before)).reshape(-1).view(np.uint8)
            replace_data(tensor, hashlib.sha256(data.data).digest())
    return made


def _place(tensor: TensorProto) -> tuple[str, int]:
    """The file and the offset of a mapped tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries["offset"])


def _holder(proto: onnx.ModelProto) -> Scratch | None:
    """The folder that holds all large weights of ``proto``, and little else."""
    large = [tensor for tensor in proto.graph.initializer if is_large(tensor) or is_mapped(tensor)]
    files = {_place(tensor)[0] if is_mapped(tensor) else "" for tensor in large}
    scratch = _scratches.get(files.pop()) if len(files) == 1 else None
    used = sum(map(size_of, large))
    return scratch if scratch is not None and used >= _USED_SHARE * scratch.weights.size_bytes else None


def _light(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of ``proto`` whose large initialisers are external, and empty unless they are mapped."""
    made = onnx.ModelProto()
    _copy(proto, made, ("graph",))
    _copy(proto.graph, made.graph, ("initializer",))
    for tensor in proto.graph.initializer:
        copied = made.graph.initializer.add()
        if is_large(tensor) and not is_mapped(tensor):
            _copy(tensor, copied, _DATA)
            copied.data_location = TensorProto.EXTERNAL
        else:
            copied.CopyFrom(tensor)
    return made


def _copy(one: Message, other: Message, left_out: Collection[str]) -> None:
    """Copy the fields of ``one`` to ``other``, except those named in ``left_out``."""
    for field, value in one.ListFields():
        if field.name in left_out:
            continue
        if hasattr(value, "MergeFrom"):  # a message or a repeated field
            getattr(other, field.name).MergeFrom(value)
        else:
            setattr(other, field.name, value)


def _serialized(proto: onnx.ModelProto) -> bytes:
    try:
        return bytes(proto.SerializeToString(deterministic=True))
    except (EncodeError, ValueError) as error:
        what = "the parts of the model that are no large weights exceed 2 GiB"
        raise Unsupported(what, "export it with fewer constants") from error
