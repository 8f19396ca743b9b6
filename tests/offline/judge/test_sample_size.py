from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidArgument
from penstock.measurement import Interval
from penstock.offline.judge.metrics import paired_interval
from penstock.offline.judge.sample_size import samples_needed, too_few, unproved


@given(max_loss=st.floats(0.005, 1), share=st.floats(-1, 0.9), changed=st.floats(0, 0.5))
def test_samples_needed_are_enough_and_one_less_is_not(max_loss: float, share: float, changed: float) -> None:
    loss = share * max_loss
    count = samples_needed(max_loss, loss, changed)
    assert count is not None
    moved = max(changed, abs(loss))

    def bound(samples: int) -> float:
        """The interval's upper end, written out for expected counts that need not be whole."""
        if not moved:
            return float(1 - 0.025 ** (1 / samples))
        n, b, c = samples + 2, samples * (moved + loss) / 2 + 0.5, samples * (moved - loss) / 2 + 0.5
        return float((b - c) / n + 1.959964 * np.sqrt(b + c - (b - c) ** 2 / n) / n)

    assert bound(count) <= max_loss
    assert count == 1 or bound(count - 1) > max_loss


def test_samples_needed_in_plain_figures() -> None:
    # Nothing changes: 0.99 to the power of 368 is just below 2.5 %.
    assert samples_needed(0.01, changed=0.0) == 368
    assert samples_needed(0.01) == 812
    assert samples_needed(0.01, loss=0.01) is None
    with pytest.raises(InvalidArgument, match="allowed loss 0.0, .* is not a fraction"):
        samples_needed(0.0)


def test_samples_needed_agree_with_the_interval() -> None:
    # 1,000 samples of which 10 are lost and 10 won prove less than one point; 500 of which 5 and 5 do not.
    for count, proves in ((1000, True), (500, False)):
        before, after = np.ones(count, bool), np.ones(count, bool)
        before[: count // 100] = False
        after[-(count // 100) :] = False
        assert (paired_interval(before, after).high <= 0.01) == proves
        needed = samples_needed(0.01, 0.0, 0.02)
        assert needed is not None
        assert (count >= needed) == proves


@given(st.integers(1, 3000), st.sampled_from([0.005, 0.01, 0.05, 0.5]))
def test_too_few_is_when_not_even_no_change_is_proof(count: int, loss: float) -> None:
    right = np.ones(count, bool)
    is_provable = paired_interval(right, right).high <= loss
    assert bool(too_few(count, "top-1", loss, "evaluation")) == (not is_provable)


def test_how_many_are_needed_is_told() -> None:
    (note,) = too_few(75, "agreement", 0.01, "held-out")
    assert "75 held-out samples cannot prove a loss within 1.00%, so losses are estimates: give at least 368" in note
    assert "or 812" in note
    assert too_few(1, "fidelity", 0.01, "held-out") == ()
    assert too_few(1, "top-1", 0.0, "held-out") == ()


def test_what_is_within_the_bound_but_not_proved_is_noted() -> None:
    def accuracy(value: float, high: float, metric: str = "top-1") -> Accuracy:
        return Accuracy(metric, 0.9, Interval(value, -high, high), 0.1, 250)  # type: ignore[arg-type]

    (note,) = unproved(accuracy(0.004, 0.012), 0.01)
    assert "an estimate from 250 samples" in note
    assert "is at most 1.20%" in note
    assert "samples would prove it" in note
    assert "would do" not in unproved(accuracy(0.01, 0.02), 0.01)[0]
    assert unproved(accuracy(0.004, 0.009), 0.01) == ()
    assert unproved(accuracy(0.02, 0.03), 0.01) == ()
    assert unproved(accuracy(0.004, 0.012, "fidelity"), 0.01) == ()
