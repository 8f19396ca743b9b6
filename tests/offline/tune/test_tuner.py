from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import call_models
import models
from brief_builds import brief
from penstock.artifact import Artifact
from penstock.clock import ManualClock
from penstock.dataset import Dataset, SizedCall, make_dataset
from penstock.errors import ContractUnmet, InvalidData, InvalidModel, PenstockError
from penstock.offline.deadline import BuildDeadline
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.offline.judge.race import Entrant, race_entrants
from penstock.offline.sessions import signature_of
from penstock.offline.tune.space import Candidate, originals
from penstock.offline.tune.tuner import Race, Tuner, TuneResult, TuningLimits
from penstock.perf.measure import LOADS, Timings, weighted
from penstock.samples.open import open_data

FP32 = TensorProto.FLOAT
LIMITS = TuningLimits(budget_s=0.3, deadline=brief())
CONTRACT = Contract()


def classifier(factor: float = 1.0, ballast: int = 0, kind: int = 0) -> Artifact:
    """Scores ``factor * (x @ w)`` of four classes; ``ballast`` sines of 20 000 numbers take time and do not affect the outputs. Each
    ``kind`` has another structure.
    """
    nodes = [("MatMul", ["x", "w"], ["scores"]), *(("Identity", ["x"], [f"unused{number}"]) for number in range(kind))]
    weights = {"w": factor * np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)}
    if ballast:
        weights |= {"wide": np.ones((3, 20_000), np.float32), "zeros": np.zeros((20_000, 4), np.float32)}
        nodes.append(("MatMul", ["x", "wide"], ["h0"]))
        nodes += [("Sin", [f"h{index}"], [f"h{index + 1}"]) for index in range(ballast)]
        nodes += [("MatMul", [f"h{ballast}", "zeros"], ["nothing"]), ("Add", ["scores", "nothing"], ["y"])]
    else:
        nodes.append(("Identity", ["scores"], ["y"]))
    return models.artifact(nodes, [("x", FP32, ["N", 3])], [("y", FP32, ["N", 4])], weights)


def candidate(name: str, artifact: Artifact, precision: str = "fp32", threads: int = 1) -> Candidate:
    return Candidate(
        artifact, precision, name=name, engine="onnxruntime", threads=threads, options={"threads": threads}
    )


def data(labels: bool = True) -> Dataset:
    x = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    weights = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    return make_dataset({"x": x}, (x @ weights).argmax(axis=1) if labels else None)


def undisturbed(*arguments) -> dict[str, Timings]:
    """Real timings, as if nothing else had run on the machine."""
    return {name: msgspec.structs.replace(one, busy="") for name, one in race_entrants(*arguments).items()}


class SimulatedRace:
    """Times models on a machine on which each takes a known time, with the effects of loads. Remembers who was timed with whom.

    The effects depend on the pair, as they would if it was measured again under the same conditions.
    """

    def __init__(self, milliseconds: dict[str, float], busy: str = "") -> None:
        self.pairs: list[tuple[str, ...]] = []
        self._ms, self._busy = milliseconds, busy

    def __call__(
        self, entrants: Mapping[str, Entrant], inputs: object, budget_s: float, loads: int
    ) -> dict[str, Timings]:
        self.pairs.append(tuple(entrants))
        rng = np.random.default_rng(zlib.crc32(" ".join(entrants).encode()))
        return {
            name: Timings(list(1e-3 * self._ms[name] * rng.lognormal(0, 0.01, (loads, 20))), self._busy)
            for name in entrants
        }


def tune(
    original: Artifact,
    *tried: Candidate,
    contract: Contract = CONTRACT,
    limits: TuningLimits = LIMITS,
    race: Race = undisturbed,
) -> TuneResult:
    judge = Judge(original, data(), contract=contract)
    return Tuner(originals(original, [1]), tried, judge, limits, race=race).run(cores=2)


