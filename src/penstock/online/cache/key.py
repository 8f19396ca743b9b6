"""The cache key of a request. A deterministic model returns equal responses to requests with equal keys.

The key is the SHA-256 of the following parts. The length of each part is included, so that the boundaries are unambiguous:

1. the model's identity and version;
2. the client, so that response times reveal nothing about other clients' requests;
3. each input, sorted by name: name, datatype, shape, and its bytes in the protocol's binary form;
4. the requested outputs in order, which is also the order of the response;
5. the parameters, except those that only affect scheduling or the encoding of the response.

The id, the priority and the timeout are not part of the key.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import numpy as np

from penstock.request import InferRequest
from penstock.tensor import Array, DataType, to_wire

_NOT_OF_THE_ANSWER = frozenset({"priority", "timeout", "binary_data_output", "binary_data_size"})
_COUNTS = struct.Struct("<IIII")
_CODES: dict[np.dtype[Any], bytes] = {datatype.dtype: b"%d " % number for number, datatype in enumerate(DataType)}
_PARAMETERS = msgspec.msgpack.Encoder(order="deterministic")
_NO_PARAMETERS = _PARAMETERS.encode({})


def model_prefix(identity: str, version: str) -> bytes:
    """The prefix that all keys of a model version share. ``identity`` identifies the model's content, e.g. by the digests of the
    bundle and the variant.
    """
    return hashlib.sha256(b"%d:%b%b" % (len(identity.encode()), identity.encode(), version.encode())).digest()


def cache_key(prefix: bytes, request: InferRequest) -> bytes | None:
    """The 32-byte key of ``request``, or None if a parameter has no canonical form. Inputs must have datatypes of the protocol."""
    parameters = _NO_PARAMETERS
    if request.parameters:
        counted = {name: value for name, value in request.parameters.items() if name not in _NOT_OF_THE_ANSWER}
        try:
            parameters = _PARAMETERS.encode(counted)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None
    inputs = request.inputs
    names = sorted(inputs) if len(inputs) > 1 else list(inputs)
    client = request.client.encode()
    parts = [prefix, _COUNTS.pack(len(client), len(names), len(request.outputs), len(parameters)), client, parameters]
    for output in request.outputs:
        _add_name(parts, output)
    data = []
    for name in names:
        array = inputs[name]
        wire = to_wire(array)
        _add_name(parts, name)
        # A closing bracket ends the shape, and a semicolon ends the length of the data.
        parts.append(b"%b%b%d;" % (_code(array), str(array.shape).encode(), len(wire)))
        data.append(wire)
    digest = hashlib.sha256(b"".join(parts))
    for wire in data:
        digest.update(wire)
    return digest.digest()


def _add_name(parts: list[bytes], name: str) -> None:
    encoded = name.encode()
    parts.append(b"%d:%b" % (len(encoded), encoded))


def _code(array: Array) -> bytes:
    code = _CODES.get(array.dtype)
    return _CODES[DataType.from_numpy(array.dtype).dtype] if code is None else code
