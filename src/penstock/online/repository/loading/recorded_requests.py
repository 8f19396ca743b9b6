"""Stores requests in files: a header line with the length of the JSON, then an HTTP body with binary tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.errors import InvalidArgument, NotFound, PenstockError
from penstock.request import MAX_PARAMETERS, InferRequest, check_bytes_elements
from penstock.storage.base import Storage
from penstock.tensor import DataType, element_count, from_wire, to_wire

SUFFIX = ".request"
MAX_BYTES = 64 << 20
"""Maximum bytes of one file. All files that a server records for one model version have the same limit in total."""
_HEADER = b"Inference-Header-Content-Length: "
_MAX_HEADER = len(_HEADER) + 10
_MAX_FILES = 1000
_MAX_NAME = 255


class _Size(msgspec.Struct, forbid_unknown_fields=True):
    binary_data_size: int


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    datatype: DataType
    shape: list[int]
    parameters: _Size


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[_Tensor]
    parameters: dict[str, str | int | float | bool] = {}


_decode_head = msgspec.json.Decoder(_Head).decode


def encode(request: InferRequest) -> bytes:
    """Encode ``request`` for a file. Only parameters that are text, numbers or booleans are kept."""
    tensors, data = [], []
    for name, array in request.inputs.items():
        data.append(to_wire(array))
        tensors.append(_Tensor(name, DataType.from_numpy(array.dtype), list(array.shape), _Size(len(data[-1]))))
    parameters = {name: value for name, value in request.parameters.items() if isinstance(value, str | int | float)}
    head = msgspec.json.encode(_Head(tensors, parameters))
    return b"".join([_HEADER, b"%d\n" % len(head), head, *data])


def decode(content: bytes, model_name: str) -> InferRequest:
    """Decode the request in ``content``; its inputs are views of ``content``. Raises InvalidArgument."""
    line, newline, _ = content[: _MAX_HEADER + 1].partition(b"\n")
    number, body = line.removeprefix(_HEADER), memoryview(content)[len(line) + 1 :]
    if not newline or number == line or not number.isdigit():
        raise InvalidArgument(f"it must begin with '{_HEADER.decode()}' and a number")
    start = int(number)
    if start > len(body):
        raise InvalidArgument(f"its header declares {start} bytes of JSON, but only {len(body)} follow")
    try:
        head = _decode_head(body[:start])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"its JSON does not describe a request with binary inputs: {error}") from None
    if len(head.parameters) > MAX_PARAMETERS:
        raise InvalidArgument(f"it has {len(head.parameters)} parameters, more than {MAX_PARAMETERS}")
    request = InferRequest(model_name, {}, parameters=dict(head.parameters))
    elements = 0
    for tensor in head.inputs:
        elements += element_count(tensor.shape) if tensor.datatype is DataType.BYTES else 0
        check_bytes_elements(elements)
        end = start + tensor.parameters.binary_data_size
        if not start <= end <= len(body) or tensor.name in request.inputs:
            raise InvalidArgument(f"its input '{tensor.name}' appears twice, or declares more bytes than follow")
        request.inputs[tensor.name] = from_wire(body[start:end], tensor.datatype, tensor.shape)
        start = end
    if start != len(body):
        raise InvalidArgument(f"it has {len(body) - start} bytes after its last input")
    return request


def folder_of(root: str, model_name: str) -> Path:
    """The folder in ``root`` with the recorded requests of a model. Its name is the percent-encoded model name. A long name is
    truncated and ends with a digest.
    """
    name = quote(model_name, safe="").replace(".", "%2E")
    if len(name) > _MAX_NAME:
        digest = hashlib.blake2b(model_name.encode(), digest_size=16).hexdigest()
        name = f"{name[: _MAX_NAME - len(digest) - 1]}-{digest}"
    return Path(root) / name


def read_recorded(storage: Storage, model_name: str) -> Iterator[tuple[str, InferRequest | PenstockError]]:
    """The file names of a model's requests in ``storage``, each with the request, or with the error if the request is unreadable."""
    try:
        names = [entry.name for entry in storage.list() if entry.name.endswith(SUFFIX)]
    except NotFound:
        return
    for name in names[:_MAX_FILES]:
        try:
            yield name, decode(storage.read(name, 2 * MAX_BYTES), model_name)
        except PenstockError as error:
            yield name, error