def test_a_faster_model_with_the_same_answers_is_chosen() -> None:
    result = tune(classifier(ballast=6), candidate("lean", classifier()))
    assert result.chosen.name == "lean"
    assert result.baseline.status == "baseline"
    (lean,) = result.records
    assert lean.status == "chosen"
    assert lean.speedup is not None
    assert lean.speedup.low > 1
    assert lean.accuracy is not None
    assert (lean.accuracy.metric, lean.accuracy.value, lean.accuracy.loss.value) == ("top-1", 1.0, 0.0)
    assert result.latency[0].batch == result.baseline_latency[0].batch == 1
    assert 1 <= result.max_batch <= 64
    assert result.rows_per_call == 1


def test_what_fails_to_load_or_answers_wrongly_is_told_apart() -> None:
    result = tune(
        classifier(),
        candidate("broken", Artifact.from_bytes(b"not a model")),
        candidate("unknown", models.unknown_operator()),
        candidate("other-shape", models.linear(3, 2)),
        candidate("wrong", classifier(factor=-1.0), "int8"),
    )
    records = {record.name: record for record in result.records}
    assert {name: record.status for name, record in records.items()} == {
        "broken": "failed",
        "unknown": "failed",
        "other-shape": "failed",
        "wrong": "rejected",
    }
    assert "ONNX" in records["broken"].reason
    assert "'y' has shape [40, 2], the original's [40, 4]" in records["other-shape"].reason
    assert records["wrong"].reason.startswith("loses")
    assert records["wrong"].latency_ms is not None
    assert records["broken"].latency_ms is None
    assert result.chosen.name == "original-t1"


def test_a_candidate_that_answers_nan_is_rejected_with_figures_that_json_can_hold() -> None:
    result = tune(classifier(), candidate("nan", classifier(factor=float("nan")), "int8"))
    (record,) = result.records
    assert record.status == "rejected"
    assert record.reason == "output 'y' is NaN or infinite in 40 of 40 samples, first in sample 0"
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


def test_intervals_hold_together_for_all_models_that_are_judged() -> None:
    tried = [candidate(f"int8-{number}", classifier(1 + number / 10), "int8") for number in range(1, 4)]
    result = tune(classifier(), *tried, candidate("int8-1-again", classifier(1.1), "int8"))
    looks = {record.accuracy.looks for record in result.records if record.accuracy}
    assert looks == {3}
    assert (result.choice.metric.name, result.choice.outputs) == ("top-1", ("y",))


def test_too_few_samples_for_a_proof_are_noted() -> None:
    result = tune(classifier(), candidate("same", classifier()), contract=Contract(prove_accuracy=True))
    assert "40 evaluation samples cannot prove a loss within 1.00%" in result.notes[0]
    (same,) = result.records
    assert same.status == "rejected"
    assert "about 299 samples would prove it" in same.reason


def test_the_slower_int8_is_never_chosen() -> None:
    slow = candidate("int8", classifier(ballast=6), "int8")
    result = tune(classifier(), slow)
    assert result.chosen.name == "original-t1"
    assert result.records[0].reason.startswith("slower than the original")


def test_with_nothing_to_try_the_original_is_served() -> None:
    result = tune(classifier())
    assert result.chosen.name == "original-t1"
    assert result.baseline.status == "chosen"
    assert result.records == ()


def test_a_contract_that_nothing_meets() -> None:
    with pytest.raises(ContractUnmet, match="latency: ") as raised:
        tune(classifier(), candidate("same", classifier()), contract=Contract(p99_ms=1e-6))
    assert "--p99" in raised.value.hint


