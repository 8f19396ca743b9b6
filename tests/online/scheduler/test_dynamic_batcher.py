import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import SystemClock
from penstock.errors import Cancelled, DeadlineExceeded, PenstockError, Unavailable
from penstock.online.instances.instance import Instance
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy, TimeoutAction
from penstock.online.scheduler.brief_runs import BRIEF_NS, NEEDED
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher, _Sleeper
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import merge, split
from penstock.online.scheduler.queue import NEVER, Pending
from penstock.request import Deadline, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import BatchTimes, Failure, Reason
from penstock.tensor import Array
from penstock.testing import FakeModel, double
from turns import Turns

TIMES = BatchTimes(0, 0, 0, 0)


def make_request(value: float, rows: int = 1, width: int = 2) -> InferRequest:
    return InferRequest("m", {"x": np.full((rows, width), value, np.float32)}, "1")


class Bench:
    """A batcher on a manual event loop; the test acts as its instances. ``outcomes[n]`` is the outcome of the n-th request."""

    def __init__(self, config: BatchingConfig) -> None:
        self.loop = Turns()
        self.batcher = DynamicBatcher(config, self.loop, now_ns=self.loop.now_ns)  # type: ignore[arg-type]
        self.outcomes: list[list[Outcome]] = []

    def submit(self, rows: int = 1, width: int = 2, deadline_s: float | None = None, **fields: Any) -> Pending:
        request = make_request(len(self.outcomes), rows, width)
        for name, value in fields.items():
            setattr(request, name, value)
        if deadline_s is not None:
            request.deadline = Deadline.after(deadline_s, self.loop.clock)
        outcomes: list[Outcome] = []
        pending = self.batcher.submit(request, rows, width, outcomes.append)
        self.outcomes.append(outcomes)
        return pending

    def take(self) -> Batch:
        """The batch that a free instance takes now, which must exist."""
        self.loop.turn()
        batch = self.batcher.take()
        assert batch is not None
        return batch

    def finish(self, batch: Batch, error: PenstockError | None = None) -> None:
        outputs = double(merge([pending.request.inputs for pending in batch.requests]))
        rows = [pending.rows for pending in batch.requests]
        if not self.batcher.config.batchable:
            rows = [len(outputs["y"])]
        self.batcher.finish(batch, error or split(outputs, rows), TIMES)
        self.loop.turn()

    def errors(self) -> list[type[Outcome] | None]:
        """The type of each request's error; None if there is none."""
        return [next((type(o) for o in got if isinstance(o, PenstockError)), None) for got in self.outcomes]

    def check(self) -> None:
        """Check that every request has one outcome, and that each answer belongs to its request."""
        for number, got in enumerate(self.outcomes):
            (outcome,) = got
            if isinstance(outcome, InferResponse):
                assert (outcome.outputs["y"] == 2 * number).all()
                assert outcome.outputs["y"].size
        assert not self.batcher.statistics.pending


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 6), st.integers(0, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("turn"), st.just(0), st.just(0)),
    st.tuples(st.just("advance"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("take"), st.just(0), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
)
CONFIGS = st.sampled_from(
    [
        BatchingConfig(batchable=True, max_batch=6, max_queue=20),
        BatchingConfig(batchable=False, max_queue=20),
        BatchingConfig(batchable=True, max_batch=6, max_queue=20, preserve_ordering=True),
        BatchingConfig(batchable=True, max_batch=6, preferred_batch_size=(2, 4)),
        BatchingConfig(
            batchable=True,
            max_batch=6,
            max_queue=20,
            priority_levels=3,
            default_priority_level=2,
            default_queue_policy=QueuePolicy(TimeoutAction.DELAY, 3000, allow_timeout_override=True),
            priority_queue_policy={3: QueuePolicy(TimeoutAction.REJECT, 2000, max_queue_size=3)},
        ),
    ]
)


@settings(max_examples=400, deadline=None)
@given(CONFIGS, st.lists(STEPS, max_size=60))
def test_any_interleaving_ends_each_request_once_and_with_its_own_result(
    config: BatchingConfig, steps: list[tuple[str, int, int]]
) -> None:
    bench = Bench(config)
    held: list[Pending] = []
    running: list[Batch] = []
    failed = 0

    def take() -> None:
        batch = bench.take()
        assert batch.rows == sum(pending.rows for pending in batch.requests)
        assert batch.rows <= config.max_rows or len(batch.requests) == 1
        assert len({pending.key for pending in batch.requests}) == 1
        running.append(batch)

    for step, a, b in steps:
        if step == "submit":
            deadline_s = 0.004 if b == 5 else None
            if bench.batcher.statistics.pending >= config.max_queue:
                with pytest.raises(Unavailable, match="is full"):
                    bench.submit(a)
                continue
            with contextlib.suppress(Unavailable, DeadlineExceeded):  # its level is full, or its deadline out of reach
                held.append(bench.submit(a, 2 + b % 2, deadline_s, priority=b, timeout_us=1500 * (b % 2)))
        elif step == "cancel" and held:
            held[a % len(held)].cancel()
        elif step == "turn":
            bench.loop.turn()
        elif step == "advance":
            bench.loop.advance(a / 1000)
        elif step == "take" and waiting(bench):
            take()
        elif step in ("finish", "fail") and running:
            batch = running.pop(a % len(running))
            live = sum(pending.done is not None for pending in batch.requests)
            failed += live * (step == "fail")
            bench.finish(batch, PenstockError("broken") if step == "fail" else None)
    while waiting(bench):
        take()
    for batch in running:
        bench.finish(batch)
    bench.check()
    statistics = bench.batcher.statistics
    assert statistics.failures[Failure.BACKEND] == failed
    assert statistics.success.count == bench.errors().count(None)
    bench.batcher.stop()
    assert bench.batcher.take() is None


def waiting(bench: Bench) -> bool:
    """True if ``take`` would not block."""
    bench.loop.turn()
    bench.loop.advance(0)
    batcher = bench.batcher
    expired, formed = batcher._decide(bench.loop.now_ns())
    batcher._drop(expired, formed.late)
    return isinstance(formed, Batch)


POLICY = QueuePolicy(TimeoutAction.DELAY, 500)


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        BatchingConfig(
            batchable=True,
            max_batch=16,
            max_queue=10_000,
            preferred_batch_size=(4, 8),
            max_queue_delay_microseconds=100,
            priority_levels=2,
            default_priority_level=1,
            default_queue_policy=POLICY,
        ),
        BatchingConfig(batchable=True, max_batch=16, max_queue=10_000),
    ],
    ids=["all", "natural"],
)
def test_with_real_threads_every_request_ends_once_and_with_its_own_answer(
    instances: int, config: BatchingConfig
) -> None:
    model = FakeModel(reentrant=True, predictable=True)
    chance = random.Random(instances)

    async def main() -> list[Outcome]:
        loop = asyncio.get_running_loop()
        batcher = DynamicBatcher(config, loop)
        crew = [Instance(f"i{n}", model, batcher) for n in range(instances)]
        for instance in crew:
            instance.start()
        outcomes: list[list[Outcome]] = [[] for _ in range(4000)]
        held = []
        for number, outcome in enumerate(outcomes):
            rows = number % 5 + 1
            request = make_request(number, rows)
            request.priority = number % 3
            held.append(batcher.submit(request, rows, None, outcome.append))
            if chance.random() < 0.1:
                chance.choice(held).cancel()
            if chance.random() < 0.2:
                await asyncio.sleep(0)
            if chance.random() < 0.01:
                await batcher.drain()  # the instances rest
        await batcher.drain()
        batcher.stop()
        for instance in crew:
            instance.join(10)
        assert batcher.statistics.success.count + batcher.statistics.fail.count == len(outcomes)
        return [only for (only,) in outcomes]

    for number, outcome in enumerate(asyncio.run(main())):
        if not isinstance(outcome, Cancelled):
            assert isinstance(outcome, InferResponse)
            np.testing.assert_array_equal(outcome.outputs["y"], np.full((number % 5 + 1, 2), 2 * number, np.float32))
    assert max(len(call["x"]) for call in model.calls) <= 16


