"""Inference asked for in a dialect: a request to the data plane, and what its answer is written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.errors import PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.server.http.answer import JSON
from penstock.online.server.http.exchange import Exchange
from penstock.request import InferRequest, Outcome
from penstock.tensor import Array

Write = Callable[[Mapping[str, Array]], bytes]
"""The outputs as JSON. Raises PenstockError."""


def ask(exchange: Exchange, handle: Handle, request: InferRequest, write: Write) -> None:
    """Have ``handle`` answer ``request``; it is cancelled when the client goes away."""

    def done(outcome: Outcome) -> None:
        if isinstance(outcome, PenstockError):
            exchange.fail(outcome)
            return
        try:
            body = write(outcome.outputs)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not leave the client without an answer
            exchange.fail(exchange.as_error(error))
            return
        exchange.reply(200, JSON, body)

    # The arrays hold on to the body as long as they need it.
    exchange.body = b""
    exchange.introduce(request)
    exchange.pending = exchange.line.shared.dataplane.infer(handle, request, done)