@pytest.mark.parametrize("seed", range(2))
def test_a_verdict_depends_neither_on_the_other_candidates_nor_on_their_order(seed: int) -> None:
    rng = random.Random(seed)
    models = {f"c{number}": classifier(kind=number) for number in range(45)}
    milliseconds = {"original-t1": 1.0, "c0": 0.7, **{name: rng.uniform(0.8, 2.0) for name in list(models)[1:]}}
    verdicts = set()
    for size in (3, 13, 45):
        names = list(models)[:size]
        rng.shuffle(names)
        timed = SimulatedRace(milliseconds)
        result = tune(classifier(), *(candidate(name, models[name]) for name in names), race=timed)
        (record,) = (record for record in result.records if record.name == "c0")
        verdicts.add((record.status, record.reason, record.speedup, record.latency_ms, result.baseline.latency_ms))
        assert all(len(pair) <= 2 for pair in timed.pairs)
    assert len(verdicts) == 1


def test_arithmetic_is_compared_with_the_best_exact_candidate_in_a_pair_of_these_two() -> None:
    tried = [
        candidate("fp32", classifier(kind=1)),
        candidate("slow", classifier(kind=2)),
        candidate("int8", classifier(kind=3), "int8"),
    ]
    timed = SimulatedRace({"original-t1": 1.0, "fp32": 0.6, "slow": 0.9, "int8": 0.5})
    assert tune(classifier(), *tried, race=timed).chosen.name == "int8"
    assert ("fp32", "int8") in timed.pairs
    assert ("slow", "int8") not in timed.pairs


def test_a_busy_machine_is_part_of_every_verdict() -> None:
    busy = "other processes used 1.2 of 2 cores"
    tried = [candidate(name, classifier(kind=number)) for number, name in enumerate(("fast", "same", "slower"), 1)]
    milliseconds = {"original-t1": 1.0, "fast": 0.5, "same": 1.0, "slower": 0.8}
    result = tune(classifier(), *tried, race=SimulatedRace(milliseconds, busy))
    reasons = {record.name: record.reason for record in result.records}
    assert reasons["fast"].endswith(f"the original's speed, measured while the machine was busy ({busy})")
    assert reasons["same"].startswith(f"not measurable here, the machine was busy ({busy}): 1.0")
    assert reasons["slower"].endswith(f"the chosen one's speed, measured while the machine was busy ({busy})")
    assert (result.conditions.dirty, result.conditions.busy) == (True, busy)
    alone = tune(classifier(), tried[1], race=SimulatedRace({"original-t1": 1.0, "same": 1.0}, busy))
    assert alone.baseline.reason == f"the original: the machine was too busy to tell if anything is faster ({busy})"


def test_a_candidate_that_fails_when_it_is_timed_again_is_no_winner() -> None:
    simulated = SimulatedRace({"original-t1": 1.0, "dies": 0.3, "lives": 0.5})

    def race(entrants: Mapping[str, Entrant], inputs: object, budget_s: float, loads: int) -> dict[str, Timings]:
        if "dies" in entrants and loads == LOADS:
            raise PenstockError("the model ended its process with status -9")
        return simulated(entrants, inputs, budget_s, loads)

    result = tune(
        classifier(), candidate("dies", classifier(kind=1)), candidate("lives", classifier(kind=2)), race=race
    )
    assert result.chosen.name == "lives"
    statuses = {record.name: (record.status, record.reason) for record in result.records}
    assert statuses["dies"] == ("failed", "the model ended its process with status -9")


def test_latencies_and_speed_up_of_the_winner_are_of_the_same_loads() -> None:
    tried = [candidate(name, classifier(kind=number)) for number, name in enumerate(("a", "b", "c"), 1)]
    result = tune(classifier(), *tried, race=SimulatedRace({"original-t1": 1.0, "a": 0.5, "b": 0.9, "c": 0.9}))
    (a,) = (record for record in result.records if record.name == "a")
    assert a.status == "chosen"
    assert a.speedup is not None
    assert result.baseline.latency_ms / a.latency_ms == pytest.approx(a.speedup.value, rel=0.005)
    assert result.baseline.calls == a.calls


def test_an_original_that_does_not_load_is_an_error() -> None:
    with pytest.raises(InvalidModel):
        tune(Artifact.from_bytes(b"not a model"))


