import asyncio
import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from garbage import new_objects_only
from penstock.engines.base import Answer, LoadedModel
from penstock.engines.onnxruntime import OnnxRuntimeEngine
from penstock.errors import Cancelled, DeadlineExceeded, InvalidArgument, PenstockError, Unavailable
from penstock.online.instances.instance import Instance, InstanceDied
from penstock.online.scheduler.batching_config import BatchingConfig
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.scheduler.forming import Batch
from penstock.online.scheduler.layout import MergedRows, SingleRequest
from penstock.online.scheduler.sequences.batcher import SequenceBatcher, SequencingConfig
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.implicit_state import ImplicitState
from penstock.online.scheduler.sequences.slots import SequenceStep
from penstock.request import Deadline, InferRequest, InferResponse, Outcome
from penstock.telemetry.statistics import BatchTimes, Failure
from penstock.tensor import Array, DataType
from sequences import SlotSums, implicit_accumulator, make_request
from turns import Turns

START = Control("START", ControlKind.START, DataType.INT32)
READY = Control("READY", ControlKind.READY, DataType.INT32)
CORRID = Control("CORRID", ControlKind.CORRID, DataType.UINT64)
IDLE_S = 1.0
TIMES = BatchTimes(0, 0, 0, 0)


def fixed(slots: int = 2, **fields: Any) -> SequencingConfig:
    """Sequences of ``SlotSums``."""
    batching = BatchingConfig(batchable=True, max_batch=slots, max_queue=50, stateful=True)
    return SequencingConfig(batching, slots, fixed=True, controls=(START, READY), **fields)


def implicit(slots: int = 8, **fields: Any) -> SequencingConfig:
    """Sequences of ``implicit_accumulator``."""
    batching = BatchingConfig(batchable=True, max_batch=4, max_queue=50, **fields)
    spec = next(spec for spec in load_accumulator().signature.outputs if spec.name == "state_out")
    state = ImplicitState("state_in", spec, np.zeros((1, 1), np.float32))
    return SequencingConfig(batching, slots, controls=(START,), states=(state,), hidden=frozenset(["state_out"]))


def oldest(slots: int = 8, **fields: Any) -> SequencingConfig:
    """Sequences of ``IdSums``, which have no fixed rows."""
    batching = BatchingConfig(batchable=True, max_batch=3, max_queue=50, stateful=True)
    return SequencingConfig(batching, slots, controls=(START, READY, CORRID), **fields)


