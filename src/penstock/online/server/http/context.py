"""State that all HTTP connections of one port share: routes, limits, memory for bodies, and known heads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.table import AccessTable
from penstock.online.server.access.web import WebAccess
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.head import KnownHeads
from penstock.online.server.http.routes import Resource, Routes
from penstock.online.server.network.connections import Connections

FREE_BYTES = 16 << 10
"""Bodies up to this size do not count against the budget."""


class HttpContext:
    """Shared state of the HTTP connections of one port. Belongs to the event loop."""

    def __init__(
        self,
        resources: Iterable[Resource],
        access: AccessTable,
        config: ServerConfig,
        connections: Connections,
        budget: ByteBudget,
        web: WebAccess | None = None,
    ) -> None:
        """``budget`` bounds the bytes of all bodies together. By default requests may have any name in ``Host``."""
        self.config = config
        self.connections = connections
        self.budget = budget
        self.web = web or WebAccess()
        self.keys = access.http_headers
        """Headers that unlock restricted parts of the API, in lower case."""
        self.routes = Routes(resources, access.of_path)
        self.heads = KnownHeads()
        # Copied from ``config``, since every request reads them.
        self.max_pipelined = config.max_pipelined
        self.max_header_bytes = config.max_header_bytes
        self.max_request_bytes = config.max_request_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, size: int, reserved: int) -> int:
        """Raise a reservation from ``reserved`` to ``size`` bytes of the budget; returns the bytes added. Raises Unavailable."""
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
        """Run ``work`` as a task; it must not raise."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