def test_a_full_queue_refuses_at_once() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, max_queue=2))
    bench.submit()
    bench.submit()
    with pytest.raises(Unavailable, match="queue of model 'm' is full"):
        bench.submit()
    assert bench.batcher.statistics.failures[Failure.REJECTED] == 1


def test_a_model_that_cannot_be_batched_runs_one_request_at_a_time() -> None:
    bench = Bench(BatchingConfig(batchable=False))
    for _ in range(3):
        bench.submit(rows=4)
    assert [len(bench.take().requests) for _ in range(3)] == [1, 1, 1]


def test_a_receiver_that_fails_does_not_keep_the_others_from_their_answers(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=8))

    def broken(outcome: Outcome) -> None:
        raise RuntimeError("receiver")

    bench.batcher.submit(make_request(1), 1, 2, broken)
    bench.submit()
    bench.finish(bench.take())
    bench.check()
    assert "a receiver failed" in caplog.text


def test_an_answer_that_comes_after_the_event_loop_was_closed_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    batcher = DynamicBatcher(BatchingConfig(batchable=False), loop)
    loop.close()
    batcher.finish(Batch([], 0, Reason.ALONE, 0), [], TIMES)


def test_cancelling_what_waits_frees_its_place_at_once() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, max_queue=2))
    first, second = bench.submit(), bench.submit()
    bench.loop.turn()
    first.cancel()
    assert [type(outcome) for outcome in bench.outcomes[0]] == [Cancelled]
    bench.submit()
    first.cancel()
    batch = bench.take()
    assert batch.requests[0] is second
    assert len(batch.requests) == 2
    bench.finish(batch)
    bench.check()
    assert bench.batcher.statistics.failures[Failure.CANCELED] == 1


