"""What all HTTP connections of one server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from penstock.online.server.access.admission import ByteBudget
from penstock.online.server.access.auth import Access
from penstock.online.server.access.restriction import guard_resources, read_restrictions
from penstock.online.server.config import ServerConfig
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.http.api import RESOURCES
from penstock.online.server.http.decoder import RequestDecoder
from penstock.online.server.http.dialects.registry import dialect_resources
from penstock.online.server.http.encoder import AnswerEncoder
from penstock.online.server.http.head import Heads
from penstock.online.server.http.openapi import document
from penstock.online.server.http.routes import Resource, Routes
from penstock.online.server.network.connections import Connections

FREE_BYTES = 16 << 10
"""Bodies up to this size are not counted against the budget."""


class Shared:
    """Belongs to the event loop. Without ``access`` everyone may ask; without ``budget`` only the single body is bounded."""

    def __init__(
        self,
        dataplane: DataPlane,
        control: ControlPlane,
        config: ServerConfig,
        connections: Connections,
        access: Access | None = None,
        budget: ByteBudget | None = None,
        resources: Iterable[Resource] | None = None,
    ) -> None:
        """``resources`` None: the Open Inference Protocol, and the dialects that ``config`` names."""
        self.dataplane = dataplane
        self.control = control
        self.config = config
        self.connections = connections
        self.access = access if access is not None and access.enabled else None
        """Only where keys are asked for."""
        self.budget = budget
        restrictions = read_restrictions(config.http_restricted_api)
        self.keys = frozenset(header.encode() for header, _ in restrictions.values())
        """Headers that open restricted parts, in lower case."""
        found = [*RESOURCES, *dialect_resources(config.dialects)] if resources is None else resources
        self.routes = Routes(guard_resources(found, restrictions))
        self.heads = Heads()
        self.decode = RequestDecoder(dataplane.shared_memory)
        self.encode = AnswerEncoder()
        # Looked up for every request, so each is one step away.
        self.max_pipelined = config.max_pipelined
        self.max_header_bytes = config.max_header_bytes
        self.max_request_bytes = config.max_request_bytes
        self.free_bytes = FREE_BYTES if budget is not None else config.max_request_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, size: int, reserved: int) -> int:
        """Have ``size`` bytes of the budget, of which ``reserved`` are there already; how many were added.

        Raises Unavailable.
        """
        wanted = size - reserved
        if self.budget is None or size <= self.free_bytes or wanted <= 0:
            return 0
        if not self.budget.take(wanted):
            raise self.budget.refusal()
        return wanted

    def give_back(self, size: int) -> None:
        """The other end of ``reserve``."""
        if size and self.budget is not None:
            self.budget.give(size)

    def description(self) -> bytes:
        """Of everything that is answered, in OpenAPI."""
        return document(self.config.dialects)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have ``work``, which does not fail, done beside everything else."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
