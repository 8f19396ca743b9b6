"""TorchServe's inference API for models without a handler, and its health check.

A body contains the model's inputs as JSON, as raw tensors, or as text for a model that accepts text. Bodies that only a handler
could decode are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import orjson

from penstock.errors import InvalidArgument, Unavailable, Unsupported, quoted
from penstock.online.repository.handle import Handle
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.codec.decoder import whole_body
from penstock.online.server.http.dialects.multipart import read_parts
from penstock.online.server.http.dialects.nested import is_named, read_json, to_array, to_value, write_json
from penstock.online.server.http.dialects.predictions import unnamed
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.inference import Write, ask
from penstock.online.server.http.routes import Handler, Resource, Route
from penstock.online.server.to_thread import Steps
from penstock.tensor import Array, Buffer, DataType, TensorSpec

_RAW = b"application/octet-stream"
_FORM = b"multipart/form-data"
_JSON = b"application/json"
_PERHAPS_JSON = (b"", _JSON, b"application/x-www-form-urlencoded", b"text/plain")
"""Content types that clients send by default. The body may still be JSON."""
_HINT = "send its input as JSON lists, or as raw elements with 'Content-Type: application/octet-stream'"
_ONLY = ("data", "body")
"""Member names that clients may use in JSON for a single input."""
_ERRORS = {401: "InvalidKey", 403: "InvalidKey", 404: "ModelNotFound", 405: "MethodNotAllowed", 408: "RequestTimeout"}
_ERRORS |= {501: "UnsupportedOperation", 503: "ServiceUnavailable", 504: "RequestTimeout"}


class Unreadable(InvalidArgument):
    """Raised if only a handler could decode the body."""

    http_status = 415

    def __init__(self) -> None:
        super().__init__("the model has no handler to decode this body", _HINT)


def read(content_type: bytes, body: Buffer, inputs: Sequence[TensorSpec]) -> Steps[dict[str, Array]]:
    """The tensors in a request's body, by input name. Raises InvalidArgument, Unreadable."""
    if _media(content_type) != _FORM:
        return (yield from _read_body(content_type, body, inputs))
    yield 2 * len(body)  # the body in one piece, and its parts
    parts = read_parts(content_type, bytes(body))
    specs = {spec.name: spec for spec in inputs}
    if len(parts) == 1 and parts[0].name not in specs:
        return (yield from _read_body(parts[0].content_type, parts[0].content, inputs))
    arrays: dict[str, Array] = {}
    for name, kind, content in parts:
        if name not in specs or name in arrays:
            raise InvalidArgument(f"the part {quoted(name)} is repeated, or not an input of the model: {list(specs)}")
        arrays |= yield from _read_body(kind, content, [specs[name]])
    return arrays


def write(outputs: Mapping[str, Array], is_row: bool) -> bytes:
    """Encode a single output as a value, or several as an object. ``is_row`` removes the first dimension, which is 1."""
    if is_row and all(array.shape[:1] == (1,) for array in outputs.values()):
        outputs = {name: array.reshape(array.shape[1:]) for name, array in outputs.items()}
    return write_json(unnamed({name: to_value(name, array) for name, array in outputs.items()}))


def write_error(status: int, message: str) -> bytes:
    """Encode an error. ``type`` is the name of TorchServe's Java class."""
    kind = _ERRORS.get(status, "InternalServer" if status >= 500 else "BadRequest")
    return orjson.dumps({"code": status, "type": f"{kind}Exception", "message": message})


class TorchServe:
    """Handlers of TorchServe's inference API. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane, openapi: Handler) -> None:
        """``openapi`` answers with the OpenAPI description of the server."""
        self._dataplane = dataplane
        self._openapi = openapi

    def resources(self) -> list[Resource]:
        predict: dict[bytes, Handler] = {b"POST": self.predict, b"PUT": self.predict}
        versions = ("", "/{version}")
        return [
            _resource("/ping", {b"GET": self.ping}),
            _resource("/", {b"OPTIONS": self._openapi}),
            *[_resource(f"/predictions/{{model}}{one}", predict, "Anything") for one in versions],
            *[_resource(f"/explanations/{{model}}{one}", {b"POST": self.explain}, "Anything") for one in versions],
        ]

    def predict(self, exchange: Exchange, route: Route) -> None:
        """Inference with raw tensors, JSON or form data."""

        def read_body(handle: Handle, body: Buffer) -> Steps[tuple[Mapping[str, Array], Write]]:
            inputs = handle.signature.inputs
            arrays = yield from read(exchange.head.content_type, body, inputs)
            is_row = handle.config.batchable and all(
                arrays[spec.name].ndim == len(spec.shape) - 1 for spec in inputs if spec.name in arrays
            )
            if is_row:
                arrays = {name: array[None] for name, array in arrays.items()}
            return arrays, partial(write, is_row=is_row)

        find = partial(self._dataplane.acquire, route.model, route.version, exchange.client)
        ask(self._dataplane, exchange, find, read_body)

    def explain(self, exchange: Exchange, route: Route) -> None:
        """Not supported, because models have no explanation handler."""
        raise Unsupported(f"model {quoted(route.model)} has no explanation handler", "use '/predictions'")

    def ping(self, exchange: Exchange, route: Route) -> None:
        """200 when all models are loaded, else 503."""
        if not self._dataplane.is_open:
            raise Unavailable("Unhealthy: the server is starting or shutting down", "try again later")
        exchange.reply_json({"status": "Healthy"})


def _read_body(content_type: bytes, body: Buffer, inputs: Sequence[TensorSpec]) -> Steps[dict[str, Array]]:
    media = _media(content_type)
    only = inputs[0] if len(inputs) == 1 else None
    takes_text = only is not None and only.datatype is DataType.BYTES
    if only is not None and (media == _RAW or (takes_text and media != _JSON)):
        return {only.name: whole_body(only, body)}
    if media not in (*_PERHAPS_JSON, _RAW):
        raise Unreadable
    specs = {spec.name: spec for spec in inputs}
    if media == _RAW:
        raise _several(specs)
    try:
        value = yield from read_json(body)
    except InvalidArgument:
        if media == _JSON:
            raise
        raise Unreadable from None
    if is_named(value):
        if value.keys() <= specs.keys():
            return {name: to_array(specs[name], one) for name, one in value.items()}
        if only is None or len(value) != 1 or next(iter(value)) not in _ONLY:
            raise InvalidArgument(f"{list(value)[:8]} are not the model's inputs", f"its inputs are {list(specs)}")
        (value,) = value.values()
    if only is None:
        raise _several(specs)
    return {only.name: to_array(only, value)}


def _several(specs: Iterable[str]) -> InvalidArgument:
    return InvalidArgument(
        "the body has no input names, but the model has several inputs", f"send a JSON object with {list(specs)}"
    )


def _media(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _resource(path: str, handlers: dict[bytes, Handler], body: str = "") -> Resource:
    return Resource(path, handlers, error=write_error, answer="Anything", body=body)