def test_cancelling_before_the_turn_is_over_or_while_it_runs() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    bench.submit().cancel()
    running, other = bench.submit(), bench.submit()
    batch = bench.take()
    assert batch.requests == [running, other]
    running.cancel()
    bench.finish(batch)
    bench.check()
    assert bench.errors() == [Cancelled, Cancelled, None]
    other.cancel()
    bench.check()


def test_a_model_that_leaves_out_an_output_fails_its_request_only() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    bench.submit(outputs=("z",))
    bench.submit(outputs=("y",))
    bench.finish(bench.take())
    bench.check()
    assert bench.errors() == [PenstockError, None]


def test_time_outs_end_requests_although_no_instance_is_ever_free() -> None:
    policy = QueuePolicy(default_timeout_microseconds=5000, allow_timeout_override=True)
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, default_queue_policy=policy))
    bench.submit()
    bench.submit(timeout_us=1000)
    bench.submit(timeout_us=9000)
    bench.loop.turn()
    bench.loop.advance(0.003)
    assert [len(got) for got in bench.outcomes] == [0, 1, 0]
    bench.loop.advance(0.004)
    bench.check()
    assert all(
        isinstance(got[0], Unavailable) and got[0].message == "Request timeout expired" for got in bench.outcomes
    )
    assert not bench.loop.timers


def test_a_request_past_its_time_is_not_taken_even_before_the_timer() -> None:
    policy = QueuePolicy(default_timeout_microseconds=1000)
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, default_queue_policy=policy))
    bench.submit()
    bench.loop.turn()
    bench.loop.clock.advance(0.0011)
    bench.submit()
    batch = bench.take()
    assert [pending.number for pending in batch.requests] == [2]
    bench.finish(batch)
    bench.check()
    assert bench.errors() == [Unavailable, None]


def test_requests_without_time_outs_set_no_timer() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    bench.submit()
    bench.loop.turn()
    assert not bench.loop.timers


def test_the_size_of_a_level_is_bounded_and_counts_what_waits_only() -> None:
    bench = Bench(
        BatchingConfig(
            batchable=True,
            max_batch=1,
            priority_levels=2,
            default_priority_level=2,
            priority_queue_policy={2: QueuePolicy(max_queue_size=2)},
        )
    )
    bench.submit(), bench.submit(priority=2)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        bench.submit(priority=7)
    bench.submit(priority=1)
    urgent = bench.take()
    assert urgent.requests[0].request.priority == 1
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        bench.submit()
    bench.take()
    bench.submit()


def test_a_deadline_that_passes_in_the_queue_ends_the_request_then() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    bench.submit(deadline_s=0.002)
    bench.submit()
    bench.loop.turn()
    bench.loop.advance(0.004)
    assert bench.errors() == [DeadlineExceeded, None]
    bench.finish(bench.take())
    bench.check()


def test_a_deadline_that_has_passed_is_refused() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    with pytest.raises(DeadlineExceeded, match="has passed"):
        bench.submit(deadline_s=-0.001)


def run_for(bench: Bench, seconds: float, rows: int) -> None:
    """Report the duration of a batch of ``rows`` to the batcher."""
    for _ in range(rows):
        bench.submit(deadline_s=9.0)
    batch = bench.take()
    assert batch.rows == rows
    bench.loop.advance(seconds)
    bench.finish(batch)


def test_a_deadline_that_cannot_be_met_by_the_queue_is_refused_at_once_and_after_a_while_tried_again() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    run_for(bench, 0.010, rows=4)
    for _ in range(12):
        bench.submit()
    with pytest.raises(DeadlineExceeded, match="is expected in"):
        bench.submit(deadline_s=0.030)
    bench.submit(deadline_s=0.060)
    bench.loop.turn()
    bench.loop.advance(2.0)
    bench.submit(deadline_s=0.030)