def test_labels_beyond_the_classes_are_an_error() -> None:
    bad = make_dataset(data().inputs, np.full(40, 9))
    with pytest.raises(InvalidData, match="labels go up to 9"):
        Judge(classifier(), bad)


def test_rows_per_call_are_those_asked_for() -> None:
    result = tune(classifier(), limits=msgspec.structs.replace(LIMITS, rows=16))
    assert result.rows_per_call == 16


def test_a_model_of_fixed_batch_is_timed_and_served_at_it() -> None:
    original = models.fixed_batch()
    samples = make_dataset({"x": np.ones((6, 3), np.float32)}, None)
    tried = [candidate("same", original)]
    result = Tuner(originals(original, [1]), tried, Judge(original, samples), LIMITS).run(cores=1)
    assert result.max_batch == 1
    assert [point.batch for point in result.latency] == [1]


def test_progress_comes_in_order() -> None:
    stages: list[str] = []
    Tuner(
        originals(classifier(), [1]),
        [candidate("same", classifier())],
        Judge(classifier(), data(labels=False)),
        LIMITS,
        lambda stage, done, total: stages.append(stage),
    ).run(cores=1)
    assert list(dict.fromkeys(stages)) == ["screen", "accuracy", "confirm", "profile"]


def test_the_original_with_more_threads_is_compared_by_pairs() -> None:
    """On a machine that becomes slower, only the timings of one pair can be compared."""
    steady = SimulatedRace({"original-t1": 2.0, "original-t2": 1.6, "lean": 1.0})

    def slowing(*arguments) -> dict[str, Timings]:
        found = steady(*arguments)
        slower = float(len(steady.pairs))
        return {
            name: msgspec.structs.replace(one, seconds=[slower * load for load in one.seconds])
            for name, one in found.items()
        }

    judge = Judge(classifier(), data())
    tuner = Tuner(originals(classifier(), [1, 2]), [candidate("lean", classifier())], judge, LIMITS, race=slowing)
    result = tuner.run(cores=2)
    assert result.chosen.name == "lean"
    *_, note = result.notes
    assert note.startswith("compared with the original at 2 threads instead of 1, it is ")
    assert float(note.split()[-3].removesuffix("x")) == pytest.approx(2.0 / 1.25, rel=0.03)


def test_at_more_threads_only_the_best_versions_are_timed() -> None:
    versions = {"lean": classifier(), **{f"slow{n}": classifier(ballast=20 + n) for n in range(4)}}
    tried = [
        Candidate(
            artifact, name=f"{name}-t{threads}", engine="onnxruntime", threads=threads, options={"threads": threads}
        )
        for threads in (1, 2)
        for name, artifact in {**versions, "wrong": classifier(factor=-1.0, kind=1)}.items()
    ]
    original = classifier(ballast=30)
    result = Tuner(originals(original, [1, 2]), tried, Judge(original, data()), LIMITS).run(cores=2)
    records = {record.name: record for record in result.records}
    assert all(records[f"{name}-t1"].latency_ms for name in versions)
    assert records["lean-t2"].latency_ms
    wrong = records["wrong-t2"]
    assert (wrong.status, wrong.latency_ms) == ("rejected", None)
    untimed = [record for record in result.records if record.latency_ms is None and record is not wrong]
    assert len(untimed) == 1
    assert untimed[0].status == "outrun"
    assert untimed[0].reason == "not timed: others were faster with fewer threads"
    assert untimed[0].name.endswith("-t2")


