"""Which call a free worker runs next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.pipeline.executor import Told
from penstock.pipeline.streaming.fairness import Flow, Flows, Item
from penstock.pipeline.streaming.stage import Inputs, StageCall, StageQueue, StageSpec, take

FLOW = Flow(Flows())


def stage(name: str, depth: int = 0, **more: Any) -> StageQueue:
    def run(items: Sequence[Inputs]) -> list[Told]:
        return [*items]

    return StageQueue(StageSpec(name, run, **more), depth)


def add(stage: StageQueue, *items: int, **inputs: Any) -> list[StageCall]:
    calls = [StageCall(Item(item, FLOW), {"x": item, **inputs}, lambda told: None) for item in items]
    for call in calls:
        stage.add(call)
    return calls


def taken(*stages: StageQueue) -> tuple[str, list[int]] | None:
    batch = take(stages)
    return batch and (batch.stage.spec.name, [call.item.number for call in batch.calls])


def test_the_oldest_item_comes_first_then_the_later_stage() -> None:
    early, late = stage("early", 0), stage("late", 1)
    add(early, 1, 2)
    add(late, 1)
    assert [taken(early, late) for _ in range(4)] == [("late", [1]), ("early", [1]), ("early", [2]), None]


def test_a_partial_batch_waits_while_another_stage_is_ready() -> None:
    decode, net = stage("decode"), stage("net", 1, max_batch=2, waits=True)
    add(net, 0)
    add(decode, 1)
    assert taken(decode, net) == ("decode", [1])
    add(net, 1)
    add(decode, 2)
    assert taken(decode, net) == ("net", [0, 1])
    add(net, 5)
    assert taken(net) == ("net", [5])


def test_only_calls_of_one_group_run_together() -> None:
    net = stage("net", max_batch=4, group=lambda inputs: inputs["size"])
    add(net, 0, size=1)
    add(net, 1, size=2)
    add(net, 2, size=1)
    assert [taken(net) for _ in range(3)] == [("net", [0, 2]), ("net", [1]), None]


def test_a_limited_stage_waits_until_a_batch_ends() -> None:
    net = stage("net", limit=1)
    add(net, 0, 1)
    assert taken(net) == ("net", [0])
    assert taken(net) is None
    net.busy -= 1
    assert taken(net) == ("net", [1])


def test_cancelled_calls_are_left_out() -> None:
    net = stage("net", max_batch=3)
    first, _, third = add(net, 0, 1, 2)
    first.cancel()
    third.cancel()
    assert taken(net) == ("net", [1])
    assert taken(net) is None
    assert first.inputs == {}


def test_a_call_that_is_cancelled_while_it_is_taken_does_not_run() -> None:
    """Another thread cancels calls, without the lock of the stages."""

    def cancelling() -> int:
        call.cancel()
        return 1

    call = StageCall(Item(0, FLOW), {}, lambda _: None)
    stage = StageQueue(StageSpec("net", lambda _: [], size=cancelling), 0)
    other = StageQueue(StageSpec("other", lambda _: []), 1)
    stage.add(call)
    assert take([stage]) is None
    assert (stage.busy, dict(stage.groups)) == (0, {})
    call = StageCall(Item(0, FLOW), {}, lambda _: None)
    stage.add(call)
    other.add(later := StageCall(Item(1, FLOW), {}, lambda _: None))
    batch = take([stage, other])
    assert batch is not None
    assert (batch.stage, batch.calls) == (other, [later])