def test_what_would_end_too_late_is_dropped_when_the_batch_is_formed() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4))
    run_for(bench, 0.010, rows=4)
    for _ in range(4):
        bench.submit(deadline_s=0.030)
    bench.loop.advance(0.025)
    for _ in range(4):
        bench.submit()
    batch = bench.take()
    bench.loop.turn()
    assert [pending.number for pending in batch.requests] == [9, 10, 11, 12]
    assert bench.errors()[4:] == [DeadlineExceeded] * 4 + [None] * 4


def test_answers_keep_the_order_of_arrival_where_asked() -> None:
    policy = QueuePolicy(default_timeout_microseconds=2000)
    bench = Bench(BatchingConfig(batchable=True, max_batch=1, preserve_ordering=True, default_queue_policy=policy))
    order: list[int] = []
    for number in range(4):
        bench.batcher.submit(make_request(number), 1, 2, lambda outcome, number=number: order.append(number))
    first, second = bench.take(), bench.take()
    bench.finish(second)
    bench.loop.advance(0.005)
    assert not order
    bench.finish(first)
    assert order == [0, 1, 2, 3]


def test_with_a_delay_an_instance_waits_and_leaves_with_what_has_come() -> None:
    model = FakeModel()

    async def main() -> list[Reason]:
        batcher = DynamicBatcher(
            BatchingConfig(batchable=True, max_batch=4, max_queue_delay_microseconds=2000), asyncio.get_running_loop()
        )
        instance = Instance("i", model, batcher)
        instance.start()
        for _ in range(6):
            batcher.submit(make_request(1), 1, None, lambda outcome: None)
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        return [reason for reason, count in batcher.statistics.reasons.items() if count]

    assert asyncio.run(main()) == [Reason.FULL, Reason.DELAY]
    assert [len(call["x"]) for call in model.calls] == [4, 2]


def test_once_hurried_requests_do_not_wait_for_the_delay() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, max_queue_delay_microseconds=10_000_000))
    for hurry in (bench.batcher.hurry, lambda: None):
        bench.submit()
        hurry()
        assert bench.take().reason is Reason.IDLE


def test_stopping_does_not_wait_for_the_delay() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, max_queue_delay_microseconds=10_000_000))
    bench.submit()
    bench.batcher.stop()
    assert bench.take().reason is Reason.IDLE
    assert bench.batcher.take() is None
    with pytest.raises(Unavailable, match="being unloaded"):
        bench.submit()


def overload(offered_per_s: float, slo_s: float, seconds: float = 2.0) -> int:
    """Answers per second within ``slo_s`` of a model that takes 2.5 ms plus 0.15 ms per row, for evenly spaced requests."""
    bench = Bench(BatchingConfig(batchable=True, max_batch=64, max_queue=100_000))
    clock, done_in_time = bench.loop.clock, 0
    free_at, running, step_s = 0.0, None, 0.0005
    start, submitted = clock.now(), 0
    deadlines: dict[int, float] = {}
    while clock.now() - start < seconds:
        while submitted < (clock.now() - start) * offered_per_s:
            submitted += 1
            with contextlib.suppress(DeadlineExceeded):
                deadlines[bench.submit(deadline_s=slo_s).number] = clock.now() + slo_s
        bench.loop.turn()
        if running is not None and clock.now() >= free_at:
            done_in_time += sum(deadlines[pending.number] >= clock.now() for pending in running.requests)
            bench.finish(running)
            running = None
        if running is None and waiting(bench):
            running = bench.take()
            free_at = clock.now() + 0.0025 + 0.00015 * running.rows
        bench.loop.advance(step_s)
    return round(done_in_time / seconds)


def test_overload_keeps_most_of_the_peak_goodput() -> None:
    peak = max(overload(offered, 0.020) for offered in (4000, 4500))
    assert overload(7500, 0.020) >= 0.9 * peak


