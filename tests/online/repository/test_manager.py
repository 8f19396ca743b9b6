import asyncio

import pytest

from penstock.errors import AlreadyExists, NotFound
from penstock.online.repository.handle import Handle
from penstock.online.repository.input_check import InputCheck
from penstock.online.repository.manager import Repository
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.instance import Instance
from penstock.testing import DOUBLER, FakeModel


def make_handle(name: str, version: str, model: FakeModel) -> Handle:
    batcher = DynamicBatcher(BatchingConfig(batchable=True, max_batch=8), asyncio.get_running_loop())
    handle = Handle(
        name, version, "fake", InputCheck(name, DOUBLER, 8), batcher, [model], [Instance(name, model, batcher)]
    )
    handle.start()
    return handle


def test_look_up_by_name_and_version_and_unloading() -> None:
    async def main() -> None:
        repository = Repository()
        for version in ("2", "10", "9"):
            repository.add(make_handle("m", version, FakeModel()))
        with pytest.raises(AlreadyExists):
            repository.add(repository.find("m", "2"))
        assert repository.versions("m") == ["2", "9", "10"]
        assert repository.find("m").version == "10", "the greatest number, not the last word in the alphabet"
        assert repository.acquire("m", "2").version == "2"
        repository.find("m", "2").release()
        with pytest.raises(NotFound, match="Request for unknown model: 'n' is not found"):
            repository.acquire("n")
        with pytest.raises(NotFound, match="'m' version 3 is not found"):
            repository.acquire("m", "3")
        await repository.unload("m", "10")
        assert repository.acquire("m").version == "9"
        repository.find("m").release()
        await repository.unload_all()
        assert repository.names() == []

    asyncio.run(main())


def test_unloading_waits_for_those_who_hold_it() -> None:
    async def main() -> None:
        model, repository = FakeModel(), Repository()
        repository.add(make_handle("m", "1", model))
        held = [repository.acquire("m"), repository.acquire("m")]
        unloading = asyncio.ensure_future(repository.unload("m", "1"))
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            repository.acquire("m")
        for handle in held:
            assert model.loaded
            assert not unloading.done()
            handle.release()
            await asyncio.sleep(0)
        await unloading
        assert not model.loaded

    asyncio.run(main())
