from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.override import Override, discard, store
from penstock.online.repository.retirement import Retirement
from penstock.online.repository.state import ManagedModel, VersionPhase, VersionState


class LeavingHandle:
    """The part of a handle that its retirement needs; it unloads when it has answered."""

    is_healthy, instance_count = True, 1

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.is_unloaded = False

    async def unload(self) -> None:
        await self.answered.wait()
        self.is_unloaded = True


def make_source(folder: Path) -> ModelSource:
    return ModelSource("m", folder, {"1": folder / "1" / "model.onnx"})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@settings(max_examples=24)
@given(st.permutations(range(3)))
def test_a_version_ends_with_the_last_of_its_handles(order: list[int]) -> None:
    async def run() -> None:
        retirement, model, version = Retirement(), ManagedModel("m"), VersionState()
        version.begin()
        handles = [LeavingHandle() for _ in range(3)]
        version.serve(handles[0], make_source(Path()), 1)
        version.leave()
        version.leaving = len(handles)
        for handle in handles:
            retirement.retire(model, handle, version)
        for last, number in zip((False, False, True), order, strict=True):
            assert version.state is VersionPhase.UNLOADING
            handles[number].answered.set()
            await settle()
            assert handles[number].is_unloaded
            assert not model.leaving if last else model.leaving
        assert version.state is VersionPhase.UNAVAILABLE

    asyncio.run(run())


def test_finishing_waits_for_handles_that_still_answer() -> None:
    async def run() -> None:
        retirement, handle = Retirement(), LeavingHandle()
        retirement.retire(ManagedModel("m"), handle)
        finished = asyncio.create_task(retirement.finish())
        await settle()
        assert not finished.done()
        handle.answered.set()
        await finished
        assert handle.is_unloaded

    asyncio.run(run())


def test_files_of_an_override_go_when_no_version_needs_them() -> None:
    async def run() -> None:
        retirement, model = Retirement(), ManagedModel("m")
        folders = [store({"1/model.onnx": b"x"}) for _ in range(3)]
        old, served, current = folders
        try:
            model.overrides = [Override("{}", str(folder)) for folder in folders]
            model.override = model.overrides[2]
            version = model.versions["1"] = VersionState()
            version.begin()
            version.serve(LeavingHandle(), make_source(served), 1)
            leaving = LeavingHandle()
            retirement.retire(model, leaving)
            retirement.clear_up(model)
            await settle()
            assert old.exists(), "a replaced handle still answers from it"
            leaving.answered.set()
            await retirement.finish()
            assert [folder.exists() for folder in folders] == [False, True, True]
            assert [one.folder for one in model.overrides] == [str(served), str(current)]
        finally:
            for folder in itertools.islice(folders, 1, None):
                discard(str(folder))

    asyncio.run(run())
