"""Builds and single methods of a stateful model from sequences of calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import call_models
import penstock
from brief_builds import build
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.errors import InvalidData
from penstock.offline.build import Recipe
from penstock.offline.compress.functions import compress
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.judge.accuracy import served_answers
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import hints_of, signature_of
from penstock.samples.open import open_data

INT8 = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MIN_MAX,), careful=False, timing_s=0.5)
Sequence = list[dict[str, np.ndarray]]


def sequences(count: int, calls: int = 6, seed: int = 0) -> list[Sequence]:
    """Sequences of calls of ``call_models.voice`` without its state, of nearly ``calls`` calls each."""
    found = call_models.voice_calls(count * calls, seed=seed)
    for call in found:
        del call["state"]
    return [found[number * calls : (number + 1) * calls - number % 2] for number in range(count)]


def by_hand(model: Artifact, sequence: Sequence, states: bool = False) -> np.ndarray:
    """The outputs, or the states before the calls, with the state fed back in a loop around the bare model."""
    loaded: LoadedModel = get_engine("onnxruntime").load(model, {"threads": 1})
    state, found = np.zeros((2, 1, call_models.HIDDEN), np.float32), []
    try:
        for call in sequence:
            outputs = loaded.forward({**call, "state": state})
            found.append(state if states else outputs["speech"])
            state = outputs["next"]
    finally:
        loaded.unload()
    return np.concatenate(found)


def drifting(model: Artifact, by: float) -> Artifact:
    """``model``, whose state is multiplied by ``by`` before it is returned. Its other outputs are the same in a single call."""
    proto = read_proto(model)
    node = next(node for node in proto.graph.node if "next" in node.output)
    node.output[list(node.output).index("next")] = "kept"
    proto.graph.node.add(op_type="Mul", input=["kept", "by"], output=["next"])
    proto.graph.initializer.add(name="by", data_type=1, float_data=[by])
    return Artifact.from_bytes(proto.SerializeToString())


def test_states_are_those_that_the_original_returned() -> None:
    model, given = call_models.voice(), sequences(3)
    with hints_of(model) as hints:
        assert hints.states == {"state": "next"}
        data = open_data(given, signature_of(model), hints=hints)
    wanted = np.concatenate([by_hand(model, sequence, states=True) for sequence in given])
    found = np.concatenate([data.sample(number)["state"] for number in range(data.count)])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("by", [1.0, 0.5, 0.9])
def test_a_candidate_is_judged_with_the_states_that_it_returns_itself(by: float) -> None:
    model, given = call_models.voice(), sequences(8)
    candidate = drifting(model, by)
    want, got = ([by_hand(one, sequence) for sequence in given] for one in (model, candidate))
    with_labels = [
        [{**call, "labels": answer} for call, answer in zip(sequence, answers, strict=True)]
        for sequence, answers in zip(given, want, strict=True)
    ]
    with hints_of(model) as hints:
        data = open_data(with_labels, signature_of(model), hints=hints)
    judge = Judge(model, data, contract=Contract(metric="mae", output="speech", trust_labels=True))
    accuracy = judge.assess(candidate).accuracy
    error = np.abs(np.concatenate(want) - np.concatenate(got)).mean()
    assert accuracy.value == pytest.approx(error, rel=1e-5, abs=1e-9)
    assert accuracy.samples == 8
    assert (accuracy.value > 0) == (by != 1)


def test_the_states_are_no_answers() -> None:
    model = call_models.voice()
    with hints_of(model) as hints:
        data = open_data(sequences(3), signature_of(model), hints=hints)
    loaded = get_engine("onnxruntime").load(model, {"threads": 1})
    assert list(served_answers(loaded, data)) == ["speech"]
    loaded.unload()


def test_a_stateful_model_is_built_from_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.offline.build.make_look", lambda *_: lambda *_: {})  # try INT8 even if it is slower
    model = call_models.voice()
    result = build(model, tmp_path / "voice.bundle", sequences(20), recipe=INT8)
    evidence = result.evidence
    assert evidence.baseline.accuracy is not None
    assert evidence.baseline.accuracy.samples == 4
    assert evidence.metric_outputs == ("speech",)
    assert any(record.precision == "int8" and record.accuracy is not None for record in evidence.candidates)
    assert any(note.startswith("judging 4 sequence(s) of 23 calls") for note in evidence.notes)
    with penstock.open(tmp_path / "voice.bundle") as built:
        state = np.zeros((2, 1, call_models.HIDDEN), np.float32)
        for call, wanted in zip(sequences(1)[0], by_hand(model, sequences(1)[0]), strict=True):
            found = built.infer({**call, "state": state})
            np.testing.assert_allclose(found["speech"][0], wanted, atol=0.1)
            state = found["next"]


def test_a_method_takes_sequences() -> None:
    model = call_models.voice()
    outcome = compress.quantize(model, sequences(12), sequences(5, seed=1), budget_s=0.2)
    assert outcome.comparison is not None
    assert outcome.comparison.accuracy.samples == 5


def test_one_sequence_cannot_be_calibrated_and_judged_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"1 sequence\(s\) cannot be split"):
        build(call_models.voice(), tmp_path / "voice.bundle", sequences(1), recipe=INT8)


def test_a_chunk_that_the_model_rejects_is_named(tmp_path: Path) -> None:
    given = sequences(2)
    given[1][2]["sound"] = np.zeros((1, 2), np.float32)
    with pytest.raises(InvalidData, match="sample 8 of the data"):
        build(call_models.voice(), tmp_path / "voice.bundle", given, recipe=INT8)
