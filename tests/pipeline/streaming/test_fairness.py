"""Flows share the workers by the work that they receive. The test plays the workers, and no thread runs."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.streaming.fairness import FairQueue, Flows, Item

_COSTS = st.lists(st.floats(0.001, 2), min_size=2, max_size=5)


class Entry:
    def __init__(self, item: Item, key: int) -> None:
        self.item = item
        self.key = key
        self.is_cancelled = False


class Bench:
    """A worker that takes one entry at a time. Work of flow ``n`` costs ``costs[n]`` seconds."""

    def __init__(self, costs: list[float]) -> None:
        self.costs = costs
        self.flows = Flows()
        self.queue = FairQueue[Entry]()
        self.added = 0
        self.served: list[int] = []
        self.work = [0.0] * len(costs)

    def add(self, key: int, count: int = 1, size: int = 0) -> list[Entry]:
        entries = []
        for _ in range(count):
            entries.append(Entry(Item(self.added, self.flows.enter(key), size), key))
            self.added += 1
            self.queue.add(entries[-1])
        return entries

    def serve(self) -> Entry | None:
        entry = self.queue.first()
        if entry is not None:
            self.queue.remove(entry)
            entry.item.start()
            self.flows.charge([entry.item], self.costs[entry.key])
            self.flows.leave(entry.item)
            self.work[entry.key] += self.costs[entry.key]
            self.served.append(entry.key)
        return entry


@given(_COSTS, st.integers(1, 60))
def test_busy_flows_receive_equal_work_whatever_their_items_cost(costs: list[float], rounds: int) -> None:
    bench = Bench(costs)
    for key in range(len(costs)):
        bench.add(key, rounds)
    left = [rounds] * len(costs)
    while all(left):
        entry = bench.serve()
        assert entry is not None
        left[entry.key] -= 1
        assert max(bench.work) - min(bench.work) <= max(costs) + 1e-9


@given(st.integers(1, 300), st.integers(1, 50), st.floats(0.001, 0.05))
def test_small_requests_of_another_client_pass_a_flood(flood: int, before: int, cost: float) -> None:
    bench = Bench([1.0, cost])
    bench.add(0, flood)
    for _ in range(min(before, flood)):
        bench.serve()
    for _ in range(20):
        bench.add(1)
        count = len(bench.served)
        while bench.serve() and bench.served[-1] != 1:
            pass
        assert len(bench.served) - count <= 2, "it waits for at most one request of the flood"


@given(st.integers(10, 60))
def test_a_small_request_passes_large_ones_of_connections_that_are_new_as_well(connections: int) -> None:
    bench = Bench([1.0] * connections + [0.001])
    for key in range(connections):
        bench.add(key, size=60_000)
    bench.serve()
    bench.add(connections, size=10_000)
    bench.serve()
    assert bench.served[-1] == connections


@given(st.integers(1, 40), st.floats(0.01, 1))
def test_a_large_request_is_served_among_new_clients_with_small_ones(clients: int, cost: float) -> None:
    bench = Bench([1.0] + [cost] * 20_000)
    bench.add(0, size=100_000)
    for key in range(1, 20_000):
        bench.add(key, size=100)
        if key >= clients:
            bench.serve()
        if 0 in bench.served:
            break
    assert sum(bench.work[1:]) <= 2 * cost * (clients + 2), (
        "it waits for as long as the slowest item takes, in virtual time"
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "serve", "cancel"])), max_size=60))
def test_every_entry_is_served_once_and_in_the_order_of_its_flow(events: list[tuple[int, str]]) -> None:
    bench, live = Bench([0.5, 0.1, 0.7, 1.0]), list[Entry]()
    served: list[Entry] = []
    for key, event in events:
        if event == "add":
            live += bench.add(key)
        elif event == "serve" and (entry := bench.serve()) is not None:
            served.append(entry)
        elif live and live[-1] not in served:
            live.pop().is_cancelled = True
    while (entry := bench.serve()) is not None:
        served.append(entry)
    assert not bench.queue
    assert {entry.item.number for entry in served} == {entry.item.number for entry in live}
    for key in range(4):
        numbers = [entry.item.number for entry in served if entry.key == key]
        assert numbers == sorted(numbers)


@given(st.integers(2, 40), st.integers(2, 5), st.floats(0.01, 0.1))
def test_items_of_many_flows_end_one_after_the_other(connections: int, steps: int, cost: float) -> None:
    bench = Bench([cost] * connections)
    left: dict[Item, int] = {entry.item: steps for key in range(connections) for entry in bench.add(key)}
    begun: set[Item] = set()
    while (entry := bench.queue.first()) is not None:
        bench.queue.remove(entry)
        entry.item.start()
        begun.add(entry.item)
        bench.flows.charge([entry.item], cost)
        left[entry.item] -= 1
        if left[entry.item]:
            bench.queue.add(entry)
        else:
            bench.flows.leave(entry.item)
            begun.remove(entry.item)
        assert len(begun) <= 1


@given(st.integers(1, 20), st.floats(0.05, 0.2))
def test_items_of_endless_steps_do_not_keep_their_place(connections: int, cost: float) -> None:
    bench = Bench([cost] * (connections + 1))
    for key in range(connections):
        bench.add(key)
    work = 0.0
    while (entry := bench.queue.first()) is not None and entry.key < connections:
        bench.queue.remove(entry)
        entry.item.start()
        bench.flows.charge([entry.item], cost)
        bench.queue.add(entry)
        if not work:
            bench.add(connections)
        work += cost
        assert work <= connections * (2 + 2 * cost)


class Visit(NamedTuple):
    cost: float
    stays: int


@given(st.lists(st.builds(Visit, st.floats(0, 2), st.integers(0, 3)), min_size=500, max_size=900))
def test_flows_of_clients_that_have_left_are_forgotten(visits: list[Visit]) -> None:
    flows = Flows()
    inside: list[tuple[int, Item]] = []
    for number, visit in enumerate(visits):
        flow = flows.enter(number)
        item = Item(number, flow)
        flows.charge([item], visit.cost)
        inside.append((number + visit.stays, item))
        for one in [one for one in inside if one[0] <= number]:
            flows.leave(one[1])
            inside.remove(one)
    assert len(flows) <= 60


def test_only_started_items_are_taken_while_the_memory_is_full() -> None:
    bench = Bench([1.0, 1.0])
    first, second = bench.add(0, 2)
    (other,) = bench.add(1)
    assert bench.queue.first(only_started=True) is None
    second.item.start()
    assert bench.queue.first(only_started=True) is first, "a newer item of its flow has been started"
    bench.flows.charge([first.item], 5)
    assert bench.queue.first() is other
    assert bench.queue.first(only_started=True) is first


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_a_flow_that_returns_has_saved_no_time(keys: list[int]) -> None:
    bench = Bench([1.0, 1.0, 1.0])
    for key in keys:
        bench.add(key)
        bench.serve()
    bench.work = [0.0] * 3
    for key in range(3):
        bench.add(key, 20)
    for _ in range(30):
        bench.serve()
    assert max(bench.work) - min(bench.work) <= 3
