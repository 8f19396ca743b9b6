import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.online.scheduler.batching_config import QueuePolicy, TimeoutAction
from penstock.online.scheduler.queue import NEVER, Pending, Queue
from penstock.request import InferRequest

REJECT, DELAY = QueuePolicy(TimeoutAction.REJECT), QueuePolicy(TimeoutAction.DELAY)


class Nobody:
    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def cancel(self, pending: Pending) -> None:
        self.cancelled.append(pending.number)


def make_pending(
    number: int, key: str = "a", level: int = 0, timeout_ns: int = NEVER, deadline_ns: int = NEVER, rows: int = 1
) -> Pending:
    expires_ns = min(timeout_ns, deadline_ns)
    return Pending(
        Nobody(),
        number,
        InferRequest("m", {}),
        rows,
        key,
        lambda outcome: None,
        number,
        2 * level,
        timeout_ns,
        deadline_ns,
        expires_ns,
    )


def numbers(queue: Queue) -> list[list[int]]:
    return [[pending.number for pending in line] for line in queue.lines()]


def test_lines_hold_what_can_be_merged_and_the_most_urgent_is_in_front() -> None:
    queue = Queue([REJECT, REJECT])
    queue.extend([make_pending(1, "a", 1), make_pending(2, "b", 1), make_pending(3, "b", 0), make_pending(4, "a", 1)])
    assert numbers(queue) == [[3, 2], [1, 4]]
    assert len(queue) == 4


def test_late_requests_go_behind_their_level_or_out_of_the_queue() -> None:
    queue = Queue([DELAY, REJECT])
    first, second = make_pending(1, timeout_ns=5), make_pending(2)
    rejected, last = make_pending(3, level=1, timeout_ns=7), make_pending(4, level=1, timeout_ns=20)
    queue.extend([first, second, rejected, last])
    assert queue.next_ns == 5
    assert queue.expire(10) == [rejected]
    assert numbers(queue) == [[2, 1, 4]]
    assert queue.next_ns == 20


def test_a_late_request_still_has_its_deadline() -> None:
    queue = Queue([DELAY])
    pending = make_pending(1, timeout_ns=5, deadline_ns=9)
    queue.extend([pending])
    assert queue.expire(6) == []
    assert queue.next_ns == 9
    assert queue.expire(9) == [pending]
    assert numbers(queue) == []
    assert queue.next_ns == NEVER


def test_what_was_given_up_before_it_joined_does_not_join() -> None:
    queue = Queue([REJECT])
    gone = make_pending(1)
    gone.done = None
    queue.extend([gone, make_pending(2, rows=3)])
    assert numbers(queue) == [[2]]
    assert queue.levels[0].rows == 3


def test_moments_of_requests_that_left_do_not_pile_up() -> None:
    queue = Queue([REJECT])
    for number in range(5000):
        pending = make_pending(number, deadline_ns=10**15)
        queue.extend([pending])
        queue.take([pending], 1)
    assert len(queue._moments) < 100


def test_a_pending_request_that_has_ended_cannot_be_cancelled() -> None:
    owner = Nobody()
    pending = make_pending(1)
    pending.owner = owner
    pending.cancel()
    pending.done = None
    pending.cancel()
    assert owner.cancelled == [1]


def test_the_earliest_moment_is_known_however_many_requests_have_left() -> None:
    queue = Queue([REJECT])
    moments = [1 + 37 * number % 400 for number in range(400)]
    waiting = [make_pending(number, timeout_ns=moment) for number, moment in enumerate(moments)]
    queue.extend(waiting)
    while waiting:
        for pending in waiting[1::3]:
            assert queue.remove(pending)
        del waiting[1::3]
        assert queue.expire(0) == []
        assert len(queue._moments) <= 2 * len(queue) + 64
        # A moment of a request that has left may come first.
        while queue.next_ns < (earliest := min(pending.timeout_ns for pending in waiting)):
            assert queue.expire(queue.next_ns) == []
        assert [one.timeout_ns for one in queue.expire(earliest)] == [earliest]
        waiting = [pending for pending in waiting if pending.timeout_ns > earliest]
    assert queue.expire(NEVER) == []
    assert queue.next_ns == NEVER


