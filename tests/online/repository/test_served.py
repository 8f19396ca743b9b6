"""The repository: look-up by name and version, and unloading."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from handles import make_handle
from penstock.errors import NotFound
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.request import InferRequest, InferResponse
from penstock.tensor import Array
from penstock.testing import FakeModel, double


def started(name: str, version: str, model: FakeModel) -> Handle:
    handle = make_handle(model, name, version)
    handle.start()
    return handle


def test_look_up_by_name_and_version_and_unloading() -> None:
    async def main() -> None:
        repository = ServedModels()
        for version in ("2", "10", "9"):
            repository.add(started("m", version, FakeModel()))
        old, new = repository.find("m", "2"), started("m", "2", FakeModel())
        assert repository.add(new) is old, "what it takes the place of is handed back"
        assert repository.find("m", "2") is new
        await old.unload()
        assert repository.versions("m") == ["2", "9", "10"]
        assert repository.find("m").version == "10", "the greatest number, not the last word in the alphabet"
        assert repository.find("m", "2").version == "2"
        with pytest.raises(NotFound, match="Request for unknown model: 'n' is not found"):
            repository.find("n")
        with pytest.raises(NotFound, match="'m' version 3 is not found") as absent:
            repository.find("m", "3")
        assert absent.value.hint == "its versions are 2, 9, 10"
        await repository.remove("m", "10").unload()
        assert repository.find("m").version == "9"
        await repository.unload_all()
        assert repository.names() == []

    asyncio.run(main())


def test_unloading_waits_for_what_was_asked_of_it() -> None:
    async def main() -> None:
        gate, outcomes = threading.Event(), []

        def forward(inputs: Mapping[str, Array]) -> dict[str, Array]:
            assert gate.wait(20)
            return double(inputs)

        model, repository = FakeModel(forward=forward), ServedModels()
        repository.add(started("m", "1", model))
        handle, request = repository.find("m"), InferRequest("m", {"x": np.ones((1, 2), np.float32)})
        handle.scheduler.submit(request, 1, None, outcomes.append)
        unloading = asyncio.ensure_future(repository.remove("m", "1").unload())
        await asyncio.sleep(0)
        with pytest.raises(NotFound):
            repository.find("m")
        assert model.loaded
        assert not unloading.done()
        gate.set()
        await unloading
        assert [type(outcome) for outcome in outcomes] == [InferResponse]
        assert not model.loaded

    asyncio.run(main())
