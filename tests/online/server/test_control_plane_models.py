"""Models in several processes of a server, each with a separate manager over the same repository."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from fake_repository import Repository
from penstock.errors import InvalidModel, PenstockError
from penstock.online.repository.override import Override
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.processes.group import ProcessGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer

Story = Callable[[ControlPlane, Repository, Repository], Coroutine[Any, Any, None]]

_NUMBERS = itertools.count()


class Other(ProcessGroup):
    """One sibling. It runs in the same process, and therefore has separate files."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    async def ask(self, what: str, *arguments: Any, patient: bool = False) -> list[Any]:
        return [await self.plane.answer(what, [_copied(one) for one in arguments])]


def _copied(argument: Any) -> Any:
    if not isinstance(argument, Override) or not argument.folder:
        return argument
    folder = Path(argument.folder)
    # The name must not look like that of a killed server's folder, which a server in another test would remove. It is new each time,
    # since the manager may still be removing an earlier copy.
    copy = shutil.copytree(folder, folder.with_name(f"copy-{next(_NUMBERS)}-of-{folder.name}"))
    return Override(argument.config, str(copy))


def make_plane(siblings: ProcessGroup, repository: Repository) -> ControlPlane:
    settings = SharedMemory(enabled=False), Tracer(TraceSettings()), LogSettings()
    page = MetricsPage(repository.served.statistics)
    return ControlPlane(repository.served, *settings, siblings, page, repository.manager)


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    def run(story: Story) -> None:
        async def main() -> None:
            async with (
                Repository(tmp_path, is_explicit=True) as first,
                Repository(tmp_path, is_explicit=True) as second,
            ):
                await story(make_plane(Other(make_plane(ProcessGroup(), second)), first), first, second)

        asyncio.run(main())

    return run


def refuse() -> None:
    raise InvalidModel("too little memory here")


def accept() -> None:
    pass


def test_a_reload_that_one_process_alone_cannot_do_is_told_by_the_index_and_done_by_the_next_load(
    tell: Callable[[Story], None],
) -> None:
    async def story(plane: ControlPlane, first: Repository, second: Repository) -> None:
        first.write("m/1/model.onnx", "one")
        await plane.load("m", {})
        second.loads.while_loading = refuse
        first.write("m/1/model.onnx", "two")
        with pytest.raises(PenstockError, match="too little memory here"):
            await plane.load("m", {})
        (row,) = await plane.repository_index()
        assert (row["state"], row["reason"]) == ("READY", "too little memory here")
        second.loads.while_loading = accept
        await plane.load("m", {})
        assert [one.served.find("m").identity for one in (first, second)] == ["two", "two"]
        (row,) = await plane.repository_index(ready=True)
        assert row["reason"] == ""

    tell(story)


def test_a_poll_tries_again_what_another_process_could_not_load(tell: Callable[[Story], None]) -> None:
    async def story(plane: ControlPlane, first: Repository, second: Repository) -> None:
        first.write("m/1/model.onnx", "one")
        for _ in range(2):
            await plane.poll()
        second.loads.while_loading = refuse
        first.write("m/1/model.onnx", "two")
        for _ in range(2):
            await plane.poll()
        assert [one.served.find("m").identity for one in (first, second)] == ["two", "one"]
        second.loads.while_loading = accept
        await plane.poll()
        assert second.served.find("m").identity == "two"
        begun = len(second.loads.begun)
        await plane.poll()
        assert len(second.loads.begun) == begun

    tell(story)


def test_files_that_one_process_could_not_load_are_given_to_it_again(tell: Callable[[Story], None]) -> None:
    async def story(plane: ControlPlane, first: Repository, second: Repository) -> None:
        first.write("m/1/model.onnx", "disk")
        await plane.load("m", {"config": "{}", "file:1/model.onnx": b"one"})
        second.loads.while_loading = refuse
        with pytest.raises(PenstockError):
            await plane.load("m", {"config": "{}", "file:1/model.onnx": b"two"})
        second.loads.while_loading = accept
        assert [one.served.find("m").identity for one in (first, second)] == ["two", "one"]
        await plane.poll()
        assert [one.served.find("m").identity for one in (first, second)] == ["two", "two"]
        await plane.load("m", {})
        assert [one.served.find("m").identity for one in (first, second)] == ["disk", "disk"]

    tell(story)


def test_a_model_that_one_process_cannot_load_at_all_none_serves(tell: Callable[[Story], None]) -> None:
    async def story(plane: ControlPlane, first: Repository, second: Repository) -> None:
        first.write("m/1/model.onnx", "one")
        second.loads.while_loading = refuse
        with pytest.raises(PenstockError, match="too little memory here"):
            await plane.load("m", {})
        assert first.served.names() == second.served.names() == []
        await first.settled()
        (row,) = await plane.repository_index()
        assert row["state"] == "UNAVAILABLE"

    tell(story)