def test_the_result_has_the_gain_at_each_size_of_the_data() -> None:
    def race(
        entrants: Mapping[str, Entrant], calls: Sequence[SizedCall], budget_s: float, loads: int
    ) -> dict[str, Timings]:
        """A candidate takes half the original's time for long texts, and all of it for short texts."""
        rng = np.random.default_rng(0)
        found = {}
        for name in entrants:
            sizes = [call.inputs["ids"].shape[1] for call in calls]
            seconds = [1e-3 * size * (0.5 if name == "lean" and size > 10 else 1.0) for size in sizes]
            timings = [Timings(list(one * rng.lognormal(0, 0.01, (loads, 20)))) for one in seconds]
            found[name] = weighted(timings, [call.share for call in calls])
        return found

    model = call_models.text()
    samples = open_data(call_models.texts((5, 40, 5, 5)), signature_of(model))
    tuner = Tuner(originals(model, [1]), [candidate("lean", model)], Judge(model, samples), LIMITS, race=race)
    result = tuner.run(cores=2)
    assert result.chosen.name == "lean"
    short, long = result.by_size
    assert (short.shapes["ids"], short.share, long.shapes["ids"], long.share) == ((1, 5), 0.75, (1, 40), 0.25)
    assert short.speedup.value == pytest.approx(1, rel=0.02)
    assert long.speedup.value == pytest.approx(2, rel=0.02)
    assert (long.original_ms, long.chosen_ms) == (pytest.approx(40, rel=0.02), pytest.approx(20, rel=0.02))
    (lean,) = result.records
    assert lean.latency_ms == pytest.approx(0.75 * 5 + 0.25 * 20, rel=0.02)
    assert lean.speedup is not None
    assert lean.speedup.value == pytest.approx((0.75 * 5 + 0.25 * 40) / (0.75 * 5 + 0.25 * 20), rel=0.02)


def test_data_of_one_size_have_no_gain_by_size() -> None:
    race = SimulatedRace({"original-t1": 2.0, "lean": 1.0})
    assert tune(classifier(), candidate("lean", classifier()), race=race).by_size == ()


def noisy(amount: float, seed: int = 0) -> Artifact:
    """A classifier of the same structure whose weights are wrong by ``amount``."""
    proto = onnx.load_model_from_string(classifier().data)
    (weight,) = proto.graph.initializer
    array = numpy_helper.to_array(weight)
    noise = np.random.default_rng(seed).standard_normal(array.shape)
    weight.CopyFrom(numpy_helper.from_array((array + amount * noise).astype(np.float32), weight.name))
    return Artifact.from_bytes(proto.SerializeToString())


@pytest.mark.parametrize("order", [1, -1])
def test_of_candidates_of_equal_structure_one_is_timed_and_the_most_accurate_competes(order: int) -> None:
    models = {"rough": noisy(0.01), "fine": noisy(0.001), "bad": classifier(factor=-1.0)}
    tried = [candidate(name, model, "int8") for name, model in models.items()]
    timed = SimulatedRace({"original-t1": 1.0, "rough": 0.5, "fine": 0.5, "bad": 0.5})
    result = tune(classifier(ballast=1), *tried[::order], contract=Contract(0.2), race=timed)
    assert result.chosen.name == "fine"
    records = {record.name: record for record in result.records}
    assert records["rough"].reason == "the same operators as fine, which is at least as accurate"
    assert (records["rough"].status, records["rough"].latency_ms) == ("outrun", None)
    assert records["bad"].status == "rejected"
    assert all(record.accuracy for record in records.values())
    screened = [pair for pair in timed.pairs if pair != ("original-t1", "fine")]
    assert len([pair for pair in screened if len(pair) == 2]) <= 1


def test_a_structure_is_timed_with_the_next_candidate_if_the_first_fails() -> None:
    simulated = SimulatedRace({"original-t1": 1.0, "dies": 0.5, "lives": 0.5})

    def race(entrants: Mapping[str, Entrant], inputs: object, budget_s: float, loads: int) -> dict[str, Timings]:
        if "dies" in entrants:
            raise PenstockError("out of memory")
        return simulated(entrants, inputs, budget_s, loads)

    result = tune(classifier(ballast=1), candidate("dies", noisy(0)), candidate("lives", noisy(1e-6)), race=race)
    assert result.chosen.name == "lives"
    assert [record.status for record in result.records] == ["failed", "chosen"]


