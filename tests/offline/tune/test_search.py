from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import models
from evidences import accuracy, points
from penstock.measurement import Interval
from penstock.offline.judge.contract import Contract, is_faster
from penstock.offline.tune.search import (
    FINALISTS,
    Trial,
    choose,
    choose_smallest,
    explain,
    explain_sizes,
    finalists,
    record,
    running,
)
from penstock.offline.tune.space import Candidate
from penstock.perf.measure import Timings

MODEL = models.linear()
UNCERTAINTY = 0.03
"""Half the width of every interval here, as a share."""


def trial(name: str, ms: float, precision: str = "fp32", threads: int = 1, **changes: object) -> Trial:
    """A candidate that always takes ``ms``, against an original of 1 ms at every number of threads."""
    candidate = Candidate(
        MODEL, precision, name=name, engine="onnxruntime", threads=threads, options={"threads": threads}
    )
    made = Trial(
        candidate,
        accuracy=accuracy(relative_error=0.0 if precision == "fp32" else 0.05),
        timings=Timings(np.full((8, 1), ms / 1e3)),
        speedup=interval(1 / ms),
        pace=1 / ms,
    )
    return msgspec.structs.replace(made, **changes)


def originals(ms: float = 1.0) -> list[Trial]:
    return [trial(f"original-t{n}", ms, threads=n, status="baseline", speedup=None) for n in (1, 2, 4)]


def interval(value: float) -> Interval:
    return Interval(value, value * (1 - UNCERTAINTY), value * (1 + UNCERTAINTY))


def compare(base: Trial, other: Trial) -> Interval:
    return interval(other.pace / base.pace)


def chosen(*trials: Trial, bases: list[Trial] | None = None, contract: Contract = Contract()) -> str | None:  # noqa: B008
    winner = choose(bases or originals(), trials, contract, compare)
    return winner.candidate.name if winner else None


def test_the_quickest_exact_one_wins() -> None:
    assert chosen(trial("a", 0.8), trial("b", 0.5), trial("c", 0.9)) == "b"


def test_what_is_not_provably_faster_leaves_the_original() -> None:
    assert chosen(trial("same", 1.0), trial("hardly", 0.97), trial("int8", 0.97, "int8")) == "original-t1"
    assert chosen() == "original-t1"


def test_int8_must_beat_the_original() -> None:
    assert chosen(trial("int8", 0.5, "int8")) == "int8"
    assert chosen(trial("int8", 1.5, "int8")) == "original-t1"
    assert chosen(trial("int8", 0.98, "int8")) == "original-t1"


def test_int8_must_beat_the_best_exact_one() -> None:
    assert chosen(trial("fp32", 0.5), trial("int8", 0.49, "int8")) == "fp32"
    assert chosen(trial("fp32", 0.5), trial("int8", 0.4, "int8")) == "int8"


def test_int8_must_beat_an_exact_one_that_itself_proved_nothing() -> None:
    fp32, int8 = trial("fp32", 0.98), trial("int8", 0.955, "int8")
    assert chosen(int8) == "int8"
    assert chosen(fp32, int8) == "original-t1"


def test_twice_the_threads_must_buy_1_4_times_the_speed() -> None:
    assert chosen(trial("two", 0.50, threads=2), trial("one", 0.60, threads=1)) == "one"
    assert chosen(trial("two", 0.40, threads=2), trial("one", 0.60, threads=1)) == "two"


def test_a_close_call_prefers_fewer_threads() -> None:
    assert chosen(trial("two", 0.41, threads=2), trial("one", 0.60, threads=1)) == "one"


def test_each_is_held_against_the_original_at_its_own_threads() -> None:
    bases = [trial("original-t1", 1.0, status="baseline"), trial("original-t2", 0.55, threads=2, status="baseline")]
    int8 = trial("int8", 0.5, "int8", threads=2, speedup=interval(0.55 / 0.5))
    assert chosen(int8, bases=bases) == "int8"
    assert chosen(msgspec.structs.replace(int8, speedup=interval(1.0)), bases=bases) == "original-t2"


def test_int8_is_held_against_the_exact_one_at_its_own_threads() -> None:
    fp32, int8 = trial("fp32", 0.5, threads=2), trial("int8", 0.49, "int8", threads=2)
    assert chosen(fp32, int8) == "fp32"
    assert chosen(trial("fp32", 0.5, threads=1), int8) == "fp32"
    assert finalists([trial(f"int8-{n}", 0.1, "int8", threads=2) for n in range(FINALISTS)] + [fp32])[-1] is fp32


