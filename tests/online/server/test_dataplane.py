import asyncio

import numpy as np
import pytest

from penstock.errors import Code, PenstockError
from penstock.online.repository.handle import Handle
from penstock.online.repository.manager import Repository
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.server.dataplane import DataPlane
from penstock.request import InferRequest, Outcome
from penstock.testing import FakeModel


def broken(request: InferRequest) -> tuple[int, object]:
    raise TypeError("a bug")


def test_a_bug_in_a_check_is_answered_and_the_model_let_go(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[Outcome]:
        repository, outcomes = Repository(), []
        batcher = DynamicBatcher(BatchingConfig(batchable=True), asyncio.get_running_loop())
        handle = Handle("m", "1", "fake", broken, batcher, [FakeModel()], [])  # type: ignore[arg-type]
        repository.add(handle)
        DataPlane(repository).infer(InferRequest("m", {"x": np.zeros((1, 2), np.float32)}), outcomes.append)
        assert handle.users == 0
        return outcomes

    (outcome,) = asyncio.run(main())
    assert isinstance(outcome, PenstockError)
    assert (outcome.code, outcome.message) == (Code.INTERNAL, "internal error")
    assert "a bug" in caplog.text
