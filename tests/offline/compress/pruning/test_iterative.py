"""Alternating pruning and retraining: the sequence of levels, lasting zeros, the contract, and interrupted runs."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from networks import Network, mlp
from penstock.artifact import Artifact
from penstock.dataset import Dataset, make_dataset
from penstock.errors import ContractUnmet, InvalidArgument, Unsupported
from penstock.offline.compress.pruning.iterative import (
    IterativeOptions,
    PruningLevel,
    next_step,
    prune_iteratively,
    retrain_pruned,
)
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.training.fit import fit
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.torch import functional, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.offline.judge.contract import Contract

EPOCHS = FitOptions(epochs=6, learning_rate=5e-3, batch_size=128)


@functools.cache
def _data(count: int = 480, seed: int = 0) -> Dataset:
    """Sixteen numbers in four classes, defined by a product of two and a sum of others: not linear, and learned within a second."""
    x = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    return make_dataset({"x": x}, 2 * (x[:, 0] * x[:, 1] > 0) + (x[:, 2] + x[:, 3] > 0).astype(np.int64))


@functools.cache
def _trained() -> Artifact:
    model, data = TrainableModel(mlp()), _data(1200, 1)
    labels = torch.from_numpy(np.asarray(data.labels))
    fit(
        model,
        data,
        lambda t, rows: functional.cross_entropy(t["y"], labels[rows]),
        FitOptions(epochs=25, learning_rate=1e-2, batch_size=128),
    )
    return model.to_artifact("train", {}, {})


def _options(sparsity: float = 0.9, **changes: object) -> IterativeOptions:
    base = IterativeOptions(
        PruneOptions(GlobalRule(sparsity)),
        levels=3,
        retrain=EPOCHS,
        contract=Contract(max_accuracy_loss=0.02, max_output_error=0.3),
    )
    return msgspec.structs.replace(base, **changes)


def _arrays(artifact: Artifact) -> dict[str, np.ndarray]:
    proto = onnx.load_model_from_string(artifact.data)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def test_far_sparser_at_the_same_accuracy() -> None:
    options = _options()
    found = prune_iteratively(_trained(), _data(1200, 1), options, held_out=_data())
    facts = found.provenance[-1].facts
    assert facts["sparsity"] == pytest.approx(0.9, abs=1e-3)
    assert facts["fewer"] == pytest.approx(10, rel=0.02)
    assert facts["loss"] <= 0.02
    assert facts["original_accuracy"] - facts["accuracy"] == pytest.approx(facts["loss"])
    at_once = dict(facts["one_shot"])[facts["sparsity"]]
    assert at_once < facts["accuracy"] - 0.05
    assert facts["levels"][0]["start"] == -1
    assert found.provenance[-1].source_digest == _trained().digest
    assert sum(int((array == 0).sum()) for name, array in _arrays(found).items() if name in ("w0", "w2", "w4")) >= 4800


@pytest.mark.parametrize("change", [{"optimizer": "sgd", "learning_rate": 1e-2}, {"weight_decay": 0.1}])
def test_zeros_stay_zero_through_moments_and_decay(change: dict[str, object]) -> None:
    original, goal = _trained(), PruneOptions(GlobalRule(0.6))
    before = _arrays(prune(original, goal))
    after = _arrays(retrain_pruned(original, _data(), original, goal, msgspec.structs.replace(EPOCHS, **change)))
    for name in ("w0", "w2", "w4"):
        assert np.array_equal(after[name] == 0, before[name] == 0)
        assert not np.array_equal(after[name], before[name]), "what is left was trained"


def test_an_l1_penalty_makes_more_zeros() -> None:
    original, goal = _trained(), PruneOptions(GlobalRule(0.3))
    zeros = [
        sum(
            int((array == 0).sum())
            for array in _arrays(retrain_pruned(original, _data(), original, goal, EPOCHS, l1=l1)).values()
        )
        for l1 in (0.0, 10.0)
    ]
    assert zeros[1] > 1.2 * zeros[0]


class _Interrupted(Exception):
    pass


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    options = _options(0.8)
    whole = prune_iteratively(_trained(), _data(), options)

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        prune_iteratively(_trained(), _data(), options, folder=tmp_path, on_progress=interrupt)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(kept) == ["level-000.kept", "level-001.kept"]
    resumed = prune_iteratively(_trained(), _data(), options, folder=tmp_path)
    assert resumed == whole
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())
    with pytest.raises(InvalidArgument, match="another model, other data or other options"):
        prune_iteratively(_trained(), _data(), _options(0.7), folder=tmp_path)
    with pytest.raises(InvalidArgument, match="another model"):
        prune_iteratively(_trained(), _data(480, 3), options, folder=tmp_path)


def test_a_damaged_level_is_refused(tmp_path: Path) -> None:
    options = _options(0.5, levels=1)
    prune_iteratively(_trained(), _data(), options, folder=tmp_path)
    path = tmp_path / "level-000.kept"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InvalidArgument, match="damaged"):
        prune_iteratively(_trained(), _data(), options, folder=tmp_path)


def test_a_contract_that_nothing_meets() -> None:
    options = _options(
        0.98, levels=1, retries=1, contract=Contract(max_accuracy_loss=0.0), retrain=FitOptions(epochs=0.2)
    )
    with pytest.raises(ContractUnmet, match="no level of pruning") as error:
        prune_iteratively(_trained(), _data(), options)
    tried = [(level["factor"], level["epochs"]) for level in error.value.candidates]
    assert tried == [(1.0, 0.2), (1.0, pytest.approx(0.6)), (0.5, 0.2), (0.5, pytest.approx(0.6))]


def test_the_sparsest_that_meets_the_contract_comes_back() -> None:
    options = _options(0.98, levels=3, retries=1, contract=Contract(max_accuracy_loss=0.03, max_output_error=0.3))
    facts = prune_iteratively(_trained(), _data(1200, 1), options, held_out=_data()).provenance[-1].facts
    good = [level["sparsity"] for level in facts["levels"] if not level["objection"]]
    assert any(level["objection"] for level in facts["levels"])
    assert facts["sparsity"] == max(good)
    assert facts["loss"] <= 0.03


def test_weights_in_half_precision_cannot_be_trained() -> None:
    n = Network()
    half = n.weight(np.random.default_rng(0).normal(size=(16, 4)).astype(np.float16))
    n.op("Cast", n.op("MatMul", n.op("Cast", "x", to=10), half), to=1, name="y")
    with pytest.raises(Unsupported, match="FP32"):
        prune_iteratively(n.artifact({"x": ["N", 16]}, {"y": ["N", 4]}), make_dataset(_data().inputs, None))


def _play(options: IterativeOptions, bearable: float) -> list[PruningLevel]:
    """The levels of a run in which exactly the factors up to ``bearable`` meet the contract."""
    levels: list[PruningLevel] = []
    while (step := next_step(levels, options)) is not None:
        levels.append(msgspec.structs.replace(step, objection="" if step.factor <= bearable else "too much"))
        assert len(levels) < 1000
    return levels


def test_the_schedule_is_cubic() -> None:
    factors = [level.factor for level in _play(IterativeOptions(levels=4), 1.0)]
    assert factors == pytest.approx([1 - 0.75**3, 1 - 0.5**3, 1 - 0.25**3, 1.0])


@given(st.floats(0, 1), st.integers(1, 12), st.integers(0, 6), st.sampled_from([0.0, 1.0, 3.0]))
def test_the_search_ends_near_what_is_bearable(bearable: float, levels: int, retries: int, second: float) -> None:
    options = IterativeOptions(levels=levels, retries=retries, second_chance=second)
    played = _play(options, bearable)
    good = [level.factor for level in played if not level.objection]
    schedule = [0.0] + [1 - (1 - t / levels) ** 3 for t in range(1, levels + 1)]
    below = max(factor for factor in schedule if factor <= bearable)
    above = min((factor for factor in schedule if factor > bearable), default=1.0)
    assert bearable - max(good, default=0.0) <= (above - below) / 2**retries + 1e-9
    for number, level in enumerate(played):
        assert level.start < number
        start = played[level.start].factor if level.start >= 0 else 0.0
        assert start <= level.factor, "nothing comes back"
    assert len(played) <= (levels + retries) * 2


def test_levels_after_one_that_is_missing_are_not_mixed_in(tmp_path: Path) -> None:
    options = _options(0.8, levels=2, retrain=msgspec.structs.replace(EPOCHS, epochs=1))
    whole = prune_iteratively(_trained(), _data(), options, folder=tmp_path)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.unlink()
    written = second.stat().st_mtime_ns
    assert prune_iteratively(_trained(), _data(), options, folder=tmp_path) == whole
    assert second.stat().st_mtime_ns > written


def test_a_run_ends_when_it_is_told_to() -> None:
    calls: list[None] = []
    options = _options(0.5, levels=4, retrain=msgspec.structs.replace(EPOCHS, epochs=1))
    found = prune_iteratively(_trained(), _data(), options, is_over=lambda: calls.append(None) or len(calls) > 1)
    assert len(found.provenance[-1].facts["levels"]) == 1
    with pytest.raises(ContractUnmet, match="no time"):
        prune_iteratively(_trained(), _data(), options, is_over=lambda: True)
