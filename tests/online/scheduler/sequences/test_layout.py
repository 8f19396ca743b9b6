from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.online.scheduler.layout import MergedRows
from penstock.online.scheduler.queue import Pending
from penstock.online.scheduler.sequences.controls import Control, ControlKind
from penstock.online.scheduler.sequences.implicit_state import ImplicitState, ImplicitStates
from penstock.online.scheduler.sequences.layout import SequenceLayout
from penstock.online.scheduler.sequences.slots import Sequence, SequencePlace, SequenceStep
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, TensorSpec


class Owner:
    def cancel(self, pending: Pending) -> None:
        raise AssertionError


READY = Control("ready", ControlKind.READY, DataType.INT32)
SUM = ImplicitState("sum", TensorSpec("sum_out", DataType.FP32, (-1, 1)), np.zeros((1, 1), np.float32))


def make_layout(fixed: bool) -> SequenceLayout:
    states = ImplicitStates([SUM], batchable=True)
    return SequenceLayout(MergedRows(), fixed, [READY], states, hidden=frozenset({"sum_out"}))


def make_pending(sequence: Sequence, value: float, start: bool = False) -> Pending:
    request = InferRequest("m", {"x": np.full((1, 1), value, np.float32)})
    step = SequenceStep([].append, sequence, request, None, None, 0, start, False)
    assert sequence.place is not None
    step.place = sequence.place
    request.step = step
    return Pending(Owner(), 0, request, 1, None, None, 0)


def accumulate(inputs: dict[str, Array]) -> dict[str, Array]:
    """A model that adds its input to its state."""
    total = inputs["x"] + inputs["sum"]
    return {"y": total, "sum_out": total}


def run(layout: SequenceLayout, requests: Rows[Pending]) -> list[float]:
    found = layout.scatter(requests, accumulate(dict(layout.gather(requests))))
    assert all(set(outputs) == {"y"} for outputs in found), "states are not sent to clients"
    return [float(outputs["y"][0, 0]) for outputs in found]


@given(
    st.booleans(),
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=4), max_size=6),
)
def test_each_sequence_gets_the_answers_that_it_would_get_alone(
    fixed: bool, batches: list[list[tuple[int, int]]]
) -> None:
    layout = make_layout(fixed)
    sequences = [Sequence(str(slot), SequencePlace(0, slot)) for slot in range(4)]
    totals: dict[int, int] = {}
    for batch in batches:
        latest = dict(batch)  # one request of a sequence at a time
        requests = [make_pending(sequences[slot], value, slot not in totals) for slot, value in latest.items()]
        for slot, value in latest.items():
            totals[slot] = totals.get(slot, 0) + value
        assert run(layout, requests) == [totals[slot] for slot in latest]


def test_with_fixed_rows_the_controls_mark_rows_without_a_request() -> None:
    requests = [make_pending(Sequence(str(slot), SequencePlace(0, slot)), slot, True) for slot in (2, 0)]
    inputs = make_layout(fixed=True).gather(requests)
    assert inputs["ready"].ravel().tolist() == [1, 0, 1]
    assert inputs["x"][[0, 2]].ravel().tolist() == [0, 2]
    assert make_layout(fixed=False).gather(requests)["ready"].ravel().tolist() == [1, 1]


def test_gathering_marks_the_steps_as_begun() -> None:
    request = make_pending(Sequence("a", SequencePlace(0, 0)), 1, True)
    make_layout(fixed=False).gather([request])
    step = request.request.step
    assert isinstance(step, SequenceStep)
    assert step.began


def test_outputs_that_do_not_fit_change_no_state() -> None:
    layout, sequence = make_layout(fixed=False), Sequence("a", SequencePlace(0, 0))
    assert run(layout, [make_pending(sequence, 5, True)]) == [5]
    request = make_pending(sequence, 1)
    layout.gather([request])
    with pytest.raises(PenstockError):
        layout.scatter([request], {"y": np.zeros((1, 1), np.float32), "sum_out": np.zeros((3, 3), np.float32)})
    assert run(layout, [make_pending(sequence, 2)]) == [7]
