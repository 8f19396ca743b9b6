"""The control plane of several processes: a change in one reaches the others, including those that start later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory as Memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from handles import make_handle
from penstock.errors import AlreadyExists, InvalidArgument, Unsupported
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.online.server.control_plane import ControlPlane
from penstock.online.server.metrics_page import MetricsPage
from penstock.online.server.processes.group import ProcessGroup, SocketGroup
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.telemetry.logging import LogSettings
from penstock.telemetry.statistics import Failure
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.tensor import DataType
from penstock.testing import FakeModel


class Others(ProcessGroup):
    """Control planes in the same process that are called one after the other."""

    def __init__(self, *planes: ControlPlane) -> None:
        self.planes = planes

    async def ask(self, what: str, *arguments: Any, patient: bool = False) -> list[Any]:
        return [await plane.answer(what, list(arguments)) for plane in self.planes]


def make_plane(
    siblings: ProcessGroup, *, shared_memory: bool | SharedMemory, repository: ServedModels | None = None
) -> ControlPlane:
    repository = repository or ServedModels()
    return ControlPlane(
        repository,
        shared_memory if isinstance(shared_memory, SharedMemory) else SharedMemory(enabled=shared_memory),
        Tracer(TraceSettings()),
        LogSettings(),
        siblings,
        MetricsPage(repository.statistics),
    )


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_process_that_starts_later_takes_over_the_settings(shared_memory: bool) -> None:
    first = make_plane(ProcessGroup(), shared_memory=shared_memory)

    async def run() -> None:
        await first.log_settings({"log_verbose_level": 2})
        await first.trace_settings(update={"trace_rate": "7"})
        second = make_plane(Others(first), shared_memory=shared_memory)
        await second.catch_up()
        assert (await second.log_settings())["log_verbose_level"] == 2
        assert (await second.trace_settings())["trace_rate"] == "7"

    asyncio.run(run())


def test_what_one_is_told_all_do_and_nothing_else_can_be_asked_of_them() -> None:
    other = make_plane(ProcessGroup(), shared_memory=True)
    plane = make_plane(Others(other), shared_memory=True)

    async def run() -> None:
        await plane.log_settings({"log_info": False})
        assert (await other.log_settings())["log_info"] is False
        for what in ("load", "catch_up", "__init__"):
            with pytest.raises(InvalidArgument):
                await other.answer(what, [])

    asyncio.run(run())


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


@asynccontextmanager
async def processes(folder: Path, registries: list[SharedMemory]) -> AsyncIterator[list[ControlPlane]]:
    """The control planes of a server's processes, connected by real sockets."""
    ends = [SocketGroup(folder, index) for index in range(len(registries))]
    planes = [make_plane(end, shared_memory=registry) for end, registry in zip(ends, registries, strict=True)]
    for end, plane in zip(ends, planes, strict=True):
        await end.serve(plane.answer)
    try:
        yield planes
    finally:
        for end, registry in zip(ends, registries, strict=True):
            await end.close()
            registry.close()


def test_of_two_who_register_a_name_at_once_one_has_it_everywhere(tmp_path: Path, memory: Memory) -> None:
    async def run() -> None:
        async with processes(tmp_path, [SharedMemory(enabled=True) for _ in range(3)]) as planes:
            for _ in range(5):
                sizes = [100, 200, 300]
                outcomes = await asyncio.gather(
                    *(
                        plane.register_shared_memory("r", f"/{memory.name}", 0, size)
                        for plane, size in zip(planes, sizes, strict=True)
                    ),
                    return_exceptions=True,
                )
                assert [type(each) for each in outcomes if each is not None] == [AlreadyExists] * 2
                found = [await plane.shared_memory_status("r") for plane in planes]
                assert [row["byte_size"] for (row,) in found] == [sizes[outcomes.index(None)]] * 3
                await planes[1].unregister_shared_memory("r")
                assert [await plane.shared_memory_status() for plane in planes] == [[], [], []]

    asyncio.run(run())


def test_a_region_that_one_process_cannot_have_none_has(tmp_path: Path, memory: Memory) -> None:
    registries = [SharedMemory(enabled=True), SharedMemory(enabled=True), SharedMemory(enabled=False)]

    async def run() -> None:
        async with processes(tmp_path, registries) as planes:
            with pytest.raises(Unsupported):
                await planes[0].register_shared_memory("r", f"/{memory.name}", 0, 100)
            assert [registry.status() for registry in registries[:2]] == [[], []]

    asyncio.run(run())


