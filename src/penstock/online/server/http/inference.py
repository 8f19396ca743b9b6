"""Inference over HTTP: the Open Inference Protocol's ``infer``, and the function that the dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.access.response_limit import ResponseLimit
from penstock.online.server.answer_form import AnswerForm
from penstock.online.server.classification import classify_in_steps, classify_outputs
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.codec.decoder import HttpRequestDecoder
from penstock.online.server.http.codec.encoder import Encoded, HttpAnswerEncoder, in_one_step, is_light
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.routes import Resource, Route
from penstock.online.server.to_thread import INLINE_BYTES, Steps
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import Array, Buffer

Write = Callable[[Mapping[str, Array]], bytes]
"""Encodes outputs as JSON. Raises PenstockError."""


class HttpInference:
    """Answers ``POST .../infer``. Used only on the event loop."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._decode = HttpRequestDecoder(dataplane.shared_memory)
        self._encode = HttpAnswerEncoder(dataplane.response_limit)
        self._answer = partial(HttpInference.answer, self)

    def resources(self) -> list[Resource]:
        path = "/v2/models/{model}/infer"
        return [Resource(path, {b"POST": self.infer}, versioned=True, answer="InferResponse", body="InferRequest")]

    def infer(self, exchange: Exchange, route: Route) -> None:
        """Inference."""
        handle = self._dataplane.acquire(route.model, route.version, exchange.client)
        head, body = exchange.head, exchange.body
        json_length = head.json_length
        if head.encoding or (len(body) > INLINE_BYTES and not self._decode.is_light(body, json_length)):
            small = exchange.small_body() if head.encoding else None
            if small is None:
                exchange.later(self._infer_later(exchange, handle))
                return
            body = small
        # The arrays keep the body alive while they need it.
        exchange.body = b""
        request, exchange.form = self._decode(handle, body, json_length)
        self._start(exchange, handle, request)

    async def _infer_later(self, exchange: Exchange, handle: Handle) -> None:
        route, json_length = exchange.head.route, exchange.head.json_length
        layout, inputs = await exchange.decoded(partial(self._decode.in_steps, handle, json_length))
        handle = self._dataplane.acquire(route.model, route.version, exchange.client)  # the first may be unloaded
        request, exchange.form = self._decode.complete(handle, layout, inputs)
        self._start(exchange, handle, request)

    def _start(self, exchange: Exchange, handle: Handle, request: InferRequest) -> None:
        if exchange.client or exchange.head.traceparent or handle.function is not None:
            exchange.introduce(request)
        if exchange.passage is not None:
            exchange.await_model(request.inputs)
        # ``partial`` costs less than a closure, which has a cell for each variable, or a bound method.
        done = partial(self._answer, exchange, handle)
        if handle.row_bytes:
            exchange.submit(self._dataplane, handle, request, done)
        else:
            exchange.pending = self._dataplane.infer(handle, request, done)

    def answer(self, exchange: Exchange, handle: Handle, outcome: Outcome) -> None:
        """Send ``outcome``, the result of the request on ``handle``, as the response."""
        if isinstance(outcome, PenstockError):
            exchange.fail(outcome)
            return
        form = exchange.form
        try:
            if not form.classification:
                encoded = self._encode(outcome, form, True)
            elif is_light(outcome.outputs.values()):
                classify_outputs(outcome, form.classification, handle)
                encoded = self._encode(outcome, form)
            else:
                encoded = None
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client unanswered
            exchange.fail_unexpected(error)
            return
        if encoded is None:
            exchange.later(self._answer_later(exchange, handle, outcome))
            return
        headers, text, tensors = encoded
        if exchange.head.accepted or form.lease is not None:
            exchange.reply(200, headers, text, tensors)
        else:
            exchange.sink.answered(exchange, 200, headers, text, tensors)

    async def _answer_later(self, exchange: Exchange, handle: Handle, outcome: InferResponse) -> None:
        steps = self._encode_in_steps(exchange.form, handle, outcome)
        exchange.reply(200, *await exchange.encoded(outcome.outputs.values(), steps))

    def _encode_in_steps(self, form: AnswerForm, handle: Handle, response: InferResponse) -> Steps[Encoded]:
        if form.classification:
            yield from classify_in_steps(response, form.classification, handle)
        return (yield from self._encode.in_steps(response, form))


def ask(
    dataplane: DataPlane,
    exchange: Exchange,
    find: Callable[[], Handle],
    read: Callable[[Handle, Buffer], Steps[tuple[Mapping[str, Array], Write]]],
) -> None:
    """Answer an inference request. ``find`` returns the handle, and ``read`` returns the inputs in the body.

    ``read`` also returns a function that encodes the outputs.
    """

    def start(found: tuple[Mapping[str, Array], Write], is_late: bool) -> None:
        inputs, write = found
        handle = find() if is_late else first
        request = InferRequest(handle.name, dict(inputs), handle.version)
        exchange.introduce(request)
        exchange.await_model(request.inputs)
        exchange.submit(dataplane, handle, request, partial(_finish, dataplane.response_limit, exchange, write))

    first = find()
    exchange.decode(partial(read, first), start)


def _finish(limit: ResponseLimit, exchange: Exchange, write: Write, outcome: Outcome) -> None:
    if isinstance(outcome, PenstockError):
        exchange.fail(outcome)
        return

    async def write_later() -> None:
        outputs = outcome.outputs
        steps = in_one_step(outputs, partial(write, outputs), limit)
        exchange.reply(200, JSON, await exchange.encoded(outputs.values(), steps))

    if not is_light(outcome.outputs.values()):
        exchange.later(write_later())
        return
    try:
        body = write(outcome.outputs)
    except Exception as error:  # noqa: BLE001 - a bug must not leave the client unanswered
        exchange.fail_unexpected(error)
        return
    exchange.reply(200, JSON, body)
