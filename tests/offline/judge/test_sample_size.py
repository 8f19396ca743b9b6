from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evidences import accuracy
from penstock.errors import InvalidArgument
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.intervals import loss_bound, mean_bound, proves_loss, tail
from penstock.offline.judge.sample_size import proof_advice, samples_needed, too_few, unproved


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
    for looks in (2, 12):
        (note,) = too_few(75, "agreement", 0.01, "held-out", looks=looks)
        few, likely = (samples_needed(0.01, changed=changed, looks=looks) for changed in (0.0, 0.02))
        assert f" for {looks} candidates" in note
        assert f"at least {few}, which" in note
        assert f"or {likely}, which" in note
    assert too_few(1, "fidelity", 0.01, "held-out") == ()
    assert too_few(1, "top-1", 0.0, "held-out") == ()


def test_what_is_within_the_bound_but_not_proved_is_noted() -> None:
    (note,) = unproved(accuracy(0.99, 0.004, 0.008, bound=0.0112, samples=250, lost=2, won=1), 0.01)
    assert "an estimate from 250 samples" in note
    assert "is at most 1.12%" in note
    assert "samples would prove it" in note
    assert "no number of samples can be named" in unproved(accuracy(0.99, 0.01, 0.01), 0.01)[0]
    assert unproved(accuracy(0.99, 0.004, 0.008, bound=0.0099), 0.01) == ()
    assert unproved(accuracy(0.99, 0.02, 0.01), 0.01) == ()
    (approximate,) = unproved(accuracy(0.99, 0.004, 0.008, metric="mae"), 0.01)
    assert "with about 95 % confidence" in approximate
    assert approximate.endswith("because a loss of mae cannot be proven")


@pytest.mark.parametrize(
    ("max_loss", "loss", "changed"), [(1.01, 0, 0), (0.01, 1.01, 0), (0.01, -1.01, 0), (0.01, 0, -0.1), (0.01, 0, 1.1)]
)
def test_what_is_no_fraction_is_refused(max_loss: float, loss: float, changed: float) -> None:
    with pytest.raises(InvalidArgument, match="is not a fraction"):
        samples_needed(max_loss, loss, changed)


def test_the_largest_fractions_are_fractions() -> None:
    assert samples_needed(1.0, changed=0.0) == 1
    assert samples_needed(0.5, loss=1.0) is None
    assert samples_needed(0.5, loss=-1.0) == samples_needed(0.5, loss=-1.0, changed=1.0)
    assert samples_needed(0.5, changed=1.0) is not None


def test_a_proof_takes_at_most_four_million_samples() -> None:
    assert samples_needed(5e-7, changed=0.0) is None
    # The logarithm of 5 % is -2.9957. A search by doubling ends at exactly four million.
    assert samples_needed(1e-6, changed=0.0) == pytest.approx(2_995_700, rel=2e-3)
    assert samples_needed(0.01, loss=0.02) is None


def test_only_a_doubt_is_noted() -> None:
    on_limit = accuracy(0.99, 0.01, 0.01, bound=0.02)
    assert unproved(on_limit, 0.01)
    assert unproved(accuracy(0.99, 0.004, 0.008, bound=0.01), 0.01) == ()
    assert unproved(on_limit, 0.0) == unproved(accuracy(0.99, 0.0, 0.008), 0.0) == ()
    assert "at most 1.20%" in unproved(accuracy(0.99, 0.004, 0.008), 0.01)[0]


