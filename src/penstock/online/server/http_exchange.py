"""One request of an HTTP connection, from parsed to its answer: routed, handed to the data plane, encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container

import msgspec
import orjson

from penstock.errors import Code, PenstockError
from penstock.online.server import oip, status
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http_answer import JSON
from penstock.online.server.routes import Action, Route
from penstock.request import Outcome

_log = logging.getLogger(__name__)

Reply = Callable[["Exchange", int, bytes, bytes], None]
"""``(exchange, status, headers, body)``; headers are lines with their ends."""


class Exchange(msgspec.Struct, eq=False):
    """A request as received; ``reply`` is called once with its answer, and ``answer`` holds that until it can be written."""

    reply: Reply
    keep_alive: bool
    method: bytes = b""
    url: bytes = b""
    body: bytes | bytearray = b""
    json_length: int | None = None
    compressed: bool = False
    binary: Container[str] = oip.NONE
    answer: bytes | None = None

    def run(self, route: Route, dataplane: DataPlane) -> None:
        """Have it answered, now or later."""
        try:
            if route.action is Action.INFER and self.method == b"POST":
                if self.compressed:
                    self.fail_with(501, "compressed requests are not supported", b"Accept-Encoding: identity\r\n")
                    return
                request, self.binary = oip.decode_infer(route.model, route.version, self.body, self.json_length)
                # The arrays hold on to the body as long as they need it.
                self.body = b""
                dataplane.infer(request, self.done)
            else:
                self._answer(route, dataplane)
        except PenstockError as error:
            self.fail(error)
        except Exception:  # noqa: BLE001 - a bug of ours must not take the other requests with it
            _log.exception("request failed")
            self.fail(PenstockError("internal error"))

    def done(self, outcome: Outcome) -> None:
        """Answer an inference request."""
        if isinstance(outcome, PenstockError):
            self.fail(outcome)
            return
        try:
            json_length, body = oip.encode_infer(outcome, self.binary)
        except PenstockError as error:
            self.fail(error)
            return
        except Exception:  # noqa: BLE001 - a bug of ours must not leave the client without an answer
            _log.exception("the answer could not be encoded")
            self.fail(PenstockError("internal error"))
            return
        if json_length is None:
            self.reply(self, 200, JSON, body)
        else:
            headers = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % json_length
            self.reply(self, 200, headers, body)

    def fail(self, error: PenstockError) -> None:
        """Answer that the request failed."""
        retry = b"Retry-After: 1\r\n" if error.code is Code.UNAVAILABLE else b""
        self.fail_with(status.HTTP[error.code], str(error), retry)

    def fail_with(self, status: int, message: str, headers: bytes = b"") -> None:
        """Answer with ``message``; to HEAD without, since its answer has no body."""
        self.reply(self, status, JSON + headers, b"" if self.method == b"HEAD" else oip.encode_error(message))

    def _answer(self, route: Route, dataplane: DataPlane) -> None:
        if route.action is Action.UNKNOWN:
            self.fail_with(404, "Not Found")
        elif self.method != route.method:
            self.fail_with(405, "Method Not Allowed", b"Allow: %b\r\n" % route.method)
        elif route.action is Action.LIVE:
            self.reply(self, 200, JSON, b"")
        elif route.action is Action.READY:
            self.reply(self, 200 if dataplane.ready else 400, JSON, b"")
        elif route.action is Action.MODEL_READY:
            if dataplane.model_ready(route.model, route.version):
                self.reply(self, 200, JSON, b"")
            else:
                self.fail_with(400, "Model version not ready")
        elif route.action is Action.SERVER_METADATA:
            self.reply(self, 200, JSON, orjson.dumps(dataplane.server_metadata()))
        else:
            self.reply(self, 200, JSON, orjson.dumps(dataplane.model_metadata(route.model, route.version)))
