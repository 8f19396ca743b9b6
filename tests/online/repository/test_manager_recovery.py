"""Models after failures, and after the models that they need are unloaded and loaded again."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from fake_repository import Repository, Story, run_story
from penstock.errors import PenstockError, Unavailable
from penstock.online.repository import manager as module
from penstock.online.repository.manager import LoadFailed
from penstock.online.repository.override import Override, discard, store
from penstock.testing import DOUBLER, FakeModel


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    return partial(run_story, tmp_path)


async def poll(repository: Repository) -> list[tuple[str, bool]]:
    changes = await repository.manager.changes()
    for name, is_there in changes:
        work = repository.manager.load(name, is_due=True) if is_there else repository.manager.unload(name)
        await asyncio.gather(work, return_exceptions=True)
    return changes


class Sticky(FakeModel):
    """A model whose ``unload`` raises."""

    def unload(self) -> None:
        super().unload()
        raise RuntimeError("a bug of the engine")


def test_an_engine_that_fails_to_unload_leaves_nothing_behind(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.loads.kind = Sticky
        repository.write("m/1/model.onnx", "one")
        await repository.manager.load("m")
        await repository.manager.unload("m")
        await repository.settled()
        assert await repository.states("m") == {"1": ("UNAVAILABLE", "unloaded")}
        await repository.manager.load("m")

    tell(story)


def test_instances_that_cannot_be_added_are_a_load_that_failed(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "no ONNX at all, so that the engine refuses another copy")
        repository.write("m/config.pbtxt", "instance_group { count: 1 }")
        await repository.manager.load("m")
        repository.write("m/config.pbtxt", "instance_group { count: 2 }")
        for _ in range(2):
            with pytest.raises(LoadFailed, match="version 1 is at UNAVAILABLE state"):
                await repository.manager.load("m")
            ((state, reason),) = (await repository.states("m")).values()
            assert state == "READY"
            assert reason
            await repository.ask("m")
        repository.write("m/config.pbtxt", "instance_group { count: 1 }")
        await repository.manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}

    tell(story)


def test_the_index_says_what_failed_only_as_long_as_it_matters(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        repository.write("m/1/model.onnx", "one")
        await manager.load("m")
        with pytest.raises(LoadFailed):
            await manager.load("m", Override("{}", str(store({"1/model.onnx": b"broken"}))))
        assert await repository.states("m") == {"1": ("READY", "the file says broken")}
        await manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}
        repository.write("m/config.pbtxt", "no_such_field: 1")
        with pytest.raises(PenstockError):
            await manager.load("m")
        ((state, reason),) = (await repository.states("m")).values()
        assert state == "READY"
        assert "no_such_field" in reason
        (repository.root / "m/config.pbtxt").unlink()
        await manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}

    tell(story)


def test_what_is_loaded_has_a_number(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager

        async def generation() -> object:
            (row,) = await manager.index()
            return row["generation"]

        repository.write("m/1/model.onnx", "one")
        await manager.load("m")
        first = await generation()
        await manager.load("m")
        assert await generation() == first, "nothing was loaded"
        repository.write("m/1/model.onnx", "two")
        await asyncio.gather(*(manager.load("m") for _ in range(5)))
        assert await generation() == 3

    tell(story)


def test_a_model_whose_folder_is_moved_away_and_back_is_served_again(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        await poll(repository)
        repository.write("m/1/model.onnx", "one")
        await poll(repository)
        await poll(repository)
        assert repository.served.names() == ["m"]
        (repository.root / "m").rename(repository.root / ".away")
        await poll(repository)
        await poll(repository)
        assert repository.served.names() == []
        await repository.until(lambda: repository.loads.alive == 0)
        (repository.root / ".away").rename(repository.root / "m")
        await poll(repository)
        assert await poll(repository) == [("m", True)]
        assert repository.served.names() == ["m"]

    tell(story)


def test_a_broken_model_that_is_removed_is_missed_no_more(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "broken")
        assert set(await repository.manager.start({"m": None}, 1, 1)) == {"m"}
        await poll(repository)
        assert not repository.manager.is_complete
        shutil.rmtree(repository.root / "m")
        await poll(repository)
        await poll(repository)
        assert repository.manager.is_complete

    tell(story)


def test_who_asks_after_an_unload_that_waits_wants_the_model(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads = repository.manager, repository.loads
        repository.write("m/1/model.onnx", "one")
        gate = loads.gates["m/1"] = threading.Event()
        work = [asyncio.ensure_future(manager.load("m"))]
        await repository.until(lambda: bool(loads.begun))
        for operation in (manager.unload, manager.load):
            work.append(asyncio.ensure_future(operation("m")))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*work)
        assert manager.loaded_by_name() == [("m", None)], "a process that comes later must be told of it"

    tell(story)


def test_ensembles_that_go_with_a_part_come_back_with_it(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, served = repository.manager, repository.served
        for name in ("a", "b"):
            repository.write(f"{name}/1/model.onnx", name)
        repository.write_ensemble("both", "a", "b")
        repository.write_ensemble("outer", "both")
        repository.write_ensemble("other", "b")
        await manager.load("outer")
        await manager.load("other")
        await manager.unload("b")
        assert served.names() == ["a"]
        await repository.settled()
        reason = "it needs 'b', which is not served"
        assert await repository.states("outer") == {"1": ("UNAVAILABLE", reason)}
        await manager.load("b")
        assert set(served.names()) == {"a", "b", "both", "outer", "other"}
        assert await repository.states("outer") == {"1": ("READY", "")}
        await manager.unload("b")
        await manager.unload("other")
        await manager.load("b")
        assert set(served.names()) == {"a", "b", "both", "outer"}, "'other' is no longer asked for"

    tell(story)


def test_an_ensemble_that_goes_with_a_part_keeps_the_files_that_a_client_sent(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        repository.write("part/1/model.onnx", "one")
        step = {"model_name": "part", "model_version": -1, "input_map": {"x": "x"}, "output_map": {"y": "y"}}
        config = {"platform": "ensemble", "ensemble_scheduling": {"step": [step]}}
        for field, name in (("input", "x"), ("output", "y")):
            config[field] = [{"name": name, "data_type": "TYPE_FP32", "dims": [1]}]
        given = Override(json.dumps(config), str(store({"1/note.txt": b"x"})))
        await manager.load("whole", given)
        await manager.unload("part")
        assert not manager.is_complete, "in mode 'poll' it should be served"
        await repository.settled()
        await manager.load("part")
        assert set(repository.served.names()) == {"part", "whole"}
        assert manager.is_complete
        await manager.unload("whole")
        await repository.until(lambda: not Path(given.folder).exists())

    tell(story)


def test_an_ensemble_is_never_served_without_its_parts(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads = repository.manager, repository.loads
        for name in ("a", "b"):
            repository.write(f"{name}/1/model.onnx", name)
        repository.write_ensemble("whole", "a", "b")
        gate = loads.gates["b/1"] = threading.Event()
        whole = asyncio.ensure_future(manager.load("whole"))
        await repository.until(lambda: "b/1" in loads.begun)
        await manager.unload("a")
        gate.set()
        (error,) = await asyncio.gather(whole, return_exceptions=True)
        assert ("whole" in repository.served.names()) == (error is None)
        assert error is None or "a" not in repository.served.names()
        await manager.load("a")
        assert set(repository.served.names()) == {"a", "b", "whole"}

    tell(story)


def test_an_ensemble_is_put_together_anew_if_a_part_takes_other_tensors(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, served = repository.manager, repository.served
        repository.write("part/1/model.onnx", "one")
        repository.write_ensemble("whole", "part")
        await manager.load("whole")
        first = served.find("whole")
        repository.write("part/1/model.onnx", "other weights")
        await manager.load("part")
        assert served.find("whole") is first
        (spec,) = DOUBLER.inputs
        other = msgspec.structs.replace(spec, shape=(-1, 7))
        repository.loads.signature = msgspec.structs.replace(DOUBLER, inputs=(other,))
        repository.write("part/1/model.onnx", "other tensors")
        await manager.load("part")
        assert served.find("whole") is not first

    tell(story)


def test_a_system_without_a_thread_to_spare_costs_no_seat(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, work: object) -> None:
        raise RuntimeError("can't start new thread")

    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "one")
        with monkeypatch.context() as patch:
            patch.setattr(module, "on_daemon_thread", refuse)
            for _ in range(3):
                with pytest.raises(PenstockError, match="cannot start a thread"):
                    await repository.manager.load("m")
        await repository.manager.load("m")

    tell(story)


def test_a_server_that_ends_loads_nothing_more(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "one")
        await repository.manager.close(1)
        with pytest.raises(Unavailable, match="the server is shutting down"):
            await repository.manager.load("m")

    tell(story)


def test_files_put_in_place_of_others_go_with_the_server_unless_another_process_serves_from_them(
    tmp_path: Path,
) -> None:
    own = Override("{}", str(store({"1/model.onnx": b"own"})))
    lent = Override("{}", str(store({"1/model.onnx": b"lent"})))
    lock = os.open(lent.folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)

    async def main() -> None:
        async with Repository(tmp_path) as repository:
            await repository.manager.load("m", own)
            await repository.manager.load("n", lent)
            await repository.manager.unload("n")
            await repository.settled()
            assert Path(own.folder).exists()
        assert not Path(own.folder).exists()

    asyncio.run(main())
    assert Path(lent.folder).exists(), "another process still serves from it"
    os.close(lock)
    discard(lent.folder)
    assert not Path(lent.folder).exists()
