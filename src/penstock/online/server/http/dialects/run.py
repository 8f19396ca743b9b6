"""Runs pipelines over HTTP: ``POST .../run`` takes pictures, sound and text as clients have them, and answers with plain JSON.

The body is a form with a part for each input, the content of the only input, or a JSON object with text, numbers, and files in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import orjson

from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, Unsupported, quoted
from penstock.online.repository.handle import Handle
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.dialects.multipart import read_parts
from penstock.online.server.http.dialects.nested import is_named, read_json, to_array, write_json
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.inference import Write, ask
from penstock.online.server.http.routes import Resource, Route
from penstock.online.server.to_thread import Steps, beside
from penstock.pipeline.function import Function
from penstock.pipeline.value import Media, ValueType
from penstock.pipeline.wire import to_members
from penstock.tensor import Array, Buffer, DataType, TensorSpec

_FORM = b"multipart/form-data"
_JSON = b"application/json"
_CURL = b"application/x-www-form-urlencoded"
_SMALL_JSON = 64 << 10
_UNTYPED = (b"application/octet-stream", _CURL, b"")
"""Content types that clients send for any file."""
_HINT = "send a form, such as curl -F NAME=@FILE; the content of the only input; or JSON with 'Content-Type: application/json'"


class WrongMedia(InvalidArgument):
    """The body's media type does not fit the pipeline's input."""

    http_status = 415


class HttpRun:
    """Answers ``POST .../run``. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def resources(self) -> list[Resource]:
        path = "/v2/models/{model}/run"
        return [Resource(path, {b"POST": self.run}, versioned=True, answer="RunResponse", body="RunRequest")]

    def run(self, exchange: Exchange, route: Route) -> None:
        """Run a pipeline on pictures, sound or text."""

        def read_body(handle: Handle, body: Buffer) -> Steps[tuple[Mapping[str, Array], Write]]:
            function = handle.function
            if function is None:
                raise Unsupported(f"model {quoted(handle.name)} is not a pipeline", "use '/infer'")
            tensors = yield from read(exchange.head.content_type, body, function, handle.signature.inputs)
            return tensors, partial(write, function)

        find = partial(self._dataplane.acquire, route.model, route.version, exchange.client)
        ask(self._dataplane, exchange, find, read_body)


def write(function: Function, outputs: Mapping[str, Array]) -> bytes:
    """Encode the outputs as a JSON object."""
    return write_json(to_members(function, outputs))


def read(
    content_type: bytes, body: Buffer, function: Function, specs: tuple[TensorSpec, ...]
) -> Steps[dict[str, Array]]:
    """The tensors in a request's body, by input name. Raises InvalidArgument, WrongMedia."""
    media = content_type.partition(b";")[0].strip().lower()
    if media == _JSON:
        return (yield from _read_json(body, function, specs))
    if media != _FORM:
        if len(specs) != 1:
            raise InvalidArgument("the body has no input names, but the pipeline has several inputs", _HINT)
        return {specs[0].name: (yield from _content(function, specs[0], media, body))}
    yield 2 * len(body)  # the body in one piece, and its parts
    by_name, tensors = {spec.name: spec for spec in specs}, dict[str, Array]()
    for name, kind, content in read_parts(content_type, bytes(body)):
        spec = _named(by_name, name)
        if name in tensors:
            raise InvalidArgument(f"the form has two parts called {quoted(name)}")
        read_one = _content(function, spec, kind.partition(b";")[0].strip().lower(), content)
        tensors[name] = yield from beside(len(body), read_one)
    return tensors


def _content(function: Function, spec: TensorSpec, media: bytes, content: Buffer) -> Steps[Array]:
    """The tensor of one input, from content of type ``media``."""
    kind = function.inputs[spec.name]
    family = media.partition(b"/")[0].decode(errors="replace")
    if kind.datatype is not DataType.BYTES or kind.media is Media.TENSOR or kind.many:
        try:
            value = yield from read_json(content)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"input {quoted(spec.name)} is {kind}, and its content is not JSON: {error.message}",
                "write it as JSON lists",
            ) from None
        return _numbers(spec, kind, value)
    wanted = kind.media.value
    if media not in _UNTYPED and kind.media is not Media.FILE and family != wanted:
        raise WrongMedia(
            f"input {quoted(spec.name)} is {wanted}, but the content type is '{media.decode(errors='replace'):.80}'",
            _HINT,
        )
    # No picture and no sound begins with a brace.
    is_json = content[:1] == b"{" if kind.media is not Media.TEXT else _is_json_object(content)
    if media == _CURL and is_json and kind.media is not Media.FILE:
        also = ", or 'text/plain' if the text itself is JSON" if kind.media is Media.TEXT else ""
        raise WrongMedia(
            f"the body is a JSON object, but the content type is '{_CURL.decode()}', which curl -d sends",
            f"send 'Content-Type: application/json'{also}",
        )
    yield len(content)
    return _one(bytes(content))


def _is_json_object(content: Buffer) -> bool:
    """True if ``content`` is a JSON object of at most 64 KiB."""
    if len(content) > _SMALL_JSON or bytes(content[:1]) != b"{":
        return False
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def _read_json(body: Buffer, function: Function, specs: tuple[TensorSpec, ...]) -> Steps[dict[str, Array]]:
    value: Any = yield from read_json(body)
    if not is_named(value):
        raise InvalidArgument("the body is not a JSON object", f'write e.g. {{"{specs[0].name}": …}}')
    by_name = {spec.name: spec for spec in specs}
    return {name: _from_json(function, _named(by_name, name), one) for name, one in value.items()}


def _from_json(function: Function, spec: TensorSpec, value: Any) -> Array:
    kind = function.inputs[spec.name]
    if kind.datatype is not DataType.BYTES or kind.media is Media.TENSOR or kind.many:
        return _numbers(spec, kind, value)
    if not isinstance(value, str):
        what = "text" if kind.media is Media.TEXT else "a file in base64"
        raise InvalidArgument(f"input {quoted(spec.name)} is {kind.media.value}", f"write {what} as a JSON string")
    if kind.media is Media.TEXT:
        return _one(value.encode())
    try:
        return _one(base64.b64decode(value.partition(";base64,")[2] or value, validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"input {quoted(spec.name)} is not valid base64: {error}", "encode the file") from None


def _numbers(spec: TensorSpec, kind: ValueType, value: Any) -> Array:
    """The tensor of the lists ``value``, in the form of answers: a scalar is a number, and an array without rows an empty list."""
    array = to_array(spec, value)
    if not kind.shape and not array.shape:
        return array.reshape(spec.shape)
    if array.shape == (0,) and spec.shape[:1] == (-1,):
        return array.reshape((0, *(max(0, size) for size in spec.shape[1:])))
    return array


def _named(specs: Mapping[str, TensorSpec], name: str) -> TensorSpec:
    if name not in specs:
        hint = did_you_mean(name, specs) or f"the inputs are {', '.join(specs)}"
        raise InvalidArgument(f"the pipeline has no input {quoted(name)}", hint)
    return specs[name]


def _one(content: bytes) -> Array:
    array = np.empty(1, np.object_)
    array[0] = content
    return array