def mixing(name: str, ms: float) -> Trial:
    found = trial(name, ms, "int8", accuracy=accuracy(relative_error=0.01))
    return msgspec.structs.replace(found, candidate=msgspec.structs.replace(found.candidate, mixes_rows=True))


def test_then_a_close_call_prefers_independent_rows() -> None:
    assert chosen(mixing("dynamic", 0.30), trial("static", 0.31, "int8")) == "static"
    assert chosen(mixing("dynamic", 0.30), trial("static", 0.33, "int8")) == "dynamic"


def test_then_the_smaller_error_among_those_equally_fast() -> None:
    assert chosen(mixing("dynamic", 0.299), rated("rough", 0.30, 0.2), rated("fine", 0.305, 0.1)) == "fine"


def test_rejected_and_failed_ones_never_win() -> None:
    assert chosen(trial("inaccurate", 0.1, "int8", status="rejected"), trial("fp32", 0.5)) == "fp32"
    assert chosen(trial("broken", 0.1, status="failed", timings=None), trial("fp32", 0.5)) == "fp32"


def test_an_original_that_is_too_slow_is_not_served() -> None:
    contract = Contract(p99_ms=0.99)
    assert chosen(trial("hardly", 0.985), contract=contract) == "hardly"
    assert chosen(trial("int8", 0.985, "int8"), contract=contract) is None
    assert chosen(trial("rejected", 1.2, status="rejected"), contract=contract) is None
    assert chosen(contract=contract) is None