class IdSums(SlotSums):
    """Like ``SlotSums``, but rows may belong to any sequences, which the model identifies by their ids."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        rows = inputs["CORRID"][:, 0].astype(int)
        placed = {name: np.zeros((16, 1), array.dtype) for name, array in inputs.items()}
        for name, array in placed.items():
            array[rows] = inputs[name]
        return {"y": super().forward(placed)["y"][rows]}


def load_accumulator() -> LoadedModel:
    return OnnxRuntimeEngine().load(implicit_accumulator(), {"threads": 1})


class Bench:
    """A batcher on a manual event loop; the test acts as its instances. ``outcomes[n]`` is the outcome of the n-th request."""

    def __init__(self, config: SequencingConfig | None = None) -> None:
        self.loop = Turns()
        self.config = config or fixed()
        self.batcher = SequenceBatcher(self.config, MergedRows(), self.loop, now_ns=self.loop.now_ns)  # type: ignore[arg-type]
        self.models: list[Any] = [self._model() for _ in self.batcher.batchers]
        self.outcomes: list[list[Outcome]] = []
        self.ran: list[int] = []
        self.errors: dict[int, PenstockError] = {}
        """The answers of the instances to one batch."""

    def _model(self) -> LoadedModel:
        if self.config.states:
            return load_accumulator()
        return SlotSums(self.config.slots) if self.config.fixed else IdSums()

    def submit(self, sequence: int | str = 1, start: bool = False, end: bool = False, **fields: Any) -> SequenceStep:
        request = make_request(len(self.outcomes), sequence, start, end)
        request.id = str(len(self.outcomes))
        for name, value in fields.items():
            setattr(request, name, value)
        outcomes: list[Outcome] = []
        step = self.batcher.submit(request, 1, None, outcomes.append)
        self.outcomes.append(outcomes)
        return step

    def can_take(self, number: int = 0) -> bool:
        self.loop.turn()
        self.loop.advance(0)
        one = self.batcher.batchers[number]
        expired, formed = one._decide(self.loop.now_ns())
        one._drop(expired, formed.late)
        return isinstance(formed, Batch)

    def take(self, number: int = 0) -> Batch:
        assert self.can_take(number)
        return self.take_at_once(number)

    def take_at_once(self, number: int = 0) -> Batch:
        """Act as an instance that is faster than the event loop."""
        batch = self.batcher.batchers[number].take()
        assert batch is not None
        return batch

    def finish(self, batch: Batch, number: int = 0) -> None:
        """Finish a batch as an instance does."""
        one: DynamicBatcher = self.batcher.batchers[number]
        inputs = one.layout.gather(batch.requests)
        self.ran += [int(pending.request.id) for pending in batch.requests]
        outcome: Any = self.errors.pop(number, None)
        if outcome is None:
            outcome = one.layout.scatter(batch.requests, self.models[number].forward(inputs))
        one.finish(batch, outcome, TIMES)
        self.loop.turn()

    def run(self, number: int = 0) -> list[int]:
        """Take and finish one batch: its requests by their slots."""
        batch = self.take(number)
        self.finish(batch, number)
        return [int(pending.request.id) for pending in batch.requests]

    def values(self) -> list[Any]:
        """The outcome of each request: its sum, the type of its error, or None."""
        got: list[Any] = []
        for outcomes in self.outcomes:
            assert len(outcomes) < 2
            outcome = outcomes[0] if outcomes else None
            got.append(outcome.outputs["y"].item() if isinstance(outcome, InferResponse) else outcome and type(outcome))
        return got


def test_one_sequence_runs_in_order_one_request_at_a_time() -> None:
    bench = Bench()
    bench.submit(start=True)
    bench.submit()
    bench.submit(end=True)
    assert [bench.run(), bench.run(), bench.run()] == [[0], [1], [2]]
    assert bench.values() == [0, 1, 3]
    assert bench.batcher.statistics.pending == 0
    with pytest.raises(InvalidArgument, match="for sequence 1 to model 'm' must specify the START flag on the first"):
        bench.submit()


def test_rows_are_slots_and_those_without_a_request_are_not_ready() -> None:
    bench = Bench(fixed(slots=4))
    for identity in (1, 2, 3):
        bench.submit(identity, start=True)
    bench.run()
    bench.submit(3, end=True)
    bench.submit(1)
    bench.run()
    call = bench.models[0].calls[-1]
    assert call["READY"].tolist() == [[1], [0], [1]]
    assert call["START"].tolist() == [[0], [0], [0]]
    assert call["x"][[0, 2]].tolist() == [[4], [3]]
    assert bench.values() == [0, 1, 2, 5, 4]
    bench.submit(2)
    bench.run()
    assert bench.models[0].calls[-1]["READY"].tolist() == [[0], [1]]


def test_what_finds_no_slot_waits_in_order() -> None:
    bench = Bench(fixed(slots=1))
    for identity in (1, 2, 3):
        bench.submit(identity, start=True, end=True)
    assert [bench.run(), bench.run(), bench.run()] == [[0], [1], [2]]


def test_a_start_of_a_sequence_under_way_starts_it_anew() -> None:
    bench = Bench()
    for start in (True, False, True, False):
        bench.submit(start=start)
    for _ in range(4):
        bench.run()
    assert bench.values() == [0, 1, 2, 5]


@pytest.mark.parametrize(
    ("fields", "rows", "message"),
    [
        ({"sequence_id": 0}, 1, "model 'm' must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": ""}, 1, "model 'm' must specify a non-zero or non-empty correlation ID"),
        ({}, 2, "must specify batch-size 1 due to requirements of sequence batcher"),
    ],
    ids=["zero", "empty", "rows"],
)
def test_what_is_of_no_sequence_is_refused(fields: dict[str, Any], rows: int, message: str) -> None:
    bench = Bench()
    request = make_request(0, start=True)
    for name, value in fields.items():
        setattr(request, name, value)
    with pytest.raises(InvalidArgument, match=message):
        bench.batcher.submit(request, rows, None, lambda _: None)
    assert bench.batcher.statistics.fail.count == 1
    assert bench.batcher.statistics.failures[Failure.OTHER] == 1


def test_an_idle_sequence_is_over() -> None:
    bench = Bench(fixed(slots=1))
    bench.submit(1, start=True)
    bench.run()
    bench.loop.advance(IDLE_S * 0.9)
    bench.submit(1)
    bench.run()
    bench.submit(2, start=True)
    bench.loop.advance(IDLE_S * 0.9)
    assert not bench.can_take()
    bench.loop.advance(IDLE_S * 0.2)
    assert bench.run() == [2]
    with pytest.raises(InvalidArgument, match="START flag"):
        bench.submit(1)


def test_a_slow_request_does_not_make_its_sequence_idle() -> None:
    bench = Bench()
    bench.submit(start=True)
    batch = bench.take()
    bench.loop.advance(IDLE_S * 5)
    bench.finish(batch)
    bench.submit()
    bench.run()
    assert bench.values() == [0, 1]


def test_cancelling_what_has_not_begun_ends_the_sequence() -> None:
    bench = Bench()
    bench.submit(start=True)
    held = [bench.submit(), bench.submit(), bench.submit(start=True)]
    held[0].cancel()
    held[0].cancel()
    assert bench.values() == [None, Cancelled, Cancelled, None]
    bench.run()
    bench.run()
    assert bench.values() == [0, Cancelled, Cancelled, 3]
    assert bench.batcher.statistics.failures[Failure.CANCELED] == 2
    assert bench.batcher.statistics.pending == 0


def test_cancelling_what_waits_at_the_instance_ends_the_sequence() -> None:
    bench = Bench()
    bench.submit(start=True).cancel()
    with pytest.raises(InvalidArgument, match="START flag"):
        bench.submit()
    assert bench.values() == [Cancelled]


def test_cancelling_what_runs_drops_the_answer_only() -> None:
    bench = Bench()
    step = bench.submit(start=True)
    batch = bench.take()
    bench.batcher.batchers[0].layout.gather(batch.requests)
    step.cancel()
    bench.submit()
    bench.finish(batch)
    bench.run()
    assert bench.values() == [Cancelled, 1]


def test_a_deadline_that_passes_while_waiting_ends_the_sequence() -> None:
    bench = Bench(fixed(slots=1))
    bench.submit(1, start=True)
    bench.submit(2, start=True, deadline=Deadline.after(0.1, bench.loop.clock))
    bench.submit(2, end=True)
    bench.loop.advance(0.2)
    assert bench.values() == [None, Unavailable, Unavailable]
    (error,) = bench.outcomes[2]
    assert isinstance(error, PenstockError)
    assert error.message == "timeout of the corresponding sequence has been expired"
    bench.run()


def test_a_deadline_out_of_reach_is_refused_and_ends_the_sequence() -> None:
    bench = Bench(fixed(slots=1))
    for start in (True, False):
        with pytest.raises(DeadlineExceeded):
            bench.submit(start=True, deadline=Deadline.after(-1, bench.loop.clock))
        bench.submit(start=True)
        bench.run()
        with pytest.raises(DeadlineExceeded):
            bench.submit(start=start, end=True, deadline=Deadline.after(-1, bench.loop.clock))
        with pytest.raises(InvalidArgument, match="START flag"):
            bench.submit()
    assert bench.batcher.statistics.pending == 0
    assert bench.values() == [0, 1]


def test_a_request_that_fails_leaves_its_sequence() -> None:
    bench = Bench()
    bench.submit(start=True)
    bench.run()
    bench.errors[0] = PenstockError("broken")
    bench.submit()
    bench.submit()
    bench.run()
    bench.run()
    assert bench.values() == [0, PenstockError, 2]


@pytest.mark.parametrize("strategy", [fixed, oldest, implicit])
def test_a_start_that_fails_ends_its_sequence_and_frees_its_slot(strategy: Callable[..., SequencingConfig]) -> None:
    bench = Bench(strategy(slots=1))
    bench.submit(1, start=True)
    bench.submit(1)
    bench.submit(1, start=True)
    bench.submit(2, start=True)
    bench.errors[0] = PenstockError("broken")
    assert bench.run() == [0]
    assert bench.values() == [PenstockError, InvalidArgument, None, None]
    (error,) = bench.outcomes[1]
    assert isinstance(error, InvalidArgument)
    assert "for sequence 1 to model 'm' must specify the START flag" in error.message
    assert "first request failed" in error.hint
    assert [bench.run()] == [[3]]  # the slot is free for the first in the backlog
    bench.submit(2, end=True)
    assert [bench.run(), bench.run()] == [[4], [2]]
    assert bench.values()[2:] == [2, 3, 7]
    bench.errors[0] = PenstockError("broken")
    bench.submit(1, start=True)
    bench.run()
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        bench.submit(1)
    assert not bench.batcher._table
    assert bench.batcher.statistics.pending == 0


def test_a_restart_that_fails_ends_the_sequence() -> None:
    bench = Bench()
    bench.submit(start=True)
    bench.run()
    bench.errors[0] = PenstockError("broken")
    bench.submit(start=True)  # the restart fails, so there is no sequence to go on with
    bench.submit()
    bench.run()
    assert bench.values() == [0, PenstockError, InvalidArgument]


def test_who_is_told_of_an_end_may_cancel_those_that_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    others: list[SequenceStep] = []
    told: list[Outcome] = []

    def receive(outcome: Outcome) -> None:
        told.append(outcome)
        for other in others:
            other.cancel()

    first = bench.batcher.submit(make_request(0, 1, start=True), 1, None, receive)
    others += [bench.batcher.submit(make_request(n, 1), 1, None, receive) for n in (1, 2)]
    first.cancel()
    assert [type(outcome) for outcome in told] == [Cancelled] * 3
    assert not caplog.records
    assert not bench.batcher._table


def test_a_model_that_lost_its_memory_has_no_sequences() -> None:
    bench = Bench(fixed(slots=3))
    for identity in (1, 2):
        bench.submit(identity, start=True)
    bench.run()
    bench.submit(1)
    batch = bench.take()
    bench.submit(2)
    bench.submit(3, start=True)
    bench.errors[0] = InstanceDied("dead")
    bench.finish(batch)
    assert bench.values()[2] is InstanceDied
    (lost,) = bench.outcomes[3]
    assert isinstance(lost, Unavailable)
    assert "state of the sequence was lost" in lost.message
    bench.run()
    assert bench.values()[4] == 4
    for identity in (1, 2):
        with pytest.raises(InvalidArgument, match="START flag"):
            bench.submit(identity)


def test_what_the_instance_took_before_anybody_knew_of_its_loss_is_lost_too() -> None:
    bench = Bench(fixed(slots=2))
    for identity in (1, 2):
        bench.submit(identity, start=True)
    bench.run()
    bench.submit(1)
    one, batch = bench.batcher.batchers[0], bench.take()
    one.layout.gather(batch.requests)
    for _ in range(2):
        bench.submit(2)
    bench.loop.turn()
    one.finish(batch, InstanceDied("dead"), TIMES)
    bench.finish(bench.take_at_once())
    assert bench.values()[2:] == [InstanceDied, Unavailable, Unavailable]
    with pytest.raises(InvalidArgument, match="START flag"):
        bench.submit(2)
    assert bench.batcher.statistics.pending == 0


def test_a_long_backlog_that_comes_too_late_is_refused_one_after_the_other() -> None:
    batching = BatchingConfig(batchable=True, max_batch=1, max_queue=5000, stateful=True)
    bench = Bench(msgspec.structs.replace(fixed(slots=1), batching=batching))
    bench.submit(1, start=True, end=True)
    for identity in range(2, 1500):
        bench.submit(identity, start=True, end=True, deadline=Deadline.after(5, bench.loop.clock))
    bench.batcher.batchers[0].latency.observe(1, 10_000_000_000, bench.loop.now_ns())
    bench.run()
    assert bench.values() == [0] + [DeadlineExceeded] * 1498
    assert bench.batcher.statistics.pending == 0


def test_what_is_cancelled_by_the_end_of_another_does_not_run() -> None:
    bench = Bench(fixed(slots=1))
    others: list[SequenceStep] = []
    first = bench.batcher.submit(make_request(0, 1, start=True), 1, None, lambda _: others[0].cancel())
    others.append(bench.submit(2, start=True))
    first.cancel()
    assert bench.values() == [Cancelled]
    assert not bench.can_take()
    assert bench.batcher.statistics.pending == 0
    bench.submit(3, start=True)
    assert bench.run() == [1]


def test_what_runs_on_for_a_sequence_that_has_moved_leaves_its_state_alone() -> None:
    bench = Bench(msgspec.structs.replace(implicit(slots=2), instances=2))
    first = bench.submit(1, start=True)
    stale = bench.take(0)
    for identity in (2, 3, 4, 5, 1):
        bench.submit(identity, start=True)
    first.cancel()
    bench.run(1)
    bench.submit(2, end=True)
    assert [bench.run(1), bench.run(1)] == [[6], [5]]
    bench.submit(4)
    bench.run(1)
    bench.finish(stale, 0)
    bench.submit(1)
    bench.run(1)
    assert bench.values() == [Cancelled, 1, None, 3, None, 5, 7, 10, 13]


def test_requests_leave_no_cycles_behind() -> None:
    bench = Bench(fixed(slots=1))
    with new_objects_only():
        for number in range(50):
            bench.submit(1, start=not number)
            bench.run()
            bench.outcomes.clear()
        assert gc.collect() < 50


def test_a_full_queue_refuses() -> None:
    bench = Bench(msgspec.structs.replace(fixed(), batching=BatchingConfig(batchable=True, max_batch=2, max_queue=3)))
    for identity in (1, 2, 3):
        bench.submit(identity, start=True)
    with pytest.raises(Unavailable, match="the queue of model 'm' is full"):
        bench.submit(1)
    bench.run()
    bench.submit(1)


def test_a_receivers_bug_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    first, behind = make_request(1, start=True), make_request(1)

    def fail(outcome: Outcome) -> None:
        raise ZeroDivisionError

    bench.batcher.submit(first, 1, None, fail)
    bench.batcher.submit(behind, 1, None, fail).cancel()
    assert "a receiver failed" in caplog.text
    first.id = "0"
    bench.run()
    assert bench.batcher.statistics.pending == 0


def test_time_in_the_backlog_counts_as_queueing() -> None:
    bench = Bench(fixed(slots=1))
    bench.submit(1, start=True, end=True)
    bench.submit(2, start=True, end=True)
    bench.loop.advance(0.5)
    batch = bench.take()
    bench.finish(batch)
    (pending,) = bench.take().requests
    assert bench.loop.now_ns() - pending.arrived_ns >= 500_000_000


def test_draining_refuses_new_sequences_and_ends_those_that_nobody_feeds() -> None:
    async def main() -> list[Any]:
        bench = Bench(fixed(slots=1))
        bench.submit(1, start=True)
        bench.submit(2, start=True)
        drained = asyncio.ensure_future(bench.batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="is being unloaded"):
            bench.submit(3, start=True)
        bench.submit(2, end=True)
        for _ in range(3):
            assert not drained.done()
            bench.run()
        await drained
        bench.batcher.stop()
        assert bench.batcher.batchers[0].take() is None
        return bench.values()

    assert asyncio.run(main()) == [0, 1, 3]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "cancel", "take", "finish", "fail", "fail", "idle"]),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
        st.integers(0, 99),
    ),
    min_size=20,
    max_size=60,
)


@pytest.mark.parametrize("strategy", [fixed, oldest, implicit])
@settings(max_examples=100, deadline=None)
@given(instances=st.integers(1, 2), slots=st.integers(1, 3), actions=ACTIONS)
def test_any_interleaving_ends_each_request_once_with_the_sum_of_its_sequence(
    strategy: Callable[..., SequencingConfig],
    instances: int,
    slots: int,
    actions: list[tuple[str, int, bool, bool, int]],
) -> None:
    bench = Bench(msgspec.structs.replace(strategy(slots), instances=instances))
    held: list[SequenceStep] = []
    taken: dict[int, Batch] = {}
    broken: set[int] = set()
    for action, identity, start, end, pick in actions:
        number = pick % instances
        if action == "submit":
            with contextlib.suppress(InvalidArgument):
                held.append(bench.submit(identity, start, end))
        elif action == "cancel" and held:
            held[pick % len(held)].cancel()
        elif action == "take" and number not in taken and bench.can_take(number):
            taken[number] = bench.take(number)
        elif action in ("finish", "fail") and number in taken:
            batch = taken.pop(number)
            if action == "fail":
                bench.errors[number] = PenstockError("broken")
                broken.update(int(pending.request.id) for pending in batch.requests)
            bench.finish(batch, number)
        elif action == "idle":
            bench.loop.advance(IDLE_S / 2)
    end_all(bench, taken, len(held))
    assert all(len(outcomes) == 1 for outcomes in bench.outcomes)
    assert bench.batcher.statistics.pending == 0
    assert not bench.batcher._table
    check_sums(bench, held, broken)


def end_all(bench: Bench, taken: dict[int, Batch], most: int) -> None:
    for number, batch in taken.items():
        bench.finish(batch, number)
    for _ in range(most):
        for number in range(len(bench.models)):
            if bench.can_take(number):
                bench.run(number)
        bench.loop.advance(IDLE_S * 2)


def check_sums(bench: Bench, held: list[SequenceStep], broken: set[int]) -> None:
    """Check that the requests of each id ran in order, and that each answer is the sum since the sequence's start."""
    values = bench.values()
    for identity in {step.sequence.id for step in held}:
        numbers = [number for number in bench.ran if held[number].sequence.id == identity]
        assert numbers == sorted(numbers)
        total: float | None = None
        is_known = True
        for number in numbers:
            start = held[number].start
            assert start or total is not None or not is_known, "it runs although its sequence was never started"
            if number in broken:
                total = None if start else total
                is_known = is_known if not start else values[number] is not Cancelled
                continue
            is_known = is_known or start
            total = number + (0 if start else total or 0)
            assert values[number] in (total, Cancelled) or not is_known
        assert len(set(numbers)) == len(numbers)


