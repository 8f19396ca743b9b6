"""The generate extension: inference with plain JSON objects that have a member for each input or output.

``generate`` requires exactly one response. ``generate_stream`` sends any number of responses as server-sent events.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.errors import InvalidArgument, PenstockError, ResourceExhausted, Unsupported
from penstock.online.repository.handle import Handle
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.codec import large_json
from penstock.online.server.http.codec.encoder import encode_error, in_one_step, is_light, weight
from penstock.online.server.http.codec.json_tensor import from_json, to_json
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.routes import Resource, Route
from penstock.online.server.status import as_error
from penstock.online.server.to_thread import Steps
from penstock.request import MAX_PARAMETERS, InferRequest, InferResponse, Outcome, check_bytes_elements
from penstock.tensor import Array, Buffer, DataType, TensorSpec

_EVENTS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
_decode = msgspec.json.Decoder().decode


class Generation:
    """Handlers of ``generate`` and ``generate_stream``. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def resources(self) -> list[Resource]:
        path, schemas = "/v2/models/{model}/", ("GenerateResponse", "GenerateRequest")
        return [
            Resource(f"{path}generate", {b"POST": self.generate}, True, None, *schemas),
            Resource(f"{path}generate_stream", {b"POST": self.generate_stream}, True, None, *schemas),
        ]

    def generate(self, exchange: Exchange, route: Route) -> None:
        """Inference with plain JSON."""
        self._start(exchange, route, _Single(exchange, self._dataplane.response_limit))

    def generate_stream(self, exchange: Exchange, route: Route) -> None:
        """Inference with plain JSON and server-sent events."""
        self._start(exchange, route, _Events(exchange, self._dataplane.response_limit))

    def _start(self, exchange: Exchange, route: Route, done: Callable[[Outcome], None]) -> None:
        if exchange.head.json_length is not None:
            raise Unsupported("generate accepts only JSON", "do not send the header Inference-Header-Content-Length")

        find = partial(self._dataplane.acquire, route.model, route.version, exchange.client)

        def start(request: InferRequest, is_late: bool) -> None:
            exchange.introduce(request)
            exchange.await_model(request.inputs)
            exchange.submit(self._dataplane, find() if is_late else handle, request, done, decoupled=True)

        handle = find()
        exchange.decode(partial(read_request, handle), start)


def read_request(handle: Handle, body: Buffer) -> Steps[InferRequest]:
    """Read a request. Members with the name of an input are inputs, ``id`` is the request id, and all other members are parameters.

    Members of ``parameters`` are treated like members of the body. A value with fewer dimensions than its input gets leading
    dimensions of size 1. Raises InvalidArgument.
    """
    try:
        members = yield from large_json.read(body, _decode)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidArgument(f"invalid generate request: {error}") from None
    except RecursionError:
        raise InvalidArgument("the body's JSON is nested too deeply") from None
    if not isinstance(members, dict):
        raise InvalidArgument("invalid generate request: the body must be a JSON object")
    nested = members.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidArgument("'parameters' must be an object")
    specs = {spec.name: spec for spec in handle.signature.inputs}
    request = InferRequest(handle.name, {}, handle.version, parameters={})
    if "id" not in specs:
        request.id = members.pop("id", "")
        if not isinstance(request.id, str):
            raise InvalidArgument(f"'id' must be a string, not {request.id!r}")
    for name, value in [*members.items(), *nested.items()]:
        if name in specs:
            if name in request.inputs:
                raise InvalidArgument(f"input '{name}' already exists in request")
            request.inputs[name] = _input(specs[name], value)
        elif isinstance(value, bool | int | float | str):
            request.parameters[name] = value
            if len(request.parameters) > MAX_PARAMETERS:
                raise InvalidArgument(f"the request has more than {MAX_PARAMETERS} parameters")
        else:
            raise InvalidArgument(
                f"'{name}' is not an input of model '{handle.name}', and a parameter must be a number, a string or a boolean",
                f"the inputs are {list(specs)}",
            )
    return request


def write_response(response: InferResponse) -> bytes:
    """Encode a response as a JSON object. Outputs of one element become scalars. Raises InvalidArgument."""
    known: dict[str, object] = {"id": response.id} if response.id else {}
    known |= {"model_name": response.model_name, "model_version": response.model_version}
    parts = [b"{", orjson.dumps(known)[1:-1]]
    for name, array in response.outputs.items():
        data = to_json(name, array)
        parts += (b",", orjson.dumps(name), b":", data[1:-1] if array.size == 1 else data)
    # Unlike string formatting, joining does not hold the interpreter lock while it copies large texts.
    return b"".join((*parts, b"}"))