TRIALS = st.lists(
    st.tuples(
        st.floats(0.1, 2.0),
        st.sampled_from(["fp32", "int8", "bf16"]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from(["outrun", "outrun", "rejected", "failed"]),
    ),
    max_size=8,
).map(
    lambda rows: [
        trial(f"c{i}", ms, precision, threads, status=status) for i, (ms, precision, threads, status) in enumerate(rows)
    ]
)


@given(TRIALS, st.none() | st.floats(0.05, 2.0))
def test_no_winner_is_unproven(trials: list[Trial], p99_ms: float | None) -> None:
    bases, contract = originals(), Contract(p99_ms=p99_ms)
    for one in trials:
        if contract.latency_objection(one.p99_ms) and one.status == "outrun":
            one.reject("too slow")
    winner = choose(bases, trials, contract, compare)
    if winner is None:
        assert contract.latency_objection(bases[0].p99_ms)
        return
    assert not contract.latency_objection(winner.p99_ms)
    if winner in bases:
        return
    assert winner.status == "outrun"
    if not winner.candidate.exact:
        threads = winner.candidate.threads
        same = [one for one in running(trials) if one.candidate.threads == threads]
        assert is_faster(compare(bases[0], winner))
        assert all(is_faster(compare(one, winner)) for one in same if one.candidate.exact)


@given(TRIALS)
def test_finalists_are_the_best_and_their_exact_rivals(trials: list[Trial]) -> None:
    last = finalists(trials)
    alive = running(trials)
    assert all(one in alive for one in last)
    assert min(FINALISTS, len(alive)) <= len(last) <= FINALISTS + 3
    for threads in {one.candidate.threads for one in last}:
        exact = [one for one in alive if one.candidate.exact and one.candidate.threads == threads]
        assert not exact or max(one.pace for one in exact) in [one.pace for one in last]


def test_only_what_was_measured_and_not_refused_is_running() -> None:
    trials = [trial("a", 1.0), trial("b", 1.0, status="rejected"), trial("c", 1.0, timings=None)]
    assert [one.candidate.name for one in running(trials)] == ["a"]


def test_every_loser_is_told_why() -> None:
    bases, winner = originals(), trial("winner", 0.5)
    slow, near = trial("slow", 0.98), trial("near", 0.51)
    many, twice = trial("many", 0.4, threads=4), trial("twice", 0.9)
    refused = trial("refused", 0.1, status="rejected", reason="loses 50 %")
    explain(winner, bases, [winner, slow, near, many, twice, refused])
    assert (winner.status, winner.reason) == ("chosen", "2.00x (1.94 … 2.06) the original's speed")
    assert bases[0].reason == "the original, unmodified: 0.50x the chosen one's speed"
    assert slow.reason == "not provably faster than the original: 1.02x (0.99 … 1.05)"
    assert near.reason == "a close call, 0.98x the chosen one's speed"
    assert many.reason == "1.25x the chosen one's speed, too little for 4 threads"
    assert twice.reason == "0.56x the chosen one's speed"
    assert (refused.status, refused.reason) == ("rejected", "loses 50 %")
    assert {one.status for one in (slow, near, many, twice)} == {"outrun"}


def test_an_original_that_wins_is_told_why() -> None:
    bases, slow = originals(), trial("slow", 1.2)
    explain(bases[0], bases, [slow])
    assert (bases[0].status, bases[0].reason) == ("chosen", "the original: nothing was provably faster")
    assert slow.reason == "slower than the original: 0.83x (0.81 … 0.86)"


@given(TRIALS)
def test_nobody_is_left_without_a_reason(trials: list[Trial]) -> None:
    bases = originals()
    winner = choose(bases, trials, Contract(), compare)
    assert winner is not None
    explain(winner, bases, trials)
    assert all(one.reason for one in (*bases, *trials) if one.status in ("outrun", "chosen", "baseline"))


def test_a_record_holds_what_was_measured() -> None:
    measured = trial("int8", 0.5, "int8", latency=points(0.5), reason="2x", status="chosen")
    found = record(measured, Contract())
    assert (found.latency_ms, found.p99_ms) == pytest.approx((0.5, 0.5))
    assert (found.batch, found.rows_per_second) == (4, pytest.approx(4000))
    assert found.size_bytes == MODEL.size_bytes
    assert (found.status, found.reason, found.precision) == ("chosen", "2x", "int8")
    assert record(measured, Contract(p99_ms=1.0)).batch == 2


def test_a_record_of_what_failed_has_no_figures() -> None:
    found = record(Trial(trial("broken", 1.0).candidate, status="failed", reason="cannot load"), Contract())
    assert (found.latency_ms, found.p99_ms, found.speedup, found.accuracy, found.rows_per_second) == (None,) * 5
    assert found.batch == 1


def sized(name: str, disk_bytes: int, ms: float) -> Trial:
    made = trial(name, ms)
    return msgspec.structs.replace(made, candidate=msgspec.structs.replace(made.candidate, stored_bytes=disk_bytes))


def test_the_smallest_wins_and_in_a_close_call_the_quicker() -> None:
    field = [sized("large", 200, 0.1), sized("small", 101, 0.8), sized("smaller", 100, 0.9), sized("tiny", 10, 2.0)]
    assert names_of(choose_smallest(originals(), field, Contract(p99_ms=1.5))) == "small"
    assert names_of(choose_smallest(originals(), field, Contract())) == "tiny"
    assert names_of(choose_smallest(originals(), [], Contract())) == "original-t1"
    assert choose_smallest(originals(), field, Contract(p99_ms=0.01)) is None
    assert finalists(field, smallest=True)[0].candidate.name == "tiny"


def test_what_lost_on_size_says_by_how_much() -> None:
    small, large, same = sized("small", 100, 1.0), sized("large", 250, 1.0), sized("same", 100, 1.2)
    explain_sizes(small, originals(), [small, large, same])
    assert (small.status, large.reason, same.reason) == (
        "chosen",
        "2.50x the size of the chosen candidate",
        "of the same size but slower",
    )
    assert small.reason == f"100 bytes, {MODEL.size_bytes / 100:.2f}x smaller than the original"


def test_a_small_candidate_that_is_not_faster_says_so() -> None:
    small = sized("small", 100, 1.5)
    small.candidate = msgspec.structs.replace(small.candidate, precision="int8")
    explain_sizes(small, originals(), [small])
    assert "but not provably faster on this machine: 0.67x" in small.reason


def test_of_equally_fast_candidates_the_one_of_least_loss_wins() -> None:
    def close(name: str, loss: float, error: float) -> Trial:
        return trial(name, 0.5, "int8", accuracy=accuracy(0.99 - loss, loss, relative_error=error))

    assert chosen(close("min-max", 0.004, 0.01), close("entropy", 0.0, 0.08)) == "entropy"


def names_of(winner: Trial | None) -> str:
    assert winner is not None
    return winner.candidate.name


def rated(name: str, ms: float, error: float, loss: float = 0.0, threads: int = 1) -> Trial:
    return trial(name, ms, "int8", threads, accuracy=accuracy(0.99 - loss, loss, relative_error=error))


@pytest.mark.parametrize(("ms", "winner"), [(0.305, "fine"), (0.307, "rough")])
def test_candidates_within_two_per_cent_are_equally_fast(ms: float, winner: str) -> None:
    assert chosen(rated("rough", 0.3, 0.2), rated("fine", ms, 0.1)) == winner


def test_a_gain_in_accuracy_is_no_reason_to_be_slower() -> None:
    """Losses below zero are chance; the error of the outputs then decides."""
    assert chosen(rated("lucky", 0.3, 0.2, loss=-0.01), rated("fine", 0.305, 0.1)) == "fine"


def test_a_candidate_that_was_not_judged_is_not_chosen() -> None:
    unjudged = trial("unjudged", 0.2, "int8", accuracy=None)
    assert chosen(trial("judged", 0.3), unjudged) == "judged"
    assert chosen(unjudged) == "original-t1"


def test_of_equals_the_quickest_wins() -> None:
    trials = [trial("slower", 0.51), trial("quickest", 0.5), trial("slow", 0.52)]
    assert chosen(*trials) == chosen(*trials[::-1]) == "quickest"


def test_four_candidates_are_measured_again() -> None:
    trials = [trial(f"c{i}", 0.9 - i / 10, precision="int8") for i in range(6)]
    assert [one.candidate.name for one in finalists(trials)] == ["c5", "c4", "c3", "c2"]


def test_the_cost_is_the_latency_times_the_root_of_the_threads() -> None:
    assert trial("a", 0.5, threads=4).cost == pytest.approx(1.0)
    assert trial("a", 0.5, pace=0.0).cost == float("inf")
    assert Trial(trial("a", 0.5).candidate).cost == float("inf")
    assert trial("a", 0.5, timings=None).p99_ms == float("inf")


def test_an_original_within_the_latency_wins_if_nothing_is_faster() -> None:
    assert chosen(contract=Contract(p99_ms=1.0)) == "original-t1"
    assert chosen(trial("hardly", 0.98), contract=Contract(p99_ms=1.0)) == "original-t1"


def test_the_fastest_exact_candidate_is_the_last_resort() -> None:
    contract = Contract(p99_ms=0.99)
    trials = [trial("b", 0.986), trial("a", 0.985), trial("c", 0.987), trial("int8", 0.98, "int8")]
    assert chosen(*trials, contract=contract) == "a"


@pytest.mark.parametrize(("disk_bytes", "winner"), [(1010, "large"), (1011, "small")])
def test_sizes_within_one_per_cent_are_equal(disk_bytes: int, winner: str) -> None:
    small, large = sized("small", 1000, 0.5), sized("large", disk_bytes, 0.4)
    bases = [sized("original", 9000, 1.0)]
    assert names_of(choose_smallest(bases, [small, large], Contract())) == winner
    explain_sizes(small, originals(), [small, large])
    assert large.reason == (
        "of the same size but slower" if winner == "large" else "1.01x the size of the chosen candidate"
    )


def test_the_smallest_are_ranked_by_size_then_by_cost() -> None:
    field = [sized("b", 10, 0.5), sized("a", 10, 0.4), sized("c", 9, 0.9), sized("d", 200, 0.1), sized("e", 300, 0.1)]
    assert [one.candidate.name for one in finalists(field, smallest=True)] == ["c", "a", "b", "d"]


def test_a_smaller_candidate_that_is_faster_or_exact_says_no_more() -> None:
    for precision, ms in (("int8", 0.5), ("fp32", 1.5)):
        small = sized("small", 100, ms)
        small.candidate = msgspec.structs.replace(small.candidate, precision=precision)
        explain_sizes(small, originals(), [small])
        assert small.reason.endswith("smaller than the original")
    small = sized("small", 100, 1.5)
    small.candidate, small.speedup = msgspec.structs.replace(small.candidate, precision="int8"), None
    explain_sizes(small, originals(), [small])
    assert small.reason.endswith("smaller than the original")


def test_only_a_faster_candidate_can_have_too_little_of_it() -> None:
    winner, same, many = trial("winner", 0.5), trial("same", 0.5, threads=4), trial("many", 0.5, threads=1)
    bases = originals(0.4)
    for base in bases:
        base.pace = {1: 2.5, 2: 2.5, 4: 2.0}[base.candidate.threads]
    explain(winner, bases, [winner, same, many])
    assert [base.reason for base in bases] == [
        "the original, unmodified: 1.25x the chosen one's speed",
        "the original, unmodified: 1.25x the chosen one's speed, too little for 2 threads",
        "the original, unmodified: 1.00x the chosen one's speed",
    ]
    assert same.reason == many.reason == "a close call, 1.00x the chosen one's speed"


@pytest.mark.parametrize(("ms", "reason"), [(0.52, "a close call, 0.96x"), (0.53, "0.94x")])
def test_a_loser_within_five_per_cent_was_a_close_call(ms: float, reason: str) -> None:
    winner, other = trial("winner", 0.5), trial("other", ms)
    explain(winner, originals(), [winner, other])
    assert other.reason == f"{reason} the chosen one's speed"


def test_a_loser_that_is_faster_with_as_few_threads_was_a_close_call() -> None:
    winner, other = trial("winner", 0.5), trial("other", 0.49)
    explain(winner, originals(), [winner, other])
    assert other.reason == "a close call, 1.02x the chosen one's speed"


def test_a_winner_without_a_pace_has_no_shares() -> None:
    winner, other = trial("winner", 0.5, pace=0.0), trial("other", 0.6)
    explain(winner, originals(), [winner, other])
    assert other.reason == "0.00x the chosen one's speed"


def test_a_record_has_all_figures_of_a_trial() -> None:
    measured = trial("int8", 0.5, "int8", threads=2)
    found = record(measured, Contract())
    assert (found.calls, found.threads, found.batch, found.rows_per_second) == (8, 2, 1, None)
    assert (found.speedup, found.accuracy) == (measured.speedup, measured.accuracy)
    assert record(Trial(measured.candidate), Contract()).calls == 0


def test_int8_must_beat_the_fastest_of_the_exact_ones_with_as_many_threads() -> None:
    near, far, int8 = trial("near", 0.97), trial("far", 0.999), trial("int8", 0.955, "int8")
    assert chosen(far, int8) == "int8"
    assert chosen(near, far, int8) == chosen(far, near, int8) == "original-t1"
    assert chosen(trial("many", 0.45, threads=4), trial("int8", 0.52, "int8")) == "int8"


def test_without_a_speedup_nothing_is_proven() -> None:
    one = trial("one", 0.5, speedup=None)
    assert chosen(one) == "original-t1"
    bases = originals()
    explain(bases[0], bases, [one])
    assert one.reason == "not provably faster than the original: not measured"


def test_finalists_are_ranked_by_cost_unless_the_smallest_are_sought() -> None:
    field = [sized("small", 10, 2.0), sized("fast", 200, 0.1)]
    assert [one.candidate.name for one in finalists(field)] == ["fast", "small"]


def test_a_reason_names_what_disturbed_the_measurement_once() -> None:
    busy = Timings(np.full((8, 1), 1e-3), busy="two other builds")
    assert trial("a", 1.0, timings=busy).busy == "two other builds"
    assert trial("a", 1.0).busy == trial("a", 1.0, timings=None).busy == ""
    assert record(trial("a", 1.0, timings=busy), Contract()).busy == "two other builds"
    slow, fast, winner = trial("slow", 1.2, timings=busy), trial("fast", 0.6, timings=busy), trial("winner", 0.5)
    bases = originals()
    explain(winner, bases, [winner, slow, fast])
    for one in (slow, fast):
        assert one.reason.count("two other builds") == 1
    assert "busy" not in winner.reason
    explain(bases[0], bases, [trial("quiet", 1.2), slow])
    assert bases[0].reason == "the original: the machine was too busy to tell if anything is faster (two other builds)"


@pytest.mark.parametrize(("direct", "name"), [(0.7, "fast-t1"), (1.3, "fast-t1"), (1.6, "fast-t2")])
def test_more_threads_win_only_if_a_pair_shows_it(direct: float, name: str) -> None:
    """The product of two ratios makes two threads look twice as fast; the ratio of the pair decides."""
    one, two = trial("fast-t1", 0.8), trial("fast-t2", 0.4, threads=2)
    found = choose(originals(), [one, two], Contract(), lambda base, other: interval(direct))
    assert found is not None
    assert found.candidate.name == name