class Running:
    """A batcher with real instances on a real loop."""

    def __init__(self, config: SequencingConfig, models: list[LoadedModel]) -> None:
        plain = MergedRows() if config.batching.batchable else SingleRequest()
        config = msgspec.structs.replace(config, instances=len(models))
        self.batcher = SequenceBatcher(config, plain, asyncio.get_running_loop())
        pairs = zip(models, self.batcher.batchers, strict=True)
        self.instances = [Instance(f"i{n}", model, one) for n, (model, one) in enumerate(pairs)]

    async def ask(self, asked: list[tuple[float, int | str, bool, bool]]) -> list[Outcome]:
        """Submit all at once, each (value, sequence, start, end), and wait for the answers."""
        outcomes: dict[int, Outcome] = {}
        for number, (value, identity, start, end) in enumerate(asked):
            request = make_request(value, identity, start, end)
            self.batcher.submit(request, 1, None, partial(outcomes.__setitem__, number))
        for instance in self.instances:
            asyncio.get_running_loop().call_soon(instance.start)
        await self.batcher.drain()
        self.batcher.stop()
        for instance in self.instances:
            await asyncio.to_thread(instance.join, 10)
        return [outcomes[number] for number in range(len(asked))]


def results(config: SequencingConfig, models: list[LoadedModel], asked: list[Any]) -> list[Any]:
    async def main() -> list[Any]:
        return await Running(config, models).ask(asked)

    return [one.outputs["y"].item() if isinstance(one, InferResponse) else one for one in asyncio.run(main())]