class StoppedRace(SimulatedRace):
    """Uses up the budget of ``deadline`` in the given race."""

    def __init__(self, milliseconds: dict[str, float], deadline: BuildDeadline, last: int) -> None:
        super().__init__(milliseconds)
        self._deadline, self._last = deadline, last

    def __call__(self, *arguments) -> dict[str, Timings]:
        found = super().__call__(*arguments)
        if len(self.pairs) == self._last:
            self._deadline.expire()
        return found


def test_exact_candidates_are_timed_first_and_even_when_there_is_no_time_for_others() -> None:
    clock = ManualClock()
    deadline = BuildDeadline(10.0, clock)
    clock.advance(20.0)
    tried = [candidate("int8", classifier(kind=1), precision="int8"), candidate("fp32", classifier(kind=2))]
    race = SimulatedRace({"original-t1": 1.0, "int8": 0.1, "fp32": 0.5})
    result = tune(classifier(), *tried, limits=msgspec.structs.replace(LIMITS, deadline=deadline), race=race)
    assert result.chosen.name == "fp32"
    assert [record.reason for record in result.records if record.name == "int8"] == [
        "not timed: there was no time within --budget"
    ]


def test_late_in_the_budget_nothing_is_timed_with_more_threads() -> None:
    clock = ManualClock()
    deadline = BuildDeadline(10.0, clock)
    clock.advance(6.0)
    original = classifier()
    tried = [candidate(f"fp32-t{threads}", classifier(kind=2), threads=threads) for threads in (1, 2)]
    race = SimulatedRace({"original-t1": 1.0, "original-t2": 0.1, "fp32-t1": 0.5, "fp32-t2": 0.1})
    limits = msgspec.structs.replace(LIMITS, deadline=deadline)
    result = Tuner(originals(original, [1, 2]), tried, Judge(original, data()), limits, race=race).run(cores=2)
    assert result.chosen.name == "fp32-t1"
    reasons = {record.name: record.reason for record in result.records}
    assert reasons["original-t2"] == reasons["fp32-t2"] == "not timed: there was no time within --budget"
    assert not any("t2" in name for pair in race.pairs for name in pair)


@pytest.mark.parametrize(("used_s", "confirmed"), [(5.0, 4), (8.0, 2)])
def test_late_in_the_budget_fewer_are_confirmed(used_s: float, confirmed: int) -> None:
    clock = ManualClock()
    deadline = BuildDeadline(10.0, clock)
    clock.advance(used_s)
    tried = [candidate(f"c{number}", classifier(kind=number)) for number in range(1, 5)]
    race = SimulatedRace({"original-t1": 1.0, **{f"c{number}": 0.1 * number for number in range(1, 5)}})
    tune(classifier(), *tried, limits=msgspec.structs.replace(LIMITS, deadline=deadline), race=race)
    pairs = [next(name for name in pair if name != "original-t1") for pair in race.pairs if len(set(pair)) == 2]
    assert pairs[4:] == ["c1", "c2", "c3", "c4"][:confirmed]


@pytest.mark.parametrize("last", range(1, 5))
def test_when_the_time_is_over_the_best_so_far_is_chosen(last: int) -> None:
    deadline, names = BuildDeadline(), ["c1", "c2", "c3", "c4"]
    tried = [candidate(name, classifier(kind=number)) for number, name in enumerate(names, 1)]
    timed = StoppedRace({"original-t1": 1.0, "c1": 0.9, "c2": 0.7, "c3": 0.5, "c4": 0.3}, deadline, last)
    limits = msgspec.structs.replace(LIMITS, deadline=deadline)
    result = tune(classifier(), *tried, limits=limits, race=timed)
    records = {record.name: record for record in result.records}
    late = {name for name in names if records[name].reason == "not timed: the build was interrupted"}
    assert late == set(names[last:])
    assert result.chosen.name == names[last - 1]
    assert [name for name in names if records[name].accuracy] == [names[last - 1]]
