import gc
import weakref
from collections.abc import Sequence as Rows

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PenstockError, ResourceExhausted
from penstock.online.scheduler.sequences.implicit_state import ImplicitState, ImplicitStates
from penstock.online.scheduler.sequences.slots import Sequence, SequencePlace, SequenceStep
from penstock.tensor import Array, DataType, TensorSpec
from sequences import make_request


class Table:
    """Sequences by name, each in a slot, and the states of their instance; ``sums`` are the expected states."""

    def __init__(self, dims: tuple[int, ...] = (2,), max_bytes: int = 1 << 20) -> None:
        spec = TensorSpec("out", DataType.FP32, (-1, *dims))
        initial = np.zeros((1, *(1 if dim == -1 else dim for dim in dims)), np.float32)
        self.states = ImplicitStates([ImplicitState("in", spec, initial)], batchable=True, max_bytes=max_bytes)
        self.sequences: dict[str, Sequence] = {}

    def step(self, name: str, start: bool = False, last: bool = False) -> SequenceStep:
        sequence = self.sequences.setdefault(name, Sequence(name, SequencePlace(0, 0)))
        return SequenceStep([].append, sequence, make_request(0, name), None, None, 0, start, last, last)

    def run(self, rows: Rows[SequenceStep | None], add: float = 1) -> Array:
        """Run one batch whose states grow by ``add``; return the inputs of the model."""
        given = self.states.gather(rows)["in"]
        self.states.scatter(rows, {"out": given + np.float32(add)})
        return given


def test_a_state_is_what_the_request_before_gave() -> None:
    table = Table()
    assert table.run([table.step("a", start=True)]).tolist() == [[0, 0]]
    assert table.run([table.step("a")]).tolist() == [[1, 1]]
    assert table.run([table.step("a", start=True)]).tolist() == [[0, 0]]


def test_a_single_state_is_never_copied() -> None:
    table = Table()
    for name in "ab":
        table.states.gather([table.step(name, start=True)])
        table.states.scatter([table.step(name)], {"out": np.ones((1, 2), np.float32)})
    kept = table.sequences["a"].states["in"]
    assert table.states.gather([table.step("a")])["in"] is kept


def test_a_failed_batch_changes_nothing() -> None:
    table = Table()
    table.run([table.step("a", start=True), table.step("b", start=True)], add=3)
    rows = [table.step("b"), None, table.step("a")]
    table.states.gather(rows)
    with pytest.raises(PenstockError, match="must be FP32"):
        table.states.scatter(rows, {"out": np.ones((2, 2), np.float32)})
    with pytest.raises(PenstockError, match="state output 'out' is missing"):
        table.states.scatter(rows, {})
    assert table.run([table.step("a")], add=0).tolist() == [[3, 3]]
    assert table.run([table.step("b")], add=0).tolist() == [[3, 3]]


def test_states_may_change_their_shape() -> None:
    table = Table(dims=(-1,))
    start = table.step("a", start=True)
    assert table.states.key(start) == ((1, 1),)
    table.states.gather([start])
    table.states.scatter([start], {"out": np.arange(3, dtype=np.float32)[None]})
    following = table.step("a")
    assert table.states.key(following) == ((1, 3),)
    assert table.states.gather([following])["in"].tolist() == [[0, 1, 2]]
    assert table.states.key(table.step("a", start=True)) == ((1, 1),)


def test_memory_is_given_back_when_sequences_are_over() -> None:
    table = Table()
    alive = []

    def run(*steps: SequenceStep) -> None:
        table.states.gather(steps)
        outputs = np.ones((len(steps), 2), np.float32)
        alive.append(weakref.ref(outputs))
        table.states.scatter(steps, {"out": outputs})

    run(table.step("a", start=True), table.step("b", start=True))
    table.states.forget(table.sequences["a"])
    table.states.forget(table.sequences["b"])
    run(table.step("a", start=True), table.step("b", start=True))
    run(table.step("a", last=True))
    assert table.sequences["b"].states
    table.states.forget(table.sequences["b"])
    table.sequences["c"] = Sequence("c", None)
    run(table.step("c", start=True))
    gc.collect()
    assert [one() for one in alive] == [None] * 4


def test_all_states_together_are_bounded() -> None:
    table = Table(dims=(-1,), max_bytes=64)

    def run(name: str, count: int) -> None:
        step = table.step(name, start=True)
        table.states.gather([step])
        table.states.scatter([step], {"out": np.ones((1, count), np.float32)})

    run("a", 8)
    run("b", 7)
    run("b", 7)
    run("c", 1)
    with pytest.raises(ResourceExhausted, match="more than the limit of 64 bytes"):
        run("d", 1)
    table.states.forget(table.sequences["a"])
    run("d", 1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans()), min_size=1, max_size=4), max_size=20
    )
)
def test_any_batches_give_every_sequence_its_own_state(batches: list[list[tuple[str, bool, bool]]]) -> None:
    table = Table()
    sums: dict[str, float] = {}
    for number, batch in enumerate(batches):
        rows: list[SequenceStep | None] = []
        expected: list[float | None] = []
        for name, start, is_hole in {one[0]: one for one in batch}.values():
            if is_hole and len(batch) > 1 and rows:
                rows.append(None)
                expected.append(None)
                continue
            rows.append(table.step(name, start=start or name not in sums))
            expected.append(0.0 if start or name not in sums else sums[name])
            sums[name] = (expected[-1] or 0.0) + number
        given = table.run(rows, add=number)
        assert given.shape == (len(rows), 2)
        for row, want in zip(given, expected, strict=True):
            assert want is None or row.tolist() == [want, want]
