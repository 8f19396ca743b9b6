"""Generate: inference in plain JSON, each input and output a member by its name; and the same as a stream of events.

A decoupled model gives any number of answers; ``generate`` wants exactly one of them, ``generate_stream`` sends each as an
event (server-sent events) as soon as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from penstock.errors import InvalidArgument, PenstockError, Unsupported
from penstock.online.repository.handle import Handle
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.codec.encoder import encode_error
from penstock.online.server.http.codec.json_tensor import from_json, to_json
from penstock.online.server.http.exchange import Exchange, as_error
from penstock.online.server.http.routes import Resource, Route
from penstock.request import MAX_PARAMETERS, InferRequest, InferResponse, Outcome, check_bytes_elements
from penstock.tensor import Array, Buffer, DataType, TensorSpec

_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Generation:
    """Answers ``generate`` and ``generate_stream``. Belongs to the event loop."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def resources(self) -> list[Resource]:
        path, schemas = "/v2/models/{model}/", ("GenerateResponse", "GenerateRequest")
        return [
            Resource(f"{path}generate", {b"POST": self.generate}, True, None, *schemas),
            Resource(f"{path}generate_stream", {b"POST": self.generate_stream}, True, None, *schemas),
        ]

    def generate(self, exchange: Exchange, route: Route) -> None:
        """Inference in plain JSON."""
        self._start(exchange, route, _Single(exchange))

    def generate_stream(self, exchange: Exchange, route: Route) -> None:
        """Generate, each answer as an event as soon as it is there."""
        self._start(exchange, route, _Events(exchange))

    def _start(self, exchange: Exchange, route: Route, done: Callable[[Outcome], None]) -> None:
        if exchange.head.json_length is not None:
            raise Unsupported("generate takes JSON only", "ask without the header Inference-Header-Content-Length")
        handle = self._dataplane.acquire(route.model, route.version, exchange.client)
        request = read_request(handle, exchange.body)
        exchange.body = b""
        exchange.introduce(request)
        exchange.pending = self._dataplane.infer(handle, request, done, decoupled=True)


def read_request(handle: Handle, body: Buffer) -> InferRequest:
    """Members named as inputs become these, ``id`` the request's id, all others parameters; so do those of ``parameters``.

    A value with fewer dimensions than its input gets leading ones of size 1. Raises InvalidArgument.
    """
    try:
        members = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the body is not a request to generate: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None
    nested = members.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidArgument("'parameters' must be an object")
    specs = {spec.name: spec for spec in handle.signature.inputs}
    request = InferRequest(handle.name, {}, handle.version, parameters={})
    if "id" not in specs:
        request.id = _id(members.pop("id", ""))
    for name, value in [*members.items(), *nested.items()]:
        if name in specs:
            if name in request.inputs:
                raise InvalidArgument(f"input '{name}' already exists in request")
            request.inputs[name] = _input(specs[name], value)
        elif isinstance(value, bool | int | float | str):
            request.parameters[name] = value
            if len(request.parameters) > MAX_PARAMETERS:
                raise InvalidArgument(f"there are more than the {MAX_PARAMETERS} parameters that are taken")
        else:
            raise InvalidArgument(
                f"'{name}' is no input of model '{handle.name}', and as a parameter it must be a number, a text, true or false",
                f"the inputs are {list(specs)}",
            )
    return request


def write_response(response: InferResponse) -> bytes:
    """One JSON object: names and id, then each output; one of a single element without brackets. Raises InvalidArgument."""
    known: dict[str, object] = {"id": response.id} if response.id else {}
    known |= {"model_name": response.model_name, "model_version": response.model_version}
    parts = [orjson.dumps(known)[1:-1]]
    for name, array in response.outputs.items():
        data = to_json(name, array)
        parts.append(b"%b:%b" % (orjson.dumps(name), data[1:-1] if array.size == 1 else data))
    return b"{%b}" % b",".join(parts)


class _Single:
    """The only answer, as JSON."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._answers: list[bytes] = []
        self._is_over = False

    def __call__(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        try:
            if isinstance(outcome, PenstockError):
                raise outcome
            if outcome.outputs:
                self._answers.append(write_response(outcome))
            if len(self._answers) > 1:
                raise _not_one("more")
            if outcome.final:
                if not self._answers:
                    raise _not_one("none")
                self._is_over = True
                self._exchange.reply(200, JSON, self._answers[0])
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave the client without an answer
            self._is_over = True
            self._exchange.fail_unexpected(error)
            self._exchange.cancel()


class _Events:
    """Each answer as an event. A failure before the first event sets the status; a later one is an event."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_begun = False
        self._is_over = False

    def __call__(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        exchange = self._exchange
        try:
            if isinstance(outcome, PenstockError):
                raise outcome
            if outcome.outputs:
                self._send(write_response(outcome))
            if outcome.final:
                self._is_over = True
                self._begin()
                exchange.sink.end_stream(exchange)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(as_error(error))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._exchange.sink.begin_stream(self._exchange, _EVENTS)

    def _send(self, data: bytes) -> None:
        self._begin()
        self._exchange.sink.send(self._exchange, b"data: %b\n\n" % data)

    def _fail(self, error: PenstockError) -> None:
        self._is_over = True
        if self._has_begun:
            self._send(encode_error(str(error)))
            self._exchange.sink.end_stream(self._exchange)
        else:
            self._exchange.fail(error)
        self._exchange.cancel()


def _id(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"'id' must be a text, not {value!r}")
    return value


def _input(spec: TensorSpec, value: Any) -> Array:
    values = value if isinstance(value, list) else [value]
    shape = _shape(value)
    shape = [1] * (len(spec.shape) - len(shape)) + shape
    if spec.datatype is DataType.BYTES:
        check_bytes_elements(math.prod(shape))
    return from_json(spec.name, spec.datatype.value, shape, values)


def _shape(value: Any) -> list[int]:
    """Of nested lists, by their first elements."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return shape


def _not_one(what: str) -> PenstockError:
    return InvalidArgument(
        f"generate expects model to produce exactly 1 response, and there were {what}",
        "use generate_stream for models that generate various number of responses",
    )