def interleaved(sequences: int, length: int) -> list[tuple[float, int, bool, bool]]:
    """Request k of sequence s asks to add s * 10 + k."""
    return [
        (identity * 10 + step, identity, step == 0, step == length - 1)
        for step in range(length)
        for identity in range(1, sequences + 1)
    ]


def sums(asked: list[tuple[float, int, bool, bool]]) -> list[float]:
    totals: defaultdict[int, float] = defaultdict(float)
    expected = []
    for value, identity, *_ in asked:
        totals[identity] += value
        expected.append(totals[identity])
    return expected


@pytest.mark.parametrize("instances", [1, 2])
def test_real_sequences_with_implicit_state(instances: int) -> None:
    asked = interleaved(8, 6)
    assert results(implicit(), [load_accumulator() for _ in range(instances)], asked) == sums(asked)


@pytest.mark.parametrize("instances", [1, 2])
def test_real_sequences_in_fixed_slots(instances: int) -> None:
    asked = interleaved(8, 6)
    models: list[LoadedModel] = [SlotSums(3) for _ in range(instances)]
    assert results(fixed(slots=3), models, asked) == sums(asked)


class OneByOne:
    """``model``, which receives requests unmerged."""

    reentrant, decoupled, max_batch = False, False, None

    def __init__(self, model: LoadedModel) -> None:
        self.signature, self.unload = model.signature, model.unload
        self._model = model

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        for number, request in enumerate(requests):
            answer(number, self._model.forward(request.inputs), True)