def test_a_name_that_is_taken_stays_with_who_has_it(tmp_path: Path, memory: Memory) -> None:
    async def run() -> None:
        async with processes(tmp_path, [SharedMemory(enabled=True) for _ in range(2)]) as planes:
            await planes[0].register_shared_memory("r", f"/{memory.name}", 0, 100)
            with pytest.raises(AlreadyExists):
                await planes[1].register_shared_memory("r", f"/{memory.name}", 0, 200)
            for plane in planes:
                assert (await plane.shared_memory_status("r"))[0]["byte_size"] == 100

    asyncio.run(run())


def test_unregistering_waits_for_the_users_in_all_processes_and_keeps_nobody_else_waiting(
    tmp_path: Path, memory: Memory
) -> None:
    registries = [SharedMemory(enabled=True) for _ in range(2)]

    async def run() -> None:
        async with processes(tmp_path, registries) as planes:
            key = f"/{memory.name}"
            await planes[0].register_shared_memory("r", key, 0, 100)
            lease = registries[1].lease()
            array = lease.array("r", 0, 16, DataType.FP32, (4,))
            leaving = asyncio.ensure_future(planes[0].unregister_shared_memory("r"))
            while any(registry.status() for registry in registries):
                await asyncio.sleep(0)
            for _ in range(3):
                await planes[1].register_shared_memory("other", key, 0, 100)
                await planes[0].unregister_shared_memory("other")
                assert not leaving.done()
            assert [registry.status() for registry in registries] == [[], []]
            del array
            lease.release()
            await leaving

    asyncio.run(run())


def test_the_index_tells_which_models_cannot_run() -> None:
    async def run() -> None:
        repository = ServedModels()
        for name in ("well", "ill"):
            repository.add(make_handle(FakeModel(), name))
        sick: Any = repository.find("ill")
        sick._models = [SimpleNamespace(healthy=False)]
        plane = make_plane(ProcessGroup(), shared_memory=False, repository=repository)
        well = {"name": "well", "version": "1", "state": "READY", "reason": ""}
        reason = "its instance is being restarted"
        assert await plane.repository_index() == [
            well,
            {"name": "ill", "version": "1", "state": "UNAVAILABLE", "reason": reason},
        ]
        assert await plane.repository_index(ready=True) == [well]

    asyncio.run(run())


def test_what_a_dead_process_has_counted_is_never_lost_nor_counted_twice(tmp_path: Path) -> None:
    async def run() -> None:
        planes, ends, handles = [], [], []

        async def start(index: int) -> None:
            repository, end = ServedModels(), SocketGroup(tmp_path, index)
            handle = make_handle(FakeModel())
            repository.add(handle)
            plane = make_plane(end, shared_memory=False, repository=repository)
            plane.inherit()
            await end.serve(plane.answer)
            planes.append(plane)
            ends.append(end)
            handles.append(handle)

        def count(handle: Handle) -> None:
            handle.statistics.pending += 1
            handle.statistics.failed(Failure.OTHER, 0, 10)

        async def seen(plane: ControlPlane) -> tuple[int, int]:
            (found,) = await plane.statistics()
            (whole,) = await plane.all_statistics()
            line = f'nv_inference_request_failure{{model="m",version="1",reason="OTHER"}} {whole.fail.count}'
            assert line in (await plane.metrics_page()).decode().splitlines()
            assert found["inference_stats"]["fail"]["count"] == whole.fail.count
            return whole.fail.count, whole.pending

        await start(0)
        await start(1)
        for handle in handles:
            count(handle)
        assert await seen(planes[0]) == (2, 2)
        for deaths in range(2):
            await ends[-1].close()
            if deaths:
                (tmp_path / "1.sock").touch()  # as after a kill
            assert await seen(planes[0]) == (2 + deaths, 1)
            await start(1)
            assert await seen(planes[0]) == await seen(planes[-1]) == (2 + deaths, 1)
            count(handles[-1])
            assert await seen(planes[0]) == (3 + deaths, 2)
        for end in ends:
            await end.close()

    asyncio.run(run())