def test_a_pending_request_is_of_the_highest_level_and_in_time_unless_it_says_otherwise() -> None:
    pending = Pending(Nobody(), 1, InferRequest("m", {}), 1, "a", None, 0)
    assert pending.lane == 0
    assert pending.timeout_ns == pending.deadline_ns == pending.expires_ns == NEVER


STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("add ended"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("take"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("expire"), st.integers(1, 5), st.just(0)),
)
POLICIES = [DELAY, REJECT, DELAY], [REJECT, REJECT], [DELAY], [REJECT]


def order(pending: Pending) -> tuple[int, int, int]:
    late = pending.lane & 1
    return pending.lane >> 1, late, pending.timeout_ns if late else pending.number


def check(queue: Queue, model: list[Pending], all_: list[Pending]) -> None:
    """The queue holds what the model holds."""
    lines = queue.lines()
    for line in lines:
        want = sorted((one for one in model if one.key == next(iter(line)).key), key=order)
        assert list(line) == want
        assert len(line) == len(want)
        assert [one in line for one in all_] == [one in want for one in all_]
        assert None not in line
    firsts = [next(iter(line)) for line in lines]
    assert [(one.lane, one.number) for one in firsts] == sorted((one.lane, one.number) for one in firsts)
    assert len(queue) == len(model)
    assert bool(queue) is bool(model)
    assert queue.next_ns <= min((one.expires_ns for one in model), default=NEVER)
    for level, counts in enumerate(queue.levels):
        waiting = [one for one in model if one.lane >> 1 == level]
        assert counts.rows == sum(one.rows for one in waiting)
        assert counts.waiting == len(waiting)


@pytest.mark.parametrize("policies", POLICIES, ids=lambda found: "-".join(one.timeout_action.name for one in found))
@settings(max_examples=120)
@given(steps=st.lists(STEP, max_size=60))
def test_a_queue_is_a_sorted_list(policies: list[QueuePolicy], steps: list[tuple[str, int, int]]) -> None:
    queue = Queue(policies)
    model: list[Pending] = []
    all_: list[Pending] = []
    now = 0

    for step, a, b in steps:
        if step in ("add", "add ended"):
            number = len(all_)
            # Time-outs differ, so that the order in which requests become late is one.
            timeout_ns = (now + 3 * b) * 1000 + number if b else NEVER
            pending = make_pending(number, "ab"[number % 2], a % len(policies), timeout_ns, rows=1 + b)
            all_.append(pending)
            queue.levels[pending.lane >> 1].came += 1
            if step == "add":
                model.append(pending)
            else:
                pending.done = None
            queue.extend([pending])
        elif step == "remove" and all_:
            pending = all_[a % len(all_)]
            assert queue.remove(pending) == (pending in model)
            model = [one for one in model if one is not pending]
        elif step == "take" and model:
            line = list(queue.lines()[0])
            batch = line if b else line[:a]
            assert min(model, key=order).lane == batch[0].lane
            queue.take(batch, sum(pending.rows for pending in batch))
            model = [one for one in model if one not in batch]
        elif step == "expire":
            now += a
            due = [pending for pending in model if pending.expires_ns <= now * 1000]
            rejected = queue.expire(now * 1000)
            assert {p.number for p in rejected} == {p.number for p in due if policies[p.lane >> 1] is REJECT}
            model = [one for one in model if one not in rejected]
        check(queue, model, all_)


def test_moments_of_a_burst_that_left_are_forgotten() -> None:
    queue = Queue([REJECT])
    burst = [make_pending(number, deadline_ns=10**15) for number in range(4000)]
    queue.extend(burst)
    queue.take(burst[:-1], len(burst) - 1)
    assert queue.expire(0) == []
    assert len(queue._moments) <= 2 + 64
    assert queue.expire(10**15) == burst[-1:]
