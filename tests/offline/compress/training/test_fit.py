"""The training loop: drawn rows, stopping, the final state, and identical results after an interruption."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from networks import cnn, mlp
from penstock.clock import ManualClock
from penstock.dataset import Dataset, make_dataset
from penstock.errors import InvalidArgument, InvalidConfig, InvalidData, Unsupported
from penstock.offline.compress.training import fit as fit_module
from penstock.offline.compress.training.fit import FitOptions, fit
from penstock.offline.compress.training.options import learning_rate
from penstock.offline.compress.training.trainable import TrainableModel

SHORT = FitOptions(epochs=3, batch_size=16, learning_rate=1e-2)


def make_data(rows: int = 50) -> Dataset:
    rng = np.random.default_rng(3)
    return make_dataset({"x": rng.normal(size=(rows, 16)).astype(np.float32)}, None)


@pytest.fixture
def data() -> Dataset:
    return make_data()


def zeroed(tensors: Any, _rows: Any) -> Any:
    """A loss with an optimum far from where the network begins: all outputs zero."""
    return tensors["y"].square().mean()


def state(model: TrainableModel) -> bytes:
    return b"".join(weight.detach().numpy().tobytes() for weight in model.weights.values())


def test_the_same_seed_gives_the_same_bits_and_another_does_not(data: Dataset) -> None:
    states, reports = [], []
    for seed in (0, 0, 1):
        model = TrainableModel(mlp())
        reports.append(fit(model, data, zeroed, FitOptions(epochs=3, batch_size=16, seed=seed)))
        states.append(state(model))
    assert states[0] == states[1] != states[2]
    assert reports[0].losses == reports[1].losses
    assert reports[0].losses[-1][1] < reports[0].losses[0][1]


def test_nothing_global_stays_changed(data: Dataset) -> None:
    torch.manual_seed(7)
    before = (torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    inside: list[Any] = []

    def loss(tensors: Any, rows: Any) -> Any:
        inside.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        return zeroed(tensors, rows)

    fit(TrainableModel(mlp()), data, loss, SHORT)
    assert set(inside) == {(1, True)}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before[1:]


def test_every_row_once_an_epoch_in_pieces_that_differ_by_one_at_most(data: Dataset) -> None:
    seen: list[list[int]] = []

    def loss(tensors: Any, rows: Any) -> Any:
        assert torch.equal(tensors["x"], torch.tensor(data.inputs["x"])[rows])
        seen.append(rows.tolist())
        return zeroed(tensors, rows)

    report = fit(TrainableModel(mlp()), data, loss, FitOptions(epochs=2, batch_size=16))
    assert report.steps == len(seen) == 8
    assert {len(rows) for rows in seen} == {12, 13}
    first, second = ([row for rows in seen[at : at + 4] for row in rows] for at in (0, 4))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_half_an_epoch_is_half_the_steps(data: Dataset) -> None:
    report = fit(TrainableModel(mlp()), data, zeroed, FitOptions(epochs=0.5, batch_size=5))
    assert report.steps == 5
    assert [step for step, _ in report.losses] == [5]


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    options = FitOptions(learning_rate=2.0)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[:6] == pytest.approx([2 * (step + 1) / 6 for step in range(6)])
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))
    assert rates[5 + 95 // 2] == pytest.approx(1.0, rel=0.02)
    assert 0 < rates[-1] < 1e-2
    constant = [learning_rate(step, 100, FitOptions(learning_rate=2.0, schedule="constant")) for step in range(100)]
    assert constant[5:] == [2.0] * 95


def test_one_step_of_sgd_is_the_formula(data: Dataset) -> None:
    """Nesterov's first step is lr (1 + 0.9) g; decay adds to the gradient of matrices only."""
    model, other = TrainableModel(mlp()), TrainableModel(mlp())
    zeroed(other({"x": torch.tensor(data.inputs["x"])}), None).backward()
    options = FitOptions(
        epochs=1, batch_size=50, optimizer="sgd", learning_rate=0.1, weight_decay=0.5, schedule="constant"
    )
    fit(model, data, zeroed, options)
    for name, weight in other.weights.items():
        gradient = weight.grad + (0.5 * weight if weight.ndim > 1 else 0)
        torch.testing.assert_close(model.weights[name], weight - 0.1 * 1.9 * gradient, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_clipped_as_a_whole(data: Dataset) -> None:
    model = TrainableModel(mlp())
    before = [weight.detach().clone() for weight in model.weights.values()]
    options = FitOptions(
        epochs=1, batch_size=50, optimizer="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.01
    )
    fit(model, data, zeroed, options)
    moved = [(weight.detach() - old).norm() for weight, old in zip(model.weights.values(), before, strict=True)]
    assert float(torch.stack(moved).norm()) == pytest.approx(0.01 * 1.9, rel=1e-3)


def test_only_the_given_parameters_move(data: Dataset) -> None:
    model = TrainableModel(mlp())
    before = {name: weight.detach().clone() for name, weight in model.weights.items()}
    chosen = next(iter(model.weights))
    fit(model, data, zeroed, SHORT, parameters=[model.weights[chosen]])
    assert {name for name, weight in model.weights.items() if not torch.equal(weight, before[name])} == {chosen}
    assert all(weight.requires_grad and weight.grad is None for weight in model.weights.values())


def test_masks_are_put_back_after_each_step(data: Dataset) -> None:
    model = TrainableModel(mlp())
    weight = next(weight for weight in model.weights.values() if weight.ndim == 2)
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5

    def after_step() -> None:
        with torch.no_grad():
            weight.mul_(mask)

    after_step()
    fit(model, data, zeroed, SHORT, after_step=after_step)
    assert torch.equal(weight != 0, mask)


def test_the_best_state_is_kept_and_patience_ends(data: Dataset) -> None:
    model, states, scores = TrainableModel(mlp()), [], [0.0, 1.0, 3.0, 2.0, 2.5, 9.0]

    def validate() -> float:
        states.append(state(model))
        return scores[len(states) - 1]

    report = fit(model, data, zeroed, FitOptions(epochs=9, batch_size=25, patience=2), validate=validate)
    assert (report.stopped, report.steps, report.best_step) == ("patience", 8, 4)
    assert [score for _, score in report.scores] == scores[:5]
    assert state(model) == states[2]
    assert report.facts()["score"] == [0.0, 3.0]


def test_a_start_that_is_the_best_comes_back(data: Dataset) -> None:
    model = TrainableModel(mlp())
    before = state(model)
    report = fit(
        model, data, lambda tensors, rows: -zeroed(tensors, rows), SHORT, validate=lambda: before == state(model)
    )
    assert report.best_step == 0
    assert state(model) == before


def test_held_out_rows_are_not_trained_on(data: Dataset) -> None:
    trained, validated = set(), set()

    def loss(tensors: Any, rows: Any) -> Any:
        (trained if torch.is_grad_enabled() else validated).update(rows.tolist())
        return zeroed(tensors, rows)

    report = fit(TrainableModel(mlp()), data, loss, FitOptions(epochs=2, batch_size=16, held_out=0.2))
    assert len(validated) == 10
    assert trained | validated == set(range(50))
    assert not trained & validated
    assert report.scores[-1][1] > report.scores[0][1]


def test_time_ends_it_and_more_time_goes_on(data: Dataset, tmp_path: Path) -> None:
    whole = TrainableModel(mlp())
    fit(whole, data, zeroed, SHORT)
    clock, model = ManualClock(), TrainableModel(mlp())

    def tick() -> None:
        clock.advance(1.0)

    def run(time_s: float) -> Any:
        options = FitOptions(epochs=3, batch_size=16, learning_rate=1e-2, time_s=time_s)
        return fit(model, data, zeroed, options, clock=clock, after_step=tick, checkpoint=tmp_path / "run.kept")

    first = run(5.0)
    assert (first.stopped, first.steps) == ("time", 5)
    model = TrainableModel(mlp())
    assert run(100.0).stopped == "finished"
    assert state(model) == state(whole)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_an_interrupted_run_goes_on_bit_for_bit(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: Any, stop_at: int
) -> None:
    monkeypatch.setattr(fit_module, "_CHECKPOINT_S", 0.0)
    options = FitOptions(epochs=3, batch_size=16, optimizer=optimizer, held_out=0.2, learning_rate=1e-2)
    whole = TrainableModel(mlp())
    expected = fit(whole, data, zeroed, options)
    path = tmp_path / "run.kept"

    def interrupt(step: int, _steps: int) -> None:
        if step == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(TrainableModel(mlp()), data, zeroed, options, checkpoint=path, before_step=interrupt)
    model, resumed = TrainableModel(mlp()), []
    found = fit(model, data, zeroed, options, checkpoint=path, before_step=lambda step, _: resumed.append(step))
    # From the end of the last epoch before the interruption, of three steps each.
    assert resumed == list(range(stop_at - stop_at % 3, 9))
    assert state(model) == state(whole)
    assert (found.losses, found.scores, found.best_step) == (expected.losses, expected.scores, expected.best_step)
    assert [file.name for file in tmp_path.iterdir()] == ["run.kept"]
    # A finished run is not run again.
    again = fit(TrainableModel(mlp()), data, lambda *_: pytest.fail("trained again"), options, checkpoint=path)
    assert again.losses == expected.losses


def test_a_checkpoint_of_another_run_is_refused(data: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "run.kept"
    fit(TrainableModel(mlp()), data, zeroed, SHORT, checkpoint=path, depends_on="a")
    others: list[tuple[Dataset, FitOptions, str, Any]] = [
        (data, FitOptions(epochs=4, batch_size=16), "a", mlp()),
        (make_data(51), SHORT, "a", mlp()),
        (data, SHORT, "b", mlp()),
        (data, SHORT, "a", mlp(width=32)),
    ]
    for rows, options, depends_on, artifact in others:
        with pytest.raises(InvalidArgument, match="another run|other options"):
            fit(TrainableModel(artifact), rows, zeroed, options, checkpoint=path, depends_on=depends_on)
    changed = TrainableModel(mlp())
    with torch.no_grad():
        next(iter(changed.weights.values())).mul_(2)
    with pytest.raises(InvalidArgument, match="other options, data or model"):
        fit(changed, data, zeroed, SHORT, checkpoint=path, depends_on="a")


def test_divergence_is_named_and_leaves_the_last_good_state(data: Dataset) -> None:
    model, ends = TrainableModel(mlp()), []

    def loss(tensors: Any, rows: Any) -> Any:
        ends.append(state(model))
        return zeroed(tensors, rows) * (math.nan if len(ends) == 7 else 1.0)

    with pytest.raises(InvalidData, match=r"loss became NaN or infinite in step 6.*lower the learning rate"):
        fit(model, data, loss, SHORT)
    assert state(model) == ends[4]  # after the first epoch of four steps


def test_weights_that_blow_up_in_the_last_step_are_noticed(data: Dataset) -> None:
    model = TrainableModel(mlp())
    before = state(model)

    def after_step() -> None:
        with torch.no_grad():
            next(iter(model.weights.values())).fill_(math.inf)

    with pytest.raises(InvalidData, match="weights became NaN or infinite"):
        fit(model, data, zeroed, FitOptions(epochs=1, batch_size=50), after_step=after_step)
    assert state(model) == before


def test_augmented_inputs_reach_model_and_loss_and_depend_on_the_seed_only(data: Dataset) -> None:
    def run() -> tuple[bytes, list[Any]]:
        model, seen = TrainableModel(mlp()), []

        def loss(tensors: Any, rows: Any) -> Any:
            seen.append((tensors["x"] - torch.tensor(data.inputs["x"])[rows]).abs().max())
            return zeroed(tensors, rows)

        fit(model, data, loss, SHORT, augment=lambda x, rng: {"x": x["x"] + rng.uniform(0, 1, (1, 16)).astype("f4")})
        return state(model), seen

    (first, changes), (second, _) = run(), run()
    assert first == second
    assert all(0 < change <= 1 for change in changes)
    assert len({float(change) for change in changes}) == len(changes)


def test_a_model_of_fixed_batch_is_run_as_often_as_it_takes() -> None:
    rng = np.random.default_rng(0)
    data = make_dataset({"x": rng.normal(size=(12, 3, 12, 12)).astype(np.float32)}, None)
    states = []
    for batch in ("N", 1, 4):
        model = TrainableModel(cnn(8, batch))
        fit(model, data, zeroed, FitOptions(epochs=1, batch_size=12, learning_rate=1e-2))
        states.append(torch.cat([weight.detach().reshape(-1) for weight in model.weights.values()]))
    # The same sums in another order.
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(states[2], states[0], rtol=1e-3, atol=2e-4)
    with pytest.raises(InvalidData, match="exactly 4 samples"):
        fit(TrainableModel(cnn(8, 4)), make_dataset(data.rows(0, 10), None), zeroed, SHORT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"epochs": math.nan},
        {"learning_rate": -1},
        {"batch_size": 0},
        {"held_out": 1.0},
        {"patience": 0},
        {"seed": -1},
        {"threads": 0},
        {"optimizer": "adam"},
        {"schedule": "step"},
        {"clip_norm": 0},
        {"time_s": -1},
        {"weight_decay": -0.1},
    ],
)
def test_options_that_make_no_sense(data: Dataset, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        fit(TrainableModel(mlp()), data, zeroed, FitOptions(**wrong))


def test_data_that_do_not_fit(data: Dataset) -> None:
    with pytest.raises(InvalidData, match=r"no data for input\(s\) \['x'\]"):
        fit(TrainableModel(mlp()), make_dataset({"z": data.inputs["x"]}, None), zeroed, SHORT)
    with pytest.raises(InvalidData, match=r"1 sample\(s\) cannot be split"):
        fit(TrainableModel(mlp()), make_data(1), zeroed, FitOptions(held_out=0.5))
    model = TrainableModel(mlp(), frozen=list(TrainableModel(mlp()).weights))
    with pytest.raises(Unsupported, match="nothing to train"):
        fit(model, data, zeroed, SHORT)
