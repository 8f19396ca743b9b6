"""Inference over HTTP: the Open Inference Protocol's ``infer``, and the function that the dialects share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.classification import classify_outputs
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.codec.decoder import HttpRequestDecoder
from penstock.online.server.http.codec.encoder import HttpAnswerEncoder
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.http.routes import Resource, Route
from penstock.request import InferRequest, Outcome
from penstock.tensor import Array

Write = Callable[[Mapping[str, Array]], bytes]
"""Encodes outputs as JSON. Raises PenstockError."""


class HttpInference:
    """Answers ``POST .../infer``. Belongs to the event loop."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._decode = HttpRequestDecoder(dataplane.shared_memory)
        self._encode = HttpAnswerEncoder()

    def resources(self) -> list[Resource]:
        path = "/v2/models/{model}/infer"
        return [Resource(path, {b"POST": self.infer}, versioned=True, answer="InferResponse", body="InferRequest")]

    def infer(self, exchange: Exchange, route: Route) -> None:
        """Inference."""
        handle = self._dataplane.acquire(route.model, route.version, exchange.client)
        request, exchange.form = self._decode(handle, exchange.body, exchange.head.json_length)
        # The arrays keep the body alive as long as they need it.
        exchange.body = b""
        if exchange.client or exchange.head.traceparent:
            exchange.introduce(request)
        # Cheaper than a closure, which has a cell for each variable, or a bound method.
        done = partial(HttpInference.answer, self, exchange, handle)
        exchange.pending = self._dataplane.infer(handle, request, done)

    def answer(self, exchange: Exchange, handle: Handle, outcome: Outcome) -> None:
        """Answer with ``outcome``, which came from ``handle``."""
        if isinstance(outcome, PenstockError):
            exchange.fail(outcome)
            return
        form = exchange.form
        try:
            if form.classification:
                classify_outputs(outcome, form.classification, handle)
            headers, text, tensors = self._encode(outcome, form)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client unanswered
            exchange.fail_unexpected(error)
            return
        if exchange.head.accepted or form.lease is not None:
            exchange.reply(200, headers, text, tensors)
        else:
            exchange.sink.answered(exchange, 200, headers, text, tensors)


def ask(dataplane: DataPlane, exchange: Exchange, handle: Handle, inputs: Mapping[str, Array], write: Write) -> None:
    """Run ``inputs`` on ``handle`` and answer with the outputs, encoded by ``write``."""

    def done(outcome: Outcome) -> None:
        if isinstance(outcome, PenstockError):
            exchange.fail(outcome)
            return
        try:
            body = write(outcome.outputs)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client unanswered
            exchange.fail_unexpected(error)
            return
        exchange.reply(200, JSON, body)

    request = InferRequest(handle.name, dict(inputs), handle.version)
    # The arrays keep the body alive as long as they need it.
    exchange.body = b""
    exchange.introduce(request)
    exchange.pending = dataplane.infer(handle, request, done)