def test_who_has_little_time_ends_the_delay_for_all() -> None:
    model = FakeModel()

    async def main() -> list[Outcome]:
        loop = asyncio.get_running_loop()
        batcher = DynamicBatcher(
            BatchingConfig(batchable=True, max_batch=8, max_queue_delay_microseconds=60_000_000), loop
        )
        instance = Instance("i", model, batcher)
        instance.start()
        outcomes: list[Outcome] = []
        batcher.submit(make_request(1), 1, None, outcomes.append)
        await asyncio.sleep(0)
        request = make_request(2)
        request.deadline = Deadline.after(50, SystemClock())
        batcher.submit(request, 1, None, outcomes.append)
        await batcher.drain()
        batcher.stop()
        instance.join(10)
        return outcomes

    assert [type(outcome) for outcome in asyncio.run(main())] == [InferResponse] * 2
    assert len(model.calls) == 1


def test_a_deadline_in_the_far_future_is_none() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=8))
    bench.submit(deadline_s=1e300)
    bench.finish(bench.take())
    bench.check()
    assert not bench.loop.timers


def rest(bench: Bench) -> _Sleeper:
    """Let an instance of ``bench`` become idle."""
    sleeper = bench.batcher._look(takes=True)
    assert isinstance(sleeper, _Sleeper)
    return sleeper


class Resting(Bench):
    """A bench with idle instances, whose model may run on the event loop; such runs take ``ns`` and are recorded in ``here``."""

    def __init__(self, config: BatchingConfig, instances: int = 1, ns: int = 0) -> None:
        super().__init__(config)
        self.ns = ns
        self.here: list[Batch] = []
        self.sleepers = [rest(self) for _ in range(instances)]
        for _ in range(instances):
            self.batcher.may_run_here(self._run)

    def _run(self, batch: Batch) -> None:
        self.here.append(batch)
        self.finish(batch)

    def finish(self, batch: Batch, error: PenstockError | None = None) -> None:
        outputs = double(merge([pending.request.inputs for pending in batch.requests]))
        rows = [pending.rows for pending in batch.requests]
        self.batcher.finish(batch, error or split(outputs, rows), BatchTimes(0, 0, self.ns, self.ns))

    def on_thread(self) -> None:
        """The woken instance runs batches until the queue is empty, and becomes idle again."""
        self.loop.turn()
        (woken,) = [sleeper for sleeper in self.sleepers if sleeper not in self.batcher._idle]
        self.sleepers.remove(woken)
        found = self.batcher._rest(woken) or self.batcher._look(takes=True)
        while isinstance(found, Batch):
            self.finish(found)
            self.loop.turn()
            found = self.batcher._look(takes=True)
        assert isinstance(found, _Sleeper)
        self.sleepers.append(found)

    def warm_up(self, rows: int = 8) -> None:
        """Report short runs until batches of up to this many rows may run on the event loop."""
        for _ in range(NEEDED):
            self.submit(rows)
            self.on_thread()
        assert not self.here


NATURAL = BatchingConfig(batchable=True, max_batch=8)


def test_a_batch_that_is_known_to_be_brief_runs_on_the_loop_while_all_instances_rest() -> None:
    bench = Resting(NATURAL, instances=2)
    bench.warm_up()
    bench.submit(3)
    bench.submit(2)
    bench.loop.turn()
    (batch,) = bench.here
    assert (batch.rows, len(batch.requests), batch.reason) == (5, 2, Reason.IDLE)
    bench.check()
    assert bench.batcher.statistics.success.count == NEEDED + 2


def test_an_instance_that_works_keeps_the_loop_from_running_anything() -> None:
    bench = Resting(NATURAL, instances=2)
    bench.warm_up()
    bench.batcher._idle.pop()
    bench.submit()
    bench.loop.turn()
    assert not bench.here


@pytest.mark.parametrize(
    "submit",
    [
        lambda bench: bench.submit(9),
        lambda bench: bench.submit(1, width=3),
        lambda bench: (bench.submit(5), bench.submit(5)),
        lambda bench: (bench.submit(1), bench.submit(1, width=3)),
        lambda bench: (bench.submit(1).cancel(), bench.submit(1)),
    ],
    ids=["more rows", "other shape", "two batches", "two shapes", "cancelled"],
)
def test_what_is_more_than_one_batch_known_to_be_brief_goes_to_the_instance(submit: Any) -> None:
    bench = Resting(NATURAL)
    bench.warm_up()
    submit(bench)
    bench.loop.turn()
    assert not bench.here
    while bench.batcher.statistics.pending:
        bench.on_thread()
    bench.check()


def test_a_model_that_has_become_slow_goes_back_to_its_instance() -> None:
    bench = Resting(NATURAL)
    bench.warm_up()
    bench.ns = BRIEF_NS + 1
    bench.submit()
    bench.loop.turn()
    assert len(bench.here) == 1
    bench.submit()
    bench.on_thread()
    assert len(bench.here) == 1
    bench.check()


