import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.errors import InvalidConfig, Unavailable
from penstock.online.cache.answer import CachedAnswer, freeze
from penstock.online.cache.response_cache import ModelCache, ResponseCache, open_cache
from penstock.online.scheduler.base import Cancellable
from penstock.request import Done, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import Failure, ModelStatistics


class Model:
    """The model ``y = 2x``; it answers immediately, or the test answers the requests in ``running``."""

    def __init__(
        self, cache: ResponseCache, identity: str = "digest", version: str = "1", at_once: bool = True
    ) -> None:
        self.statistics = ModelStatistics("m", version)
        self.cache = cache.of(identity, version, self.statistics, max_waiting=4)
        self.at_once = at_once
        self.version = version
        self.runs = 0
        self.running: list[tuple[InferRequest, Done]] = []
        self.outcomes: list[Outcome] = []

    def ask(self, value: float, width: int = 2, **more: object) -> Cancellable | None:
        return self.send(InferRequest("m", {"x": np.full((1, width), value, np.float32)}, self.version, **more))  # type: ignore[arg-type]

    def send(self, request: InferRequest) -> Cancellable | None:
        return self.cache.answer(request, self.outcomes.append, lambda done: self._submit(request, done))

    def answer(self) -> None:
        request, done = self.running.pop(0)
        done(InferResponse("m", self.version, {"y": request.inputs["x"] * 2}, request.id))

    @property
    def values(self) -> list[float]:
        return [float(outcome.outputs["y"][0, 0]) for outcome in self.outcomes]  # type: ignore[union-attr]

    def _submit(self, request: InferRequest, done: Done) -> Cancellable | None:
        self.runs += 1
        self.running.append((request, done))
        if self.at_once:
            self.answer()
            return None
        return asyncio.Event()  # type: ignore[return-value]  # nobody cancels it here


class Shelf:
    """A second tier that records its calls, and answers immediately or when the test says so."""

    def __init__(self, at_once: bool = True) -> None:
        self.kept: dict[bytes, CachedAnswer] = {}
        self.at_once = at_once
        self.asked: list[Callable[[], None]] = []
        self.cancelled = 0
        self.closed = False

    def get(self, key: bytes, done: Callable[[CachedAnswer | None], None]) -> Cancellable | None:
        if self.at_once:
            done(self.kept.get(key))
            return None
        self.asked.append(lambda: done(self.kept.get(key)))
        return self

    def put(self, key: bytes, answer: CachedAnswer) -> None:
        self.kept[key] = answer

    def cancel(self) -> None:
        self.cancelled += 1

    async def close(self) -> None:
        self.closed = True


def make(max_bytes: int = 1 << 20, second: Shelf | None = None) -> ResponseCache:
    return ResponseCache(max_bytes, ManualClock(), second)


def test_the_second_time_an_answer_comes_from_the_cache_under_the_request_s_own_id() -> None:
    model = Model(make())
    assert model.ask(1, id="a") is None
    assert model.ask(1, id="b") is None
    model.ask(2)
    assert model.runs == 2
    assert model.values == [2, 2, 4]
    assert [outcome.id for outcome in model.outcomes] == ["a", "b", ""]  # type: ignore[union-attr]
    stats = model.statistics
    assert (stats.hits.count, stats.misses.count, stats.success.count) == (1, 2, 1)


def test_models_versions_and_clients_do_not_share_answers() -> None:
    cache = make()
    models = [Model(cache), Model(cache, "other"), Model(cache, version="2")]
    for model in models:
        model.ask(1)
        model.ask(1, client="a")
        model.ask(1, client="b")
    assert [model.runs for model in models] == [3, 3, 3]
    again = Model(cache)
    again.ask(1)
    assert again.runs == 0


def test_a_request_without_a_key_goes_past_the_cache() -> None:
    cache = make()
    model = Model(cache)
    for _ in range(2):
        model.ask(1, parameters={"p": 1 << 70})
    assert (model.runs, len(cache), model.statistics.misses.count) == (2, 0, 0)


def test_the_least_recently_used_answer_leaves_first() -> None:
    one = freeze(InferResponse("m", "1", {"y": np.zeros((1, 2), np.float32)})).size_bytes
    cache = make(4 * one)
    model = Model(cache)
    for value in (1, 2, 3, 4, 1, 5):
        model.ask(value)
    assert len(cache) == 4
    before = model.runs
    for value in (1, 3, 4, 5):
        model.ask(value)
    assert model.runs == before
    model.ask(2)
    assert model.runs == before + 1


def test_an_answer_that_would_push_out_too_much_is_not_kept() -> None:
    cache = make(8000)
    model = Model(cache)
    model.ask(1)
    for _ in range(2):
        model.ask(1, width=600)
    assert (model.runs, len(cache)) == (3, 1)


def test_unloading_drops_a_version_s_answers_and_what_is_still_under_way_is_not_kept() -> None:
    cache = make()
    old, other = Model(cache), Model(cache, "other")
    for model in (old, other):
        model.ask(1)
        model.ask(2)
    old.at_once = False
    old.ask(3)
    old.cache.forget()
    old.answer()
    assert old.values == [2, 4, 6]
    assert len(cache) == 2
    assert cache.size_bytes > 0
    other.cache.forget()
    assert (len(cache), cache.size_bytes) == (0, 0)