@pytest.mark.parametrize("instances", [1, 2])
def test_real_sequences_of_a_model_that_is_given_single_requests(instances: int) -> None:
    asked = interleaved(8, 6)
    models: list[Any] = [OneByOne(load_accumulator()) for _ in range(instances)]
    assert results(implicit(), models, asked) == sums(asked)


def test_states_are_not_for_clients() -> None:
    async def main() -> Outcome:
        (outcome,) = await Running(implicit(), [load_accumulator()]).ask([(1, 1, True, True)])
        return outcome

    outcome = asyncio.run(main())
    assert isinstance(outcome, InferResponse)
    assert list(outcome.outputs) == ["y"]


class FailsOnNegative(LoadedModel):
    """Like ``model``, but fails for batches with a negative number."""

    reentrant = False

    def __init__(self, model: LoadedModel) -> None:
        self.signature = model.signature
        self.unload = model.unload
        self._model = model

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = self._model.forward(inputs)
        if (inputs["x"] < 0).any():
            raise ZeroDivisionError
        return outputs


def test_one_failing_sequence_does_not_fail_others_where_the_server_keeps_the_states() -> None:
    asked = [(1, 1, True, False), (2, 2, True, False), (-5, 1, False, False), (3, 2, False, True), (4, 1, False, True)]
    got = results(implicit(), [FailsOnNegative(load_accumulator())], asked)
    assert isinstance(got[2], PenstockError)
    assert [got[0], got[1], got[3], got[4]] == [1, 2, 5, 5]


def test_a_batch_of_a_model_that_remembers_is_not_run_again() -> None:
    model = SlotSums(2)
    asked = [(1, 1, True, False), (2, 2, True, False), (-5, 1, False, False), (3, 2, False, True), (4, 1, False, True)]
    got = results(fixed(), [model], asked)
    assert [type(one) for one in got] == [float, float, PenstockError, PenstockError, float]
    assert got[4] == 5
    assert len(model.calls) == 3
