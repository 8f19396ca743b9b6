"""State that all HTTP connections of one port share: routes, limits, memory for bodies, and known heads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from penstock.clock import SystemClock
from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.table import AccessTable
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.head import KnownHeads, RequestHead
from penstock.online.server.http.routes import Resource, Routes
from penstock.online.server.network.connections import Connections
from penstock.online.server.network.unread import UnreadTotal

FREE_BYTES = 16 << 10
"""Bodies of at most this number of bytes do not count against the budget."""
_CONTROL_BYTES = 64 << 10
_WITHOUT_TENSORS = ("", "Settings", "IndexRequest", "Region")
"""Schemas of bodies without tensors or files. Such bodies are limited to ``_CONTROL_BYTES``."""
_ALL_JSON = ("InferRequest", "GenerateRequest")
_PERHAPS_JSON = (b"", b"application/json", b"application/x-www-form-urlencoded")


class HttpContext:
    """Shared state of the HTTP connections of one port. Used only on the event loop."""

    def __init__(
        self,
        resources: Iterable[Resource],
        access: AccessTable,
        config: ServerConfig,
        connections: Connections,
        budget: ByteBudget,
        web: WebAccess | None = None,
        unread: UnreadTotal | None = None,
    ) -> None:
        """``budget`` limits the total size of all bodies. Without ``web``, requests may have any name in ``Host``."""
        self.spare: HttpContext | None = None
        """The context of connections over the connection limit; None if such connections are refused."""
        self.config = config
        self.connections = connections
        self.budget = budget
        self.web = web or WebAccess()
        self.unread = unread or UnreadTotal(config.max_unread_bytes, SystemClock())
        self.keys = access.http_headers
        """Names, in lower case, of the headers that give access to restricted parts of the API."""
        self.routes = Routes(resources, access.of_path)
        self.heads = KnownHeads()
        # Copied from ``config``, because every request reads these values.
        self.max_pipelined = config.max_pipelined
        self.max_header_bytes = config.max_header_bytes
        self.max_request_bytes = config.max_request_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    def limit_of(self, head: RequestHead) -> int:
        """Maximum size of the request's body, both as received and after decompression."""
        if head.route.body in _WITHOUT_TENSORS:
            return min(_CONTROL_BYTES, self.max_request_bytes)
        return min(self.config.max_json_bytes, self.max_request_bytes) if is_json(head) else self.max_request_bytes

    def reserve(self, size: int, reserved: int) -> int:
        """Increase a reservation of ``reserved`` bytes to ``size`` bytes. Returns the number of added bytes. Raises Unavailable."""
        wanted = size - reserved
        if size <= FREE_BYTES or wanted <= 0:
            return 0
        if not self.budget.take(wanted):
            raise self.budget.refusal()
        return wanted

    def give_back(self, size: int) -> None:
        """Return ``size`` reserved bytes to the budget."""
        self.budget.give(size)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task. ``work`` must not raise an exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def is_json(head: RequestHead) -> bool:
    """True if the whole body is JSON."""
    if head.json_length is not None or head.route.body in _ALL_JSON:
        return head.json_length is None
    media = head.content_type.partition(b";")[0].strip().lower()
    return head.route.body == "Anything" and media in _PERHAPS_JSON


def is_decoded(head: RequestHead) -> bool:
    """True if decoding makes the body larger, because the body is compressed or JSON."""
    return bool(head.encoding) or is_json(head)
