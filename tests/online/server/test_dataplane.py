"""The data plane over real schedulers and fake models."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from handles import make_handle
from penstock.clock import ManualClock, SystemClock
from penstock.errors import Code, NotFound, PenstockError, PermissionDenied, Unavailable
from penstock.online.cache.response_cache import ResponseCache
from penstock.online.repository.handle import Handle
from penstock.online.repository.served import ServedModels
from penstock.online.server.access.admission import Admission
from penstock.online.server.access.auth import Access
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer
from penstock.testing import FakeModel, FakeStreamingModel

ONES = {"x": np.ones((1, 2), np.float32)}


class Bench:
    """A data plane with one model ``m``, which is not started, so that requests stay in its queue."""

    def __init__(self, handle: Handle, admission: Admission | None = None) -> None:
        self.handle = handle
        self.clock = ManualClock(1000.0)
        repository = ServedModels()
        repository.add(handle)
        shared_memory = SharedMemory(enabled=False)
        tracer = Tracer(TraceSettings())
        self.complete = True
        self.plane = DataPlane(
            repository, self.clock, shared_memory, tracer, admission, is_complete=lambda: self.complete
        )
        self.outcomes: list[Outcome] = []

    def ask(self, decoupled: bool = False, **more: Any) -> Any:
        return self.infer(InferRequest("m", dict(ONES), **more), decoupled)

    def infer(self, request: InferRequest, decoupled: bool = False) -> Any:
        handle = self.plane.acquire(request.model_name, request.model_version, request.client)
        return self.plane.infer(handle, request, self.outcomes.append, decoupled)

    async def answers(self, count: int) -> list[Outcome]:
        while len(self.outcomes) < count:
            await asyncio.sleep(0)
        return self.outcomes

    @property
    def failed(self) -> PenstockError:
        (outcome,) = self.outcomes
        assert isinstance(outcome, PenstockError)
        return outcome


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))  # type: ignore[arg-type]

    run.__signature__ = __import__("inspect").signature(test)  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return run


@in_loop
async def test_a_request_is_answered_by_the_greatest_version() -> None:
    bench = Bench(make_handle(FakeModel()))
    bench.handle.start()
    assert bench.ask(id="7") is not None
    (outcome,) = await bench.answers(1)
    assert isinstance(outcome, InferResponse)
    assert (outcome.id, outcome.model_version, outcome.outputs["y"].tolist()) == ("7", "1", [[2.0, 2.0]])
    await bench.handle.unload()


@in_loop
async def test_an_unknown_model_is_not_found() -> None:
    bench = Bench(make_handle(FakeModel()))
    bench.plane.open()
    with pytest.raises(NotFound, match="Request for unknown model: 'n' is not found"):
        bench.plane.acquire("n")
    with pytest.raises(NotFound, match="Request for unknown model: 'm' version 2 is not found"):
        bench.plane.acquire("m", "2")


@in_loop
async def test_an_unknown_model_can_be_asked_again_while_the_server_starts() -> None:
    bench = Bench(make_handle(FakeModel()))
    with pytest.raises(Unavailable, match="'n' is not found; the server is starting or shutting down") as caught:
        bench.plane.acquire("n")
    assert caught.value.hint == "try again later"


@in_loop
async def test_readiness() -> None:
    bench = Bench(make_handle(FakeModel()))
    assert not bench.plane.server_ready
    bench.plane.open()
    assert bench.plane.server_ready
    bench.complete = False
    assert (bench.plane.is_open, bench.plane.server_ready) == (True, False)
    bench.complete = True
    bench.plane.close()
    assert not bench.plane.server_ready


@in_loop
async def test_a_bug_in_the_scheduler_is_answered_and_the_client_let_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients.team]\nkey = "team-team-team-team"\nmax_concurrent = 1\n')
    bench = Bench(make_handle(FakeModel()), Admission(Access(keys, ManualClock()), ManualClock()))

    def broken(*arguments: object) -> None:
        raise TypeError("a bug")

    bench.handle.scheduler.submit = broken  # type: ignore[method-assign, assignment]
    for _ in range(2):
        assert bench.ask(client="team") is None
        assert (bench.failed.code, bench.failed.message) == (Code.INTERNAL, "internal error")
        bench.outcomes.clear()
    assert "a bug" in caplog.text


@in_loop
async def test_a_bug_in_a_check_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(make_handle(FakeModel()))

    def broken(request: InferRequest) -> tuple[int, object]:
        raise TypeError("a bug")

    bench.handle.check = broken  # type: ignore[assignment]
    assert bench.ask() is None
    assert (bench.failed.code, bench.failed.message) == (Code.INTERNAL, "internal error")
    assert "a bug" in caplog.text
    assert bench.handle.statistics.failures[Failure.OTHER] == 1


@in_loop
async def test_priority_and_time_out_are_read_and_left_where_they_are() -> None:
    bench = Bench(make_handle(FakeModel()))
    parameters = {"priority": 2, "timeout": 500_000, "mine": "x"}
    request = InferRequest("m", dict(ONES), parameters=parameters)
    bench.infer(request)
    assert (request.priority, request.timeout_us) == (2, 500_000)
    assert request.deadline is not None
    assert request.deadline.at == pytest.approx(1000.498), "there is a way to it and back"
    assert parameters == {"priority": 2, "timeout": 500_000, "mine": "x"}, "requests may share them"


@in_loop
async def test_where_the_queue_takes_the_callers_time_out_it_is_no_deadline() -> None:
    policy = {"allow_timeout_override": True, "default_timeout_microseconds": 10**6}
    bench = Bench(make_handle(FakeModel(), settings={"dynamic_batching": {"default_queue_policy": policy}}))
    request = InferRequest("m", dict(ONES), parameters={"timeout": 5})
    bench.infer(request)
    assert (request.timeout_us, request.deadline) == (5, None)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"priority": -1}, "parameter 'priority' has invalid value -1"),
        ({"timeout": True}, "parameter 'timeout' has invalid value True"),
        ({"timeout": 2**64}, "parameter 'timeout' has invalid value"),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
    ],
)
def test_parameters_that_are_wrong(parameters: dict[str, Any], message: str) -> None:
    async def main() -> None:
        bench = Bench(make_handle(FakeModel()))
        assert bench.ask(parameters=parameters) is None
        assert bench.failed.code is Code.INVALID_ARGUMENT
        assert bench.failed.message.startswith(message)

    asyncio.run(main())


@in_loop
async def test_a_decoupled_model_is_only_for_those_who_take_several_answers() -> None:
    bench = Bench(make_handle(FakeStreamingModel()))
    assert bench.ask() is None
    assert bench.failed.code is Code.UNIMPLEMENTED
    bench.outcomes.clear()
    bench.handle.start()
    bench.ask(decoupled=True)
    while not bench.outcomes or not getattr(bench.outcomes[-1], "final", True):
        await asyncio.sleep(0)
    assert len(bench.outcomes) > 1
    await bench.handle.unload()


@in_loop
async def test_what_waits_can_be_cancelled() -> None:
    bench = Bench(make_handle(FakeModel()))
    pending = bench.ask()
    pending.cancel()
    assert bench.failed.code is Code.CANCELLED
    assert bench.handle.statistics.pending == 0


@in_loop
async def test_a_model_with_the_cache_is_asked_once() -> None:
    model = FakeModel()
    cache = ResponseCache(1 << 20, SystemClock()).of("digest", "1", ModelStatistics(), 10)
    bench = Bench(make_handle(model, cache=cache))
    bench.handle.start()
    bench.ask()
    await bench.answers(1)
    assert bench.ask() is None, "answered before it returns"
    assert [outcome.outputs["y"].tolist() for outcome in bench.outcomes] == [[[2.0, 2.0]]] * 2  # type: ignore[union-attr]
    assert len(model.calls) == 1
    await bench.handle.unload()


@in_loop
async def test_a_client_is_held_to_its_rights_also_those_asked_for_by_parameter(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[clients.team]\nkey_sha256 = "{digest}"\nmodels = ["m"]\nhighest_priority = 2\n')
    bench = Bench(make_handle(FakeModel()), Admission(Access(keys, ManualClock()), ManualClock()))
    assert bench.ask(client="team", parameters={"priority": 1}) is None
    assert bench.failed.code is Code.PERMISSION_DENIED
    assert bench.handle.statistics.failures[Failure.REJECTED] == 1
    assert bench.ask(client="team", parameters={"priority": 2}) is not None


@in_loop
async def test_nobody_learns_of_models_without_the_right_to_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients.team]\nkey = "team-team-team-team"\nmodels = ["other"]\n')
    bench = Bench(make_handle(FakeModel()), Admission(Access(keys, ManualClock()), ManualClock()))
    bench.plane.open()
    with pytest.raises(PermissionDenied):
        bench.plane.acquire("absent", client="team")
    with pytest.raises(NotFound):
        bench.plane.acquire("other", client="team")
    assert bench.ask(client="team") is None
    assert bench.failed.code is Code.PERMISSION_DENIED


@in_loop
async def test_the_parameter_for_streams_is_accepted_everywhere_and_not_seen_by_models() -> None:
    bench = Bench(make_handle(FakeModel()))
    given = {"triton_enable_empty_final_response": True, "a": 1}
    request = InferRequest("m", dict(ONES), parameters=given)
    assert bench.infer(request) is not None
    assert (request.parameters, len(given)) == ({"a": 1}, 2), "the mapping may belong to other requests too"


@in_loop
async def test_a_request_is_checked_by_its_outline(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[clients.team]\nkey = "team-team-team-team"\nmodels = ["m"]\n')
    bench = Bench(make_handle(FakeModel()), Admission(Access(keys, ManualClock()), ManualClock()))
    bench.plane.check(InferRequest("m", dict(ONES)), "team")
    wrong = InferRequest("m", {"x": np.broadcast_to(np.zeros((), np.float32), (1 << 40, 2))})
    for request, client, code in ((wrong, "team", Code.INVALID_ARGUMENT), (wrong, "other", Code.PERMISSION_DENIED)):
        with pytest.raises(PenstockError) as caught:
            bench.plane.check(request, client)
        assert caught.value.code is code
    assert sum(bench.handle.statistics.failures.values()) == 2
    with pytest.raises(PenstockError):
        bench.plane.check(InferRequest("absent", {}), "team")
