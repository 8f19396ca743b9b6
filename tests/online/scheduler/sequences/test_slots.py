import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.online.scheduler.sequences.slots import Sequence, SequencePlace, SequenceStep, SequenceTable
from sequences import make_request


class Desk:
    """A table and its results: the slots of the requests, and all requests that ran or were given up, in order."""

    def __init__(self, instances: int = 1, slots: int = 2) -> None:
        self.table = SequenceTable(instances, slots)
        self.added: list[SequenceStep] = []
        self.running: list[SequenceStep] = []
        self.ran: list[SequenceStep] = []
        self.dropped: list[SequenceStep] = []
        self.over: list[Sequence] = []

    def add(self, identity: int, start: bool = False, end: bool = False) -> SequenceStep | None:
        """None if the request is not acceptable."""
        sequence = self.table.find(identity)
        if not start and not sequence.is_open:
            return None
        step = SequenceStep(self.give_up, sequence, make_request(0, identity), None, None, 0, start, end)
        self.added.append(step)
        self.table.add(step)
        self.look()
        return step

    def look(self) -> None:
        self.over += [sequence for _, sequence in self.table.over]
        self.table.over.clear()
        self.running += self.table.ready
        self.table.ready.clear()

    def finish(self, step: SequenceStep) -> None:
        self.running.remove(step)
        self.ran.append(step)
        self.table.finish(step)
        self.look()

    def give_up(self, step: SequenceStep) -> None:
        if step in self.running:
            self.running.remove(step)
        self.dropped += self.table.give_up(step)
        self.look()

    def end_idle(self) -> None:
        for sequence in self.table:
            if sequence.is_idle:
                self.table.end(sequence)
                self.look()

    def places(self) -> dict[int | str, SequencePlace]:
        return {step.sequence.id: step.place for step in self.running}


def whole(desk: Desk, identity: int) -> SequenceStep:
    step = desk.add(identity, start=True, end=True)
    assert step is not None
    return step


def test_a_request_that_is_no_start_needs_a_sequence_under_way() -> None:
    desk = Desk()
    assert desk.add(1) is None
    first = desk.add(1, start=True)
    assert first is not None
    assert desk.add(1, end=True) is not None
    assert desk.add(1) is None
    assert len(desk.table) == 1


def test_slots_are_shared_out_over_instances_lowest_first() -> None:
    desk = Desk(instances=2, slots=2)
    for identity in range(1, 6):
        desk.add(identity, start=True)
    assert desk.places() == {
        1: SequencePlace(0, 0),
        2: SequencePlace(1, 0),
        3: SequencePlace(0, 1),
        4: SequencePlace(1, 1),
    }


def test_the_backlog_leaves_in_order_as_slots_become_free() -> None:
    desk = Desk(slots=1)
    one, two, three = whole(desk, 1), whole(desk, 2), whole(desk, 3)
    for step in (one, two, three):
        assert desk.running == [step]
        desk.finish(step)
    assert not desk.table


def test_one_request_of_a_sequence_is_with_the_instance_at_a_time() -> None:
    desk = Desk()
    steps = [desk.add(1, start=True), desk.add(1), desk.add(1, end=True)]
    for step in steps:
        assert desk.running == [step]
        assert step is not None
        assert step.place == SequencePlace(0, 0)
        desk.finish(step)
    assert [sequence.id for sequence in desk.over] == [1]


def test_a_second_sequence_of_an_id_runs_after_the_first_and_behind_those_that_wait() -> None:
    desk = Desk(slots=1)
    first, other, second = whole(desk, 1), whole(desk, 2), whole(desk, 1)
    for step in (first, other, second):
        assert desk.running == [step]
        desk.finish(step)
    assert [sequence.id for sequence in desk.over] == [1, 2, 1]


def test_a_start_of_what_is_under_way_keeps_the_slot() -> None:
    desk = Desk(slots=1)
    first, again = desk.add(1, start=True), desk.add(1, start=True)
    whole(desk, 2)
    assert first is not None
    desk.finish(first)
    assert desk.running == [again]


def test_what_is_given_up_takes_those_behind_it_along_up_to_the_next_start() -> None:
    desk = Desk(slots=1)
    first, lost, behind, again = desk.add(1, start=True), desk.add(1), desk.add(1), desk.add(1, start=True)
    assert first is not None
    assert lost is not None
    desk.give_up(lost)
    assert desk.dropped == [lost, behind]
    desk.finish(first)
    assert desk.over
    assert desk.running == [again]
    assert desk.add(1) is not None


def test_a_sequence_whose_end_was_given_up_is_over_once_the_rest_has_run() -> None:
    desk = Desk(slots=1)
    first, end = desk.add(1, start=True), desk.add(1, end=True)
    other = whole(desk, 2)
    assert first is not None
    assert end is not None
    desk.give_up(end)
    assert desk.add(1) is None
    desk.finish(first)
    assert desk.running == [other]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "finish", "finish", "give_up", "idle"]),
        st.integers(1, 5),
        st.booleans(),
        st.booleans(),
        st.integers(0, 99),
    ),
    max_size=80,
)


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 2), st.integers(1, 3), STEPS)
def test_any_interleaving_runs_every_request_once_in_order_and_in_its_slot(
    instances: int, slots: int, steps: list[tuple[str, int, bool, bool, int]]
) -> None:
    desk = Desk(instances, slots)
    for action, identity, start, end, pick in steps:
        open_steps = [step for step in desk.added if step not in desk.ran and step not in desk.dropped]
        if action == "add":
            desk.add(identity, start, end)
        elif action == "finish" and desk.running:
            desk.finish(desk.running[pick % len(desk.running)])
        elif action == "give_up" and open_steps:
            desk.give_up(open_steps[pick % len(open_steps)])
        elif action == "idle":
            desk.end_idle()
        check(desk, instances, slots)
    while desk.table:
        desk.end_idle()
        for step in tuple(desk.running):
            desk.finish(step)
        check(desk, instances, slots)
    assert sorted(map(id, desk.added)) == sorted(map(id, desk.ran + desk.dropped))
    for one in {step.sequence.id for step in desk.added}:
        ran = [step for step in desk.ran if step.sequence.id == one]
        assert ran == [step for step in desk.added if step in ran]
        # Whatever ran without being a start ran in the slot of the request before it.
        assert all(step.start or step.place == before.place for before, step in itertools.pairwise(ran))


def check(desk: Desk, instances: int, slots: int) -> None:
    places = [sequence.place for sequence in desk.table if sequence.place is not None]
    assert len(places) == len(set(places))
    assert all(place.instance < instances and place.slot < slots for place in places)
    assert len({step.sequence.id for step in desk.running}) == len(desk.running)
    waits = [sequence for sequence in desk.table if sequence.place is None]
    assert not waits or len(places) == instances * slots
    assert all(sequence.waiting for sequence in waits)