def test_advice_is_given_where_it_can_be_followed() -> None:
    def advice(samples: int, loss: float, lost: int, won: int, **changes: object) -> str:
        return proof_advice(accuracy(0.99, loss, samples=samples, lost=lost, won=won, **changes), 0.01)

    assert advice(10, 0.0, 0, 0) == "; about 299 samples would prove it if the estimate is correct"
    assert advice(10, 0.0, 0, 0, looks=12) == "; about 546 samples would prove it if the estimate is correct"
    assert advice(10, 0.0, 0, 0, metric="mae").endswith("because a loss of mae cannot be proven")
    assert advice(10, 0.0, 0, 0, metric="own:metric").endswith("because a loss of own:metric cannot be proven")
    assert proof_advice(accuracy(samples=10), 0.0).endswith("because the limit is 0")
    assert advice(10, 0.01, 0, 0).endswith("because the estimate is not below the limit")
    # More than a thousand samples are advised only up to twenty times those at hand.
    needed = samples_needed(0.01, 0.005, 0.005)
    assert needed is not None
    assert 1000 < needed < 4000
    for limit, is_given in ((0.003, True), (0.00299, False)):
        assert ("; about" in proof_advice(accuracy(samples=1), limit)) is is_given
    for samples, is_given in ((200, True), (100, needed <= 2000)):
        assert ("; about" in advice(samples, 0.005, samples // 200, 0)) is is_given
    assert proof_advice(accuracy(samples=800, loss=1e-8, metric="cosine"), 1e-4) == (
        "; more than 16000 samples would be needed to prove it"
    )
    assert advice(20, 0.0099, 1, 1).endswith("because the estimate is too close to the limit")


def test_what_gains_needs_fewer_samples_than_what_does_not() -> None:
    def named(lost: int, won: int) -> int:
        found = accuracy(0.9, (lost - won) / 30, samples=30, lost=lost, won=won)
        return int(proof_advice(found, 0.01).split()[2])

    assert 30 < named(1, 3) < samples_needed(0.01, 0.0, 4 / 30)  # type: ignore[operator]
    assert named(0, 3) < named(1, 3)


@settings(max_examples=30)
@given(
    st.integers(0, 2**16), st.sampled_from([0.0, 0.001, 0.01, 0.05]), st.sampled_from([0.01, 0.05]), st.integers(1, 12)
)
def test_the_samples_named_for_a_mean_prove_it(seed: int, scale: float, limit: float, looks: int) -> None:
    losses = scale * np.random.default_rng(seed).exponential(size=50) - scale
    losses += limit / 3 - losses.mean()
    found = accuracy(0.9, float(losses.mean()), samples=50, metric="cosine", spread=float(losses.std()), looks=looks)
    advice = proof_advice(found, limit)
    assert advice.startswith("; about ") or limit == 0.01
    if not advice.startswith("; about "):
        return
    count = int(advice.split()[2])
    for factor, proves in ((1.15, True), (0.7, False)):
        many = np.resize(losses, max(50, int(factor * count)))
        assert (mean_bound(many, tail(looks), 2.0) <= limit) is proves or len(many) == 50


def test_too_few_for_a_mean_is_when_not_even_no_change_is_proof() -> None:
    (note,) = too_few(75, "cosine", 0.01, "evaluation", prove=True)
    least = int(note.split("at least ")[1].split(",")[0])
    assert too_few(least, "cosine", 0.01, "evaluation") == ()
    assert mean_bound(np.zeros(least), tail(), 2.0) <= 0.01 + 1e-5
    assert mean_bound(np.zeros(least * 9 // 10), tail(), 2.0) > 0.01
    assert "2 % of the answers" not in note


def test_the_note_says_what_a_required_proof_does() -> None:
    (note,) = too_few(75, "top-1", 0.004, "evaluation", prove=True)
    assert (
        "cannot prove a loss within 0.40%, so --prove-accuracy rejects every candidate that is not more accurate"
        in note
    )
    assert "estimates" not in note
    contract = Contract(0.01, prove_accuracy=True)
    for lost in range(5):
        for won in range(lost + 1):
            bound = loss_bound(75, lost, won, tail())
            assert contract.accuracy_objection(
                accuracy(0.9, (lost - won) / 75, bound=bound, samples=75, lost=lost, won=won)
            )


def test_ways_to_count_change_with_the_looks() -> None:
    assert too_few(299, "top-1", 0.01, "held-out") == ()
    assert too_few(298, "top-1", 0.01, "held-out")
    assert "for " not in too_few(298, "top-1", 0.01, "held-out")[0].split("%")[1]
    assert "or 6" in too_few(75, "agreement", 0.01, "held-out")[0]