class _Responses(ABC):
    """Receives the responses of one request."""

    _kept = 0
    """Bytes of encoded responses that are held until the last response."""

    def __init__(self, exchange: Exchange, limit: ResponseLimit) -> None:
        self._exchange = exchange
        self._limit = limit
        self._is_over = False
        self._waiting: deque[Outcome] = deque()
        self._waiting_bytes = 0

    def __call__(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        if not self._waiting and (isinstance(outcome, PenstockError) or is_light(outcome.outputs.values())):
            self._take(outcome)
            return
        # To keep the order, all responses that follow a large response wait until it is encoded.
        self._waiting.append(outcome)
        self._waiting_bytes += _size(outcome)
        if len(self._waiting) == 1:
            self._exchange.later(self._take_waiting())
        elif self._waiting_bytes > self._exchange.sink.context.config.max_unsent_bytes:
            self._take(ResourceExhausted("the model produces responses faster than the server can encode them"))

    async def _take_waiting(self) -> None:
        while self._waiting:
            outcome, data = self._waiting[0], b""
            if isinstance(outcome, InferResponse) and outcome.outputs and not self._is_over:
                try:
                    steps = in_one_step(outcome.outputs, partial(write_response, outcome), self._limit)
                    data = await self._exchange.encoded(outcome.outputs.values(), steps)
                except Exception as error:  # noqa: BLE001 - as in ``_take``
                    outcome = as_error(error)
            self._take(outcome, data)
            self._exchange.await_more(self._kept)
            self._waiting_bytes -= _size(self._waiting.popleft())

    def _take(self, outcome: Outcome, data: bytes = b"") -> None:
        """Process ``outcome``. ``data`` contains its outputs if they are already encoded."""
        if self._is_over:
            return
        try:
            if isinstance(outcome, PenstockError):
                raise outcome
            if outcome.outputs:
                self._add(data or write_response(outcome))
            if outcome.final:
                self._is_over = True
                self._end()
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client unanswered
            self._is_over = True
            self._fail(as_error(error))
            self._exchange.cancel()

    @abstractmethod
    def _add(self, data: bytes) -> None:
        """Process an encoded response."""

    @abstractmethod
    def _end(self) -> None:
        """Called after the last response."""

    def _fail(self, error: PenstockError) -> None:
        self._exchange.fail(error)


class _Single(_Responses):
    """Answers with the only response."""

    _response = b""

    def _add(self, data: bytes) -> None:
        if self._response:
            raise _not_one("more")
        self._response = data
        self._kept = len(data)

    def _end(self) -> None:
        if not self._response:
            raise _not_one("none")
        self._exchange.reply(200, JSON, self._response)


class _Events(_Responses):
    """Sends each response as an event. An error before the first event sets the status. A later error is sent as an event."""

    _has_begun = False

    def _add(self, data: bytes) -> None:
        self._begin()
        self._exchange.sink.send(self._exchange, b"data: %b\n\n" % data)

    def _end(self) -> None:
        self._begin()
        self._exchange.sink.end_stream(self._exchange)

    def _fail(self, error: PenstockError) -> None:
        if self._has_begun:
            self._add(encode_error(str(error)))
            self._end()
        else:
            super()._fail(error)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._exchange.sink.begin_stream(self._exchange, _EVENTS)


def _input(spec: TensorSpec, value: Any) -> Array:
    values = value if isinstance(value, list | np.ndarray) else [value]
    shape: list[int] = list(value.shape) if isinstance(value, np.ndarray) else []
    while isinstance(value, list):  # the shape of nested lists, according to their first elements
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    shape = [1] * (len(spec.shape) - len(shape)) + shape
    if spec.datatype is DataType.BYTES:
        check_bytes_elements(math.prod(shape))
    return from_json(spec.name, spec.datatype.value, shape, values)


def _size(outcome: Outcome) -> int:
    return 0 if isinstance(outcome, PenstockError) else sum(map(weight, outcome.outputs.values()))


def _not_one(what: str) -> PenstockError:
    return InvalidArgument(
        f"generate expects model to produce exactly 1 response, got {what}",
        "use generate_stream for models with any number of responses",
    )
