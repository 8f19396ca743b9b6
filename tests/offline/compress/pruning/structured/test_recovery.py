"""Alternating cuts and training: the contract holds on unseen data, and an interrupted run continues."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import pytest

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import ContractUnmet, InvalidArgument, InvalidConfig
from penstock.offline.compress.pruning.structured import search as structured
from penstock.offline.compress.pruning.structured.latency import LatencyTable, TimedLayer
from penstock.offline.compress.pruning.structured.recovery import Round, ShrinkOptions, given_up, next_move, shrink
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.samples.open import load_dataset
from penstock.tensor import DataType, Signature, TensorSpec

_DIGITS = Path(__file__).parents[5] / "examples" / "digits"
_QUICK = ShrinkOptions(
    speedup=50.0, rounds=1, fit=FitOptions(epochs=2), second_chance=0, contract=Contract(max_accuracy_loss=0.1)
)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a layer is proportional to its number of weights, so widths and losses are the same on every machine."""

    def measure(table: LatencyTable, layers: set[TimedLayer]) -> None:
        table._ms.update({layer: 1e-6 * prod(layer.shapes[1]) for layer in layers})

    monkeypatch.setattr(LatencyTable, "_measure", measure)
    monkeypatch.setattr(structured, "_MEASURE_S", 0.1)


def _digits(name: str) -> Dataset:
    signature = Signature((TensorSpec("image", DataType.FP32, (-1, 1, 8, 8)),), ())
    return load_dataset(_DIGITS / f"{name}.npz", signature)


def _model() -> Artifact:
    return Artifact.from_file(_DIGITS / "model.onnx")


def _round(**changes: object) -> Round:
    plain = Round(cut=True, start=-1, narrowed=["a"], units={}, speedup=1.2, accuracy=1.0, loss=0.0, objection="")
    return msgspec.structs.replace(plain, **changes)


_FAILED, _STILL_FAILED = _round(objection="loses"), _round(cut=False, start=0, objection="loses")


@pytest.mark.parametrize(
    ("rounds", "move"),
    [
        ([], (True, -1)),
        ([_round()], (True, 0)),
        ([_round(speedup=1.5)], None),
        ([_FAILED], (False, 0)),
        ([_round(speedup=1.6, objection="loses")], (False, 0)),
        ([_FAILED, _round(cut=False, start=0)], (True, 1)),
        ([_FAILED, _STILL_FAILED], (True, -1)),
        ([_round(), _round(objection="loses"), _round(cut=False, start=1, objection="loses")], (True, 0)),
        ([_round()] * 16, None),
    ],
)
def test_what_comes_next(rounds: list[Round], move: tuple[bool, int] | None) -> None:
    assert next_move(rounds, ShrinkOptions()) == move


def test_without_a_second_chance_other_groups_are_cut_at_once() -> None:
    assert next_move([_FAILED], ShrinkOptions(second_chance=0)) == (True, -1)


def test_what_failed_for_good_is_left_alone() -> None:
    other = _round(start=1, narrowed=["b", "c"], objection="loses")
    assert given_up([_FAILED, _round(cut=False, start=0)]) == set()
    assert given_up([_FAILED, _STILL_FAILED]) == {"a"}
    assert given_up([_FAILED, _round(cut=False, start=0), other]) == {"b", "c"}


@pytest.mark.usefixtures("steady")
def test_digits_get_narrower_within_the_contract_and_go_on_from_a_folder(tmp_path: Path) -> None:
    original, data, unseen = _model(), _digits("calibrate"), _digits("evaluate")
    seen: list[tuple[int, int]] = []
    small = shrink(original, data, _QUICK, folder=tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    facts = small.provenance[-1].facts
    (entry,) = facts["rounds"]
    assert facts["reached"] is False
    assert facts["chosen"] == 0
    assert facts["loss"] <= 0.1
    assert sum(entry["units"].values()) < 32 + 32 + 64 + 64 + 64
    comparison = Judge(original, unseen).compare(small, budget_s=0.2)
    assert comparison.size_ratio > 1.1
    assert comparison.accuracy.loss.value <= 0.2
    for speedup in (50.0, 100.0):  # the way to a higher speed-up begins as that to a lower
        again = shrink(original, data, msgspec.structs.replace(_QUICK, speedup=speedup), folder=tmp_path)
        assert again.data == small.data
    with pytest.raises(InvalidArgument, match="another run|another model"):
        shrink(original, data, msgspec.structs.replace(_QUICK, share=0.2), folder=tmp_path)


@pytest.mark.usefixtures("steady")
def test_a_contract_that_cannot_be_kept_shows_what_was_tried() -> None:
    hopeless = msgspec.structs.replace(
        _QUICK, share=0.9, fit=FitOptions(epochs=0.1, learning_rate=1e-9), contract=Contract(0.0)
    )
    with pytest.raises(ContractUnmet, match="loses") as caught:
        shrink(_model(), _digits("calibrate"), hopeless)
    assert caught.value.candidates[0]["cut"] is True


def test_options_that_make_no_sense_are_refused() -> None:
    for options in (ShrinkOptions(speedup=1.0), ShrinkOptions(threads=0), ShrinkOptions(fit=FitOptions(epochs=-1))):
        with pytest.raises(InvalidConfig):
            shrink(_model(), _digits("calibrate"), options)


def test_a_run_without_time_says_so() -> None:
    with pytest.raises(ContractUnmet, match="no time"):
        shrink(_model(), _digits("calibrate"), _QUICK, is_over=lambda: True)