@given(
    st.integers(500, 10_000),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from([1, 2, 50, 300, 3000])), max_size=60),
)
def test_it_never_takes_more_than_its_bytes_nor_gives_another_request_s_answer(
    max_bytes: int, asked: list[tuple[int, int, int]]
) -> None:
    cache = make(max_bytes)
    models = [Model(cache, str(number)) for number in range(3)]
    for number, value, width in asked:
        model = models[number]
        model.ask(value, width)
        (outcome,) = model.outcomes
        assert isinstance(outcome, InferResponse)
        np.testing.assert_array_equal(outcome.outputs["y"], np.full((1, width), 2 * value, np.float32))
        model.outcomes.clear()
        assert cache.size_bytes <= max_bytes
    for model in models:
        model.cache.forget()
    assert (cache.size_bytes, len(cache)) == (0, 0)


def test_equal_requests_at_one_time_run_once() -> None:
    model = Model(make(), at_once=False)
    pending = [model.ask(1, id=str(number)) for number in range(5)]
    assert all(each is not None for each in pending)
    model.ask(2)
    assert model.runs == 2
    model.answer()
    assert model.values == [2] * 5
    assert [outcome.id for outcome in model.outcomes] == list("01234")  # type: ignore[union-attr]
    assert (model.statistics.hits.count, model.statistics.misses.count) == (4, 2)
    model.ask(1)
    assert model.runs == 2


def test_an_urgent_request_does_not_wait_for_a_patient_one() -> None:
    model = Model(make(), at_once=False)
    model.ask(1, priority=2)
    model.ask(1, priority=1)
    assert model.runs == 2


def test_only_so_many_wait_for_others() -> None:
    model = Model(make(), at_once=False)
    for _ in range(5):
        model.ask(1)
    with pytest.raises(Unavailable, match="full") as caught:
        model.ask(1)
    assert caught.value.retry_after_s
    assert model.statistics.failures[Failure.REJECTED] == 1
    model.answer()
    for _ in range(5):
        model.ask(2)
    assert len(model.outcomes) == 5


def test_a_receiver_s_bug_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    def broken(outcome: Outcome) -> None:
        raise TypeError("a bug")

    model = Model(make(), at_once=False)
    request = InferRequest("m", {"x": np.ones((1, 2), np.float32)}, "1")
    model.ask(1)
    model.cache.answer(request, broken, lambda done: None)
    model.ask(1)
    model.answer()
    model.cache.answer(request, broken, lambda done: None)
    assert model.values == [2, 2]
    assert [record.message for record in caplog.records] == ["a receiver failed"] * 2


def test_a_miss_asks_the_second_tier_before_the_model_and_a_new_answer_goes_there() -> None:
    shelf = Shelf()
    first = Model(make(second=shelf))
    first.ask(1)
    assert (first.runs, len(shelf.kept)) == (1, 1)
    cache = make(second=shelf)
    second = Model(cache)
    second.ask(1, id="x")
    assert second.values == [2]
    assert (second.runs, second.statistics.hits.count, second.statistics.misses.count) == (0, 1, 0)
    shelf.kept.clear()
    second.ask(1)  # it was kept here too, and not given back there
    assert (second.runs, len(cache), shelf.kept) == (0, 1, {})


def test_all_wait_while_the_second_tier_is_asked_and_may_leave() -> None:
    shelf = Shelf()
    Model(make(second=shelf)).ask(1)
    shelf.at_once = False
    model = Model(make(second=shelf))
    first, second, third = model.ask(1), model.ask(1), model.ask(1)
    assert first is not None
    assert second is not None
    assert third is not None
    first.cancel()
    (asked,) = shelf.asked
    assert shelf.cancelled == 0
    asked()
    assert (model.runs, len(model.outcomes)) == (0, 3)
    assert (model.statistics.hits.count, model.statistics.fail.count) == (2, 1)
    lone = model.ask(7)
    assert lone is not None
    lone.cancel()
    lone.cancel()
    assert (shelf.cancelled, model.runs, len(model.outcomes)) == (1, 0, 4)
    assert model.statistics.fail.count == 2


def test_closing_closes_the_second_tier() -> None:
    shelf = Shelf()
    asyncio.run(make(second=shelf).close())
    asyncio.run(make().close())
    assert shelf.closed


def test_it_is_off_by_default_and_on_by_its_bytes() -> None:
    clock = ManualClock()
    assert open_cache(0, "", 60, clock) is None
    cache = open_cache(4096, "", 60, clock)
    assert cache is not None
    assert (cache.max_answer_bytes, cache.second) == (1024, None)
    assert isinstance(cache.of("digest", "1", ModelStatistics(), 1), ModelCache)
    with pytest.raises(InvalidConfig, match="cache_bytes"):
        open_cache(0, "redis://localhost", 60, clock)


def test_redis_is_opened_where_it_is_asked_for() -> None:
    async def main() -> None:
        cache = open_cache(4096, "redis://127.0.0.1:1/0", 60, ManualClock())
        assert cache is not None
        assert type(cache.second).__name__ == "RedisTier"
        await cache.close()

    asyncio.run(main())
