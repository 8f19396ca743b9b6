"""Models that are loaded, changed and unloaded while requests arrive."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fake_repository import PATIENCE_S, Repository, Story, run_story
from penstock.errors import InvalidArgument, InvalidConfig, NotFound, PenstockError
from penstock.online.repository.manager import LoadFailed
from penstock.online.repository.override import Override, store
from penstock.online.repository.seats import Seats
from penstock.online.repository.triton.schema import to_json
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.tensor import Array
from penstock.testing import FakeModel, double


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[Story], None]:
    return partial(run_story, tmp_path)


def test_load_reload_and_unload(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads = repository.manager, repository.loads
        repository.write("m/1/model.onnx", "one")
        repository.write("other/1/model.onnx")
        assert await manager.index() == [{"name": "m"}, {"name": "other"}], "never loaded: just their names"
        await manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}
        row = {"name": "m", "version": "1", "state": "READY", "reason": "", "generation": 1}
        assert await manager.index() == [row, {"name": "other"}]
        first = repository.served.find("m")
        await manager.load("m")
        assert repository.served.find("m") is first, "nothing has changed"
        repository.write("m/1/model.onnx", "two")
        await manager.load("m")
        assert repository.served.find("m").identity == "two"
        await repository.until(lambda: loads.alive == 1)
        await manager.unload("m")
        assert repository.served.names() == []
        await repository.until(lambda: loads.alive == 0)
        await repository.settled()
        assert await repository.states("m") == {"1": ("UNAVAILABLE", "unloaded")}
        await manager.unload("m")
        await manager.unload("absent")
        assert loads.begun == ["m/1", "m/1"]

    tell(story)


def test_a_failing_new_version_leaves_the_old_one(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "good")
        await repository.manager.load("m")
        for text in ("broken", "contradicts"):
            repository.write("m/1/model.onnx", text)
            with pytest.raises(LoadFailed, match="load failed for model 'm': version 1 is at UNAVAILABLE state: the"):
                await repository.manager.load("m")
            ((state, reason),) = (await repository.states("m")).values()
            assert state == "READY"
            assert text in reason or "contradicts" in reason
            assert repository.served.find("m").identity == "good"
            await repository.ask("m")
        repository.write("m/config.pbtxt", "no_such_field: 1")
        with pytest.raises(
            InvalidConfig, match="failed to load 'm', failed to poll from model repository: m/config.pbtxt"
        ):
            await repository.manager.load("m")
        await repository.ask("m")
        (repository.root / "m/config.pbtxt").unlink()
        repository.write("m/1/model.onnx", "better")
        await repository.manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}
        assert repository.served.find("m").identity == "better"

    tell(story)


def test_what_cannot_be_loaded(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        for number in range(20):
            with pytest.raises(
                PenstockError, match=f"failed to load 'absent{number}', failed to poll from model repository"
            ):
                await manager.load(f"absent{number}")
        assert await manager.index() == [], "names that clients make up are not kept"
        repository.write("empty/labels.txt")
        with pytest.raises(
            InvalidConfig, match="at least one version must be available under the version policy of model 'empty'"
        ):
            await manager.load("empty")
        for number in ("0", "01", "9223372036854775808"):
            repository.write(f"empty/{number}/model.onnx", "one")
        with pytest.raises(InvalidConfig, match="at least one version") as refused:
            await manager.load("empty")
        assert refused.value.hint.endswith("into a folder named '1', not '0', '01', '9223372036854775808'")
        repository.write("m/1/model.onnx", "broken")
        repository.write("m/config.pbtxt", "version_policy { specific { versions: [1, 3] } }")
        with pytest.raises(
            LoadFailed,
            match="version 3 is at UNAVAILABLE state: version 3 of model 'm' is not in the repository; version 1 is at",
        ) as caught:
            await manager.load("m")
        assert isinstance(caught.value, InvalidArgument)
        states = await repository.states("m")
        assert states == {
            "1": ("UNAVAILABLE", "the file says broken"),
            "3": ("UNAVAILABLE", "version 3 of model 'm' is not in the repository (it has: 1)"),
        }
        assert (await repository.states("empty"))[""][0] == "UNAVAILABLE"

    tell(story)


def test_a_change_of_versions_loads_and_unloads_only_those(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads = repository.manager, repository.loads
        for number in (1, 2, 3):
            repository.write(f"m/{number}/model.onnx", str(number))
        repository.write("m/config.pbtxt", "version_policy { latest { num_versions: 2 } }")
        await manager.load("m")
        assert repository.served.versions("m") == ["2", "3"]
        kept = repository.served.find("m", "3")
        repository.write("m/4/model.onnx", "broken")
        with pytest.raises(LoadFailed):
            await manager.load("m")
        assert repository.served.versions("m") == ["2", "3"], "nothing goes if what is new cannot come"
        repository.write("m/4/model.onnx", "4")
        await manager.load("m")
        assert repository.served.versions("m") == ["3", "4"]
        assert repository.served.find("m", "3") is kept
        assert sorted(loads.begun) == ["m/2", "m/3", "m/4", "m/4"]
        await repository.settled()
        assert await repository.states("m") == {
            "2": ("UNAVAILABLE", "unloaded"),
            "3": ("READY", ""),
            "4": ("READY", ""),
        }

    tell(story)


def test_a_version_is_unloaded_only_when_its_last_request_has_its_answer(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads, gate = repository.manager, repository.loads, threading.Event()

        def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
            assert gate.wait(PATIENCE_S)
            return double(inputs)

        loads.forward = forward
        repository.write("m/1/model.onnx", "one")
        await manager.load("m")
        asked = asyncio.ensure_future(repository.ask("m"))
        await asyncio.sleep(0)
        await manager.unload("m")
        assert await repository.states("m") == {"1": ("UNLOADING", "")}
        with pytest.raises(NotFound):
            repository.served.find("m")
        await manager.load("m")
        assert await repository.states("m") == {"1": ("READY", "")}, "it may be loaded again at once"
        assert loads.alive == 2
        gate.set()
        await asked
        await repository.settled()
        assert await repository.states("m") == {"1": ("READY", "")}, "that the earlier one has gone changes nothing"
        assert loads.alive == 1

    tell(story)


def test_operations_on_a_model_keep_their_order_and_equal_loads_are_one(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager, loads = repository.manager, repository.loads
        repository.write("m/1/model.onnx", "one")
        gate = loads.gates["m/1"] = threading.Event()
        first = asyncio.ensure_future(manager.load("m"))
        await repository.until(lambda: bool(loads.begun))
        assert await repository.states("m") == {"1": ("LOADING", "")}
        unload = asyncio.ensure_future(manager.unload("m"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(manager.load("m")) for _ in range(50)]
        await asyncio.sleep(0)
        assert not unload.done()
        gate.set()
        await asyncio.gather(first, unload, *others)
        assert loads.begun == ["m/1", "m/1"]
        assert await repository.states("m") == {"1": ("READY", "")}

    tell(story)


def test_who_goes_away_does_not_stop_what_was_begun(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        loads = repository.loads
        repository.write("m/1/model.onnx", "one")
        gate = loads.gates["m/1"] = threading.Event()
        client = asyncio.ensure_future(repository.manager.load("m"))
        await repository.until(lambda: bool(loads.begun))
        client.cancel()
        gate.set()
        await repository.until(lambda: repository.served.names() == ["m"])

    tell(story)


def test_different_models_load_side_by_side_but_not_too_many(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        loads, names = repository.loads, [f"m{number}" for number in range(12)]
        for name in names:
            repository.write(f"{name}/1/model.onnx", name)
        loads.gates = {f"{name}/1": threading.Event() for name in names}
        work = asyncio.gather(*map(repository.manager.load, names))
        await repository.until(lambda: len(loads.begun) == 2)
        for gate in loads.gates.values():
            gate.set()
        await work
        assert loads.most_at_once == 2

    tell(story)


class Waiting:
    """A process that only waits."""

    def used_s(self) -> float:
        return 0.3

    def end_at_once(self) -> None:
        """It has no end."""


def test_loads_that_hang_soon_give_up_their_seats(tmp_path: Path) -> None:
    """Otherwise two models whose ``initialize`` never returns would prevent all others from being loaded for many seconds."""

    async def story() -> None:
        timers: list[tuple[float, Callable[[], None]]] = []
        seats = Seats(1, lambda delay_s, callback: timers.append((delay_s, callback)))
        async with Repository(tmp_path, seats=seats) as repository:
            loads, now = repository.loads, 0.0
            hanging = {f"m{number}/1": threading.Event() for number in range(6)}
            loads.gates, loads.processes = dict(hanging), {which: Waiting() for which in hanging}
            names = [f"m{number}" for number in range(7)]
            for name in names:
                repository.write(f"{name}/1/model.onnx", name)
            work = [asyncio.ensure_future(repository.manager.load(name)) for name in names]

            def hung() -> int:
                return sum(which in hanging for which in loads.begun)

            for seats_taken in (2, 4, 6):
                await repository.until(lambda: work[6].done() or hung() == seats_taken)  # noqa: B023 - awaited at once
                for _ in range(5):
                    delay_s, look = timers.pop()
                    now += delay_s
                    look()
            await asyncio.wait_for(work[6], PATIENCE_S)
            assert now <= 3 * 1.25
            assert not any(load.done() for load in work[:6])
            for gate in hanging.values():
                gate.set()
            await asyncio.gather(*work)

    asyncio.run(story())


def test_a_model_whose_files_change_while_it_is_read_is_read_again(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        loads = repository.loads
        repository.write("m/1/model.onnx", "half")
        texts = iter(["whole"])

        def write_once() -> None:
            for text in texts:
                repository.write("m/1/model.onnx", text)

        loads.while_loading = write_once
        await repository.manager.load("m")
        assert repository.served.find("m").identity == "whole"
        assert len(loads.begun) == 2
        loads.while_loading = lambda: repository.write("m/1/model.onnx", "longer" * len(loads.begun))
        repository.write("m/1/model.onnx", "longer")
        with pytest.raises(LoadFailed, match="are being written"):
            await repository.manager.load("m")
        assert repository.served.find("m").identity == "whole"

    tell(story)


def test_a_plain_load_undoes_what_was_put_in_place_of_the_files(
    tell: Callable[[Story], None],
) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager

        def override(text: str) -> Override:
            return Override("{}", str(store({"5/model.onnx": text.encode()})))

        repository.write("m/1/model.onnx", "disk")
        await manager.load("m")
        first = override("given")
        await manager.load("m", first)
        assert repository.served.versions("m") == ["5"]
        broken = override("broken")
        with pytest.raises(LoadFailed):
            await manager.load("m", broken)
        assert repository.served.find("m").identity == "given", "what failed changes nothing"
        await repository.until(lambda: not Path(broken.folder).exists())
        assert Path(first.folder).exists()
        await manager.load("m")
        assert repository.served.versions("m") == ["1"], "though the repository's files have not changed"
        assert repository.served.find("m").identity == "disk"
        await repository.until(lambda: not Path(first.folder).exists())
        second = override("only given")
        await manager.load("new", second)
        assert repository.served.find("new").identity == "only given"
        await manager.unload("new")
        await repository.until(lambda: not Path(second.folder).exists())
        assert await repository.states("new") == {}, "nothing is left of a model that no repository holds"
        with pytest.raises(PenstockError, match="failed to load 'new'"):
            await manager.load("new")

    tell(story)


def test_loads_for_an_ensemble_keep_what_was_put_in_place_of_its_parts(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        for name in ("a", "b"):
            repository.write(f"{name}/1/model.onnx", name)
        repository.write_ensemble("inner", "a")
        repository.write_ensemble("outer", "inner")
        config = to_json(repository.layout.define("inner").given)
        config["ensemble_scheduling"]["step"][0]["model_name"] = "b"
        override = Override(json.dumps(config))

        async def parts() -> set[str]:
            """The models that were loaded only for an ensemble that is no longer served."""
            for name in ("a", "b"):
                await manager.unload(name)
            assert not repository.served.names()
            await manager.load("outer")
            return {"a", "b"} & set(repository.served.names())

        await manager.load("inner", override)
        assert await parts() == {"b"}
        await asyncio.gather(manager.load("inner"), manager.load("inner", override))
        assert await parts() == {"b"}, "the later request counts"
        await asyncio.gather(manager.load("inner", override), manager.load("inner"))
        assert await parts() == {"a"}

    tell(story)


def test_the_parts_of_an_ensemble_come_first_and_those_that_came_along_may_go_with_it(
    tell: Callable[[Story], None],
) -> None:
    async def story(repository: Repository) -> None:
        manager, served = repository.manager, repository.served
        for name in ("a", "b"):
            repository.write(f"{name}/1/model.onnx", name)
        repository.write_ensemble("both", "a", "b")
        repository.write_ensemble("outer", "both")
        await manager.load("a")
        await manager.load("outer")
        assert served.names() == ["a", "b", "both", "outer"]
        await manager.unload("outer", with_parts=True)
        assert served.names() == ["a"], "asked for by name"
        await manager.load("outer")
        await manager.unload("outer")
        assert served.names() == ["a", "b", "both"]
        await manager.unload("b")
        assert served.names() == ["a"], "what needs it cannot be served either"

    tell(story)


def test_ensembles_that_need_themselves_or_what_cannot_be_loaded(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        for name, part in (("self", "self"), ("a", "b"), ("b", "a"), ("lonely", "absent")):
            repository.write_ensemble(name, part)
        outcomes = await asyncio.gather(*map(manager.load, ("self", "a", "b", "lonely")), return_exceptions=True)
        assert all(isinstance(outcome, InvalidConfig) for outcome in outcomes), outcomes
        assert "is the ensemble itself" in str(outcomes[0])
        assert any("which needs '" in str(outcome) for outcome in outcomes[1:3])
        assert "needs 'absent': failed to load 'absent'" in str(outcomes[3])

    tell(story)


def test_a_poll_sees_changes_once_they_are_quiet(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager

        async def poll() -> list[tuple[str, bool]]:
            changes = await manager.changes()
            for name, is_there in changes:
                work: Awaitable[None] = manager.load(name, is_due=True) if is_there else manager.unload(name)
                await asyncio.gather(work, return_exceptions=True)
            return changes

        repository.write("m/1/model.onnx", "one")
        repository.write("still/1/model.onnx", "one")
        await manager.start({"m": None, "still": None}, 1, 1)
        assert [await poll() for _ in range(3)] == [[], [], []], "what has not changed is left alone"
        repository.write("m/1/model.onnx", "broken, a half")
        assert await poll() == []
        repository.write("m/1/model.onnx", "whole and longer")
        assert await poll() == [], "still being written"
        assert await poll() == [("m", True)]
        assert repository.served.find("m").identity == "whole and longer"
        repository.write("m/1/model.onnx", "broken")
        repository.write("new/1/model.onnx", "broken")
        assert [await poll() for _ in range(4)] == [[], [("m", True), ("new", True)], [], []], "tried once"
        assert repository.served.find("m").identity == "whole and longer"
        assert not manager.is_complete, "'new' should be served"
        shutil.rmtree(repository.root / "m")
        repository.write("new/1/model.onnx", "good")
        assert [await poll() for _ in range(3)] == [[], [("m", False), ("new", True)], []]
        assert manager.is_complete
        assert repository.served.names() == ["still", "new"]

    tell(story)


def test_a_part_that_is_mended_brings_its_ensemble_back(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        manager = repository.manager
        repository.write_ensemble("whole", "part")
        repository.write("part/1/model.onnx", "broken")
        assert set(await manager.start({"whole": None, "part": None}, 1, 2)) == {"whole", "part"}
        assert not manager.is_complete
        for _ in range(2):
            await manager.changes()
        repository.write("part/1/model.onnx", "good")
        await manager.changes()
        assert await manager.changes() == [("part", True)]
        await manager.load("part", is_due=True)
        assert repository.served.names() == ["part", "whole"]
        assert manager.is_complete

    tell(story)


class Crowd:
    """Clients and operators of a repository that act at random, by ``chance``."""

    def __init__(self, repository: Repository, names: list[str], chance: random.Random) -> None:
        self.repository, self.names, self.chance = repository, names, chance
        self.last: dict[str, str] = {}
        """The last requested operation, by model."""
        self.answered = Counter[str]()
        self.is_over = False

    async def ask(self) -> None:
        while not self.is_over:
            name = self.chance.choice([*self.names, "stays"])
            try:
                await self.repository.ask(name)
                self.answered[name] += 1
            except NotFound:
                assert name != "stays"
            await asyncio.sleep(0)

    async def operate(self, number: int) -> None:
        for step in range(12):
            name, what = self.chance.choice(self.names), self.chance.choice(["load", "unload", "change"])
            if what == "change":
                self.repository.write(f"{name}/1/model.onnx", self.chance.choice(["broken", f"{number} {step}"]))
                continue
            self.last[name] = what
            manager = self.repository.manager
            with suppress(LoadFailed):
                await (manager.load(name) if what == "load" else manager.unload(name))
            await asyncio.sleep(self.chance.choice([0, 0, 0.001]))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_clients_do_at_once_the_last_word_holds_and_no_request_is_lost(
    tell: Callable[[Story], None], seed: int
) -> None:
    async def story(repository: Repository) -> None:
        manager, names = repository.manager, ["a", "b", "c"]
        for name in [*names, "stays"]:
            repository.write(f"{name}/1/model.onnx", "0")
        await manager.load("stays")
        crowd = Crowd(repository, names, random.Random(seed))
        clients = [asyncio.ensure_future(crowd.ask()) for _ in range(3)]
        await asyncio.gather(*map(crowd.operate, range(4)))
        loaded = {name for name in names if crowd.last.get(name) == "load"}
        for name in loaded:
            repository.write(f"{name}/1/model.onnx", "good at last")
            await manager.load(name)
        crowd.is_over = True
        await asyncio.gather(*clients)
        await repository.settled()
        assert set(repository.served.names()) == loaded | {"stays"}
        for name in loaded:
            assert repository.served.find(name).identity == "good at last"
            assert await repository.states(name) == {"1": ("READY", "")}
        assert repository.loads.alive == len(loaded) + 1, "one handle a version"
        assert crowd.answered["stays"]

    tell(story)


def test_instances_come_and_go_while_the_model_is_asked(tell: Callable[[Story], None]) -> None:
    async def story(repository: Repository) -> None:
        repository.write("m/1/model.onnx", "one")
        await repository.manager.load("m")
        handle = repository.served.find("m")
        more = [FakeModel(), FakeModel()]
        handle.grow(more)
        assert handle.instance_count == handle.config.instance_group[0].count == 3
        assert isinstance(handle.scheduler, DynamicBatcher)
        assert handle.scheduler.instances == 3
        await asyncio.gather(*(repository.ask("m") for _ in range(50)))
        handle.shrink(2)
        assert handle.instance_count == handle.config.instance_group[0].count == 1
        await asyncio.gather(*(repository.ask("m") for _ in range(50)))
        everything = [*repository.loads.models, *more]
        await repository.until(lambda: sum(model.loaded for model in everything) == 1)
        assert handle.scheduler.instances == 1

    tell(story)
