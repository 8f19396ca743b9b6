from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from networks import mlp
from penstock.dataset import make_dataset
from penstock.errors import InvalidData
from penstock.offline.compress.training.batches import TrainingBatches
from penstock.offline.compress.training.trainable import TrainableModel

MODEL = TrainableModel(mlp())


def make_batches(rows: int = 20) -> TrainingBatches:
    values = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)
    return TrainingBatches(MODEL, make_dataset({"x": values}, None))


@given(st.integers(2, 40), st.floats(0.01, 0.9), st.integers(0, 5))
def test_a_split_has_every_row_once(rows: int, held_out: float, seed: int) -> None:
    batches = make_batches(rows)
    train, validate = batches.split(held_out, seed)
    assert sorted([*train, *validate]) == list(range(rows))
    assert len(train)
    assert len(validate)
    again = batches.split(held_out, seed)
    assert all(np.array_equal(one, other) for one, other in zip((train, validate), again, strict=True))


def test_nothing_is_held_out_unless_asked() -> None:
    train, validate = make_batches().split(0, 0)
    assert (len(train), len(validate)) == (20, 0)


def test_one_sample_cannot_be_split() -> None:
    with pytest.raises(InvalidData, match=r"1 sample\(s\) cannot be split"):
        make_batches(1).split(0.2, 0)


@given(st.integers(1, 40), st.integers(1, 60))
def test_pieces_are_nearly_equal_and_hold_every_row_in_order(rows: int, size: int) -> None:
    pieces = make_batches(rows).pieces(np.arange(rows), size)
    assert np.concatenate(pieces).tolist() == list(range(rows))
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1


def test_results_are_those_of_the_model() -> None:
    batches = make_batches()
    inputs = batches.inputs(np.array([3, 1]))
    found = batches.forward(inputs)
    assert found["x"] is inputs["x"]
    assert np.array_equal(found["y"].detach().numpy(), MODEL(inputs)["y"].detach().numpy())


def test_tensors_do_not_share_memory_with_the_data() -> None:
    batches = make_batches()
    before = batches.arrays(np.arange(20))["x"]
    batches.inputs(np.arange(20))["x"].zero_()
    assert np.array_equal(batches.arrays(np.arange(20))["x"], before)


def test_data_without_an_input_are_refused() -> None:
    data = make_dataset({"other": np.zeros((4, 16), np.float32)}, None)
    with pytest.raises(InvalidData, match=r"no data for input\(s\) \['x'\]"):
        TrainingBatches(MODEL, data)
