from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidences import accuracy
from penstock.errors import InvalidArgument
from penstock.offline.judge.intervals import loss_bound, proves_loss, tail
from penstock.offline.judge.sample_size import samples_needed, too_few, unproved


@settings(max_examples=30)
@given(
    max_loss=st.floats(0.01, 0.9), share=st.floats(-1, 0.8), changed=st.floats(0, 0.3), looks=st.sampled_from([1, 9])
)
def test_samples_needed_are_enough_and_one_less_is_not(
    max_loss: float, share: float, changed: float, looks: int
) -> None:
    loss = share * max_loss
    count = samples_needed(max_loss, loss, changed, looks)
    assert count is not None
    moved = max(changed, abs(loss))

    def proves(samples: int) -> bool:
        lost, won = round(samples * (moved + loss) / 2), round(samples * (moved - loss) / 2)
        return proves_loss(samples, lost, won, max_loss, tail(looks))

    assert proves(count)
    assert count == 1 or not proves(count - 1)


def test_samples_needed_in_plain_figures() -> None:
    # Nothing changes: 0.99 to the power of 299 is just below 5 %.
    assert samples_needed(0.01, changed=0.0) == 299
    assert 600 < samples_needed(0.01) < 800  # type: ignore[operator]
    assert samples_needed(0.01, changed=0.0, looks=12) == 546
    assert samples_needed(0.01, loss=0.01) is None
    with pytest.raises(InvalidArgument, match="allowed loss 0.0, .* is not a fraction"):
        samples_needed(0.0)


@settings(max_examples=50)
@given(st.integers(1, 3000), st.sampled_from([0.005, 0.01, 0.05, 0.5]))
def test_too_few_is_when_not_even_no_change_is_proof(count: int, loss: float) -> None:
    assert bool(too_few(count, "top-1", loss, "evaluation")) == (loss_bound(count, 0, 0, tail()) > loss + 1e-5)


def test_how_many_are_needed_is_told() -> None:
    (note,) = too_few(75, "agreement", 0.01, "held-out")
    assert "75 held-out samples cannot prove a loss within 1.00%, so losses are estimates: give at least 299" in note
    assert "for 12 candidates" in too_few(75, "agreement", 0.01, "held-out", looks=12)[0]
    assert too_few(1, "fidelity", 0.01, "held-out") == ()
    assert too_few(1, "top-1", 0.0, "held-out") == ()


def test_what_is_within_the_bound_but_not_proved_is_noted() -> None:
    (note,) = unproved(accuracy(0.99, 0.004, 0.008, bound=0.0112, samples=250, lost=2, won=1), 0.01)
    assert "an estimate from 250 samples" in note
    assert "is at most 1.12%" in note
    assert "samples would prove it" in note
    assert "would prove it" not in unproved(accuracy(0.99, 0.01, 0.01), 0.01)[0]
    assert unproved(accuracy(0.99, 0.004, 0.008, bound=0.0099), 0.01) == ()
    assert unproved(accuracy(0.99, 0.02, 0.01), 0.01) == ()
    assert "would prove it" not in unproved(accuracy(0.99, 0.004, 0.008, metric="cosine"), 0.01)[0]
