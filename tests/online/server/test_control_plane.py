"""The control plane of several processes: what one is told, the others know, whenever they were started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import InvalidArgument
from penstock.online.repository.manager import Repository
from penstock.online.server.control_plane import Alone, ControlPlane, Siblings
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer


class Others:
    """Siblings in the same process, asked one after the other."""

    def __init__(self, *planes: ControlPlane) -> None:
        self.planes = planes

    async def ask(self, what: str, *arguments: Any) -> list[Any]:
        return [await plane.answer(what, list(arguments)) for plane in self.planes]


def make_plane(siblings: Siblings, *, shared_memory: bool) -> ControlPlane:
    repository = Repository()
    return ControlPlane(
        repository,
        SharedMemory(enabled=shared_memory),
        Tracer(TraceSettings()),
        LogSettings(),
        siblings,
        MetricsPage(repository.statistics),
    )


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_process_that_starts_later_takes_over_the_settings(shared_memory: bool) -> None:
    first = make_plane(Alone(), shared_memory=shared_memory)

    async def run() -> None:
        await first.log_settings({"log_verbose_level": 2})
        await first.trace_settings(update={"trace_rate": "7"})
        second = make_plane(Others(first), shared_memory=shared_memory)
        await second.catch_up()
        assert (await second.log_settings())["log_verbose_level"] == 2
        assert (await second.trace_settings())["trace_rate"] == "7"

    asyncio.run(run())


def test_what_one_is_told_all_do_and_nothing_else_can_be_asked_of_them() -> None:
    other = make_plane(Alone(), shared_memory=True)
    plane = make_plane(Others(other), shared_memory=True)

    async def run() -> None:
        await plane.log_settings({"log_info": False})
        assert (await other.log_settings())["log_info"] is False
        for what in ("load", "catch_up", "__init__"):
            with pytest.raises(InvalidArgument):
                await other.answer(what, [])

    asyncio.run(run())