def test_a_request_whose_deadline_is_out_of_reach_does_not_run_on_the_loop_either() -> None:
    bench = Resting(NATURAL)
    bench.warm_up()
    bench.submit(deadline_s=1)
    bench.loop.turn()
    assert len(bench.here) == 1
    with pytest.raises(DeadlineExceeded):
        bench.submit(deadline_s=0)
    bench.check()


def test_what_arrives_for_an_instance_that_rests_is_taken_when_it_gets_it() -> None:
    bench = Bench(NATURAL)
    sleeper = rest(bench)
    bench.submit(3)
    bench.loop.turn()
    bench.loop.advance(0.005)
    batch = bench.batcher._rest(sleeper)
    assert batch is not None
    assert batch.taken_ns == bench.loop.now_ns()
    bench.finish(batch)
    bench.check()


def spin(us: int) -> None:
    """Work for ``us`` microseconds and keep the interpreter lock, so that other threads wake late."""
    end = time.perf_counter_ns() + 1000 * us
    while time.perf_counter_ns() < end:
        pass


class Unsteady(FakeModel):
    """A model whose calls take 0 to 0.5 ms."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        spin(self._chance.choice((0, 0, 50, 200, 500)))
        return super().forward(inputs)


async def answered(config: BatchingConfig, chance: random.Random, requests: int) -> list[list[Outcome]]:
    """The outcomes of ``requests`` with real threads, random bursts, pauses, cancellations and changes of instances."""
    outcomes: list[list[Outcome]] = []
    batcher = DynamicBatcher(config, asyncio.get_running_loop())
    threads: list[Instance] = []

    def add() -> None:
        threads.append(Instance(f"i{len(threads)}", Unsteady(len(threads)), batcher))
        threads[-1].start()

    for _ in range(config.instances):
        add()
    async with asyncio.timeout(120):
        while len(outcomes) < requests:
            for _ in range(chance.choice((1, 1, 2, 3))):
                got: list[Outcome] = []
                outcomes.append(got)
                pending = batcher.submit(make_request(len(outcomes)), 1, chance.random() < 0.1, got.append)
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            if chance.random() < 0.05:
                pending.cancel()
            if chance.random() < 0.01:
                batcher.dismiss()
                add()
            if chance.random() < 0.3:
                spin(chance.choice((20, 100, 300)))
            if chance.random() < 0.3:
                await batcher.drain()
        if chance.random() < 0.5:
            await batcher.drain()
        batcher.stop()
        await batcher.drain()
    for thread in threads:
        thread.join(60)
        assert not thread._thread.is_alive()
    return outcomes


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Switch threads often, so that many more interleavings occur."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize("instances", [1, 2, 3])
@pytest.mark.parametrize("delay_us", [0, 50, 200, 500, 2000])
def test_no_request_and_no_instance_is_forgotten_whatever_the_threads_do(delay_us: int, instances: int) -> None:
    config = BatchingConfig(batchable=True, max_batch=3, max_queue_delay_microseconds=delay_us, instances=instances)
    for got in asyncio.run(answered(config, random.Random(instances), 2000)):
        (outcome,) = got
        assert isinstance(outcome, InferResponse | Cancelled)


def test_the_batch_handed_over_while_the_time_of_an_instance_ends_is_not_lost() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=4, max_queue_delay_microseconds=1000))
    bench.submit()
    bench.loop.turn()
    sleeper = rest(bench)
    assert sleeper.until_ns < NEVER
    bench.loop.advance(0.002)
    bench.submit()
    bench.loop.turn()  # wakes it: the first request has waited long enough
    assert not bench.batcher._idle
    assert bench.batcher._rest(sleeper) is None
    bench.finish(bench.take())
    bench.check()


def test_only_one_instance_watches_for_the_end_of_a_delay_and_another_when_it_is_woken() -> None:
    bench = Bench(BatchingConfig(batchable=True, max_batch=2, max_queue_delay_microseconds=1000))
    bench.submit()
    bench.loop.turn()
    sleepers = [rest(bench) for _ in range(2)]
    assert [sleeper.until_ns < NEVER for sleeper in sleepers] == [True, False]
    bench.submit()
    bench.submit(width=3)
    bench.loop.turn()
    (woken,) = [sleeper for sleeper in sleepers if sleeper not in bench.batcher._idle]
    assert bench.batcher._rest(woken) is None
    bench.finish(bench.take())  # wakes the other one, since a request is left
    assert not bench.batcher._idle
