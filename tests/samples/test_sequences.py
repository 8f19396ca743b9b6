"""Samples in sequences: their states are those that the model returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import InvalidData
from penstock.samples.hints import InputHints
from penstock.samples.open import Data, open_data
from penstock.tensor import DataType, Signature, TensorSpec

FP32 = DataType.FP32
SUMS = Signature(
    (
        TensorSpec("x", FP32, (-1, 2)),
        TensorSpec("state", FP32, (1, -1, 2)),
        TensorSpec("rate", DataType.INT64, ()),
    ),
    (TensorSpec("y", FP32, (-1, 1)), TensorSpec("next", FP32, (1, -1, 2))),
)
X = np.arange(12, dtype=np.float32).reshape(6, 2)
SEQUENCES = [4, 4, 4, 9, 9, 2]
RATE = np.array(8)


def add(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state is the sum of all inputs so far."""
    state = inputs["state"] + inputs["x"][np.newaxis]
    return {"y": state[0, :, :1], "next": state}


HINTS = InputHints({"state": "next"}, add)


def opened(data: Data) -> Dataset:
    return open_data(data, SUMS, hints=HINTS)


def check(data: Dataset) -> None:
    """``data`` are the sequences of ``X``, with the sums as states."""
    assert (data.count, data.units, data.joins) == (6, 3, False)
    assert data.sequences is not None
    assert data.sequences.tolist() == [0, 0, 0, 1, 1, 2]
    assert data.continues.tolist() == [False, True, True, False, True, False]
    for number, total in enumerate([0 * X[0], X[0], X[0] + X[1], 0 * X[0], X[3], 0 * X[0]]):
        call = data.sample(number)
        np.testing.assert_array_equal(call["x"], X[number : number + 1])
        np.testing.assert_array_equal(call["state"], total.reshape(1, 1, 2))
        assert (call["rate"].shape, int(call["rate"])) == ((), 8)


def samples() -> list[dict[str, Any]]:
    return [{"x": x, "rate": 8, "sequence": number} for x, number in zip(X, SEQUENCES, strict=True)]


def folder(tmp_path: Path) -> Path:
    for number, sequence in enumerate("aaabbc"):
        path = tmp_path / "data" / sequence / f"{number}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=X[number], rate=RATE)
    return tmp_path / "data"


def test_every_kind_of_data_says_how_samples_form_sequences(tmp_path: Path) -> None:
    lines = "".join(json.dumps({**one, "x": one["x"].tolist()}) + "\n" for one in samples())
    (tmp_path / "lines.jsonl").write_text(lines)
    np.savez(tmp_path / "rows.npz", x=X, rate=RATE, sequence=SEQUENCES)
    np.savez(tmp_path / "calls.npz", x=X[:, np.newaxis], rate=np.full(6, 8), sequence=np.array(list("aaabbc")))
    lists = [samples()[:3], samples()[3:5], samples()[5:]]
    given: list[Data] = [
        samples(),
        ([{name: one[name] for name in ("x", "rate")} for one in sequence] for sequence in lists),
        {"x": X, "rate": RATE, "sequence": np.array(SEQUENCES)},
        folder(tmp_path),
        *(tmp_path / name for name in ("lines.jsonl", "rows.npz", "calls.npz")),
    ]
    found = [opened(data) for data in given]
    for data in found:
        check(data)
    assert len({data.digest for data in found}) == 1


def test_columns_of_a_table_form_sequences(tmp_path: Path) -> None:
    signature = Signature((TensorSpec("x", FP32, (-1, 2)), SUMS.inputs[1]), SUMS.outputs)
    path = tmp_path / "rows.csv"
    path.write_text("a,sequence,b\n" + "".join(f"{a},s{s},{b}\n" for (a, b), s in zip(X, SEQUENCES, strict=True)))
    data = open_data(path, signature, hints=HINTS)
    assert data.sequences is not None
    assert data.sequences.tolist() == [0, 0, 0, 1, 1, 2]
    np.testing.assert_array_equal(data.sample(2)["state"], (X[0] + X[1]).reshape(1, 1, 2))


def test_a_state_that_is_given_starts_the_sequence() -> None:
    first = np.full((1, 1, 2), 5, np.float32)
    given = [{**one, "state": first if number in (0, 3, 5) else first * 0} for number, one in enumerate(samples())]
    data = opened(given)
    for number, total in enumerate([5 + 0 * X[0], 5 + X[0], 5 + X[0] + X[1], 5 + 0 * X[0], 5 + X[3], 5 + 0 * X[0]]):
        np.testing.assert_array_equal(data.sample(number)["state"], total.reshape(1, 1, 2))


def test_calls_with_several_rows_have_a_state_for_each() -> None:
    data = opened([{"x": np.ones((3, 2), np.float32), "rate": 8, "sequence": "a"}] * 2)
    assert [data.sample(number)["state"].tolist() for number in (0, 1)] == [[[[0, 0]] * 3], [[[1, 1]] * 3]]


def test_states_that_are_given_without_sequences_are_independent_calls() -> None:
    calls = [{"x": x[np.newaxis], "rate": RATE, "state": np.ones((1, 1, 2), np.float32)} for x in X]
    data = opened(calls)
    assert (data.sequences, data.units) == (None, 6)
    assert data.sample(3)["state"].tolist() == [[[1, 1]]]


def test_a_split_keeps_sequences_whole() -> None:
    many = [{"x": X[0] + step, "rate": 8, "sequence": number} for number in range(10) for step in range(number + 1)]
    rest, held = opened(many).split_shuffled(0.3)
    assert (rest.units, held.units, rest.count + held.count) == (7, 3, 55)
    for part in (rest, held):
        assert part.sequences is not None
        assert int((~part.continues).sum()) == part.units
    with pytest.raises(InvalidData, match=r"1 sequence\(s\) cannot be split"):
        opened(many[1:3]).split_shuffled(0.5)


def test_a_sequence_that_lost_a_call_continues_from_the_state_in_the_data() -> None:
    data = opened(samples()).pick(np.array([0, 2, 3, 4]))
    assert data.continues.tolist() == [False, False, False, True]


def test_equal_calls_of_different_sequences_are_no_copies_but_equal_sequences_are() -> None:
    one, other = ([{"x": x, "rate": 8} for x in rows] for rows in (X[:3], X[[0, 1, 3]]))
    assert len({bytes(each) for each in opened([one, other]).digests()}) == 6
    assert len({bytes(each) for each in opened([one, one]).digests()}) == 3


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        ([{"x": X[0], "rate": 8}], r"sample 0 .*no array for the state\(s\) \['state'\]"),
        ({"x": X, "rate": RATE}, r"no array for the state\(s\) \['state'\]"),
        ([*samples()[:3], {"x": X[0], "rate": 8}], "sample 3 .*some samples have 'sequence', and some have none"),
        (samples()[:4] + samples()[:1], "sample 4 .*sequence 4 continues after another"),
        ([{"x": X[0], "rate": 8, "sequence": 0.5}], "not a whole number or text"),
        ([{"x": X[0], "rate": 8, "sequence": [1, 2]}], "not a whole number or text"),
        ([{"x": X[0, :1], "rate": 8, "sequence": 1}], r"input 'x' has shape \[-1, 2\]"),
        ([{"rate": 8, "sequence": 1}], r"no array for input\(s\) \['x'\]"),
        ({"x": X[:5], "rate": RATE, "sequence": np.array(SEQUENCES)}, "arrays differ in number of samples"),
    ],
)
def test_data_without_a_clear_sequence_are_rejected(data: Data, cause: str) -> None:
    with pytest.raises(InvalidData, match=cause):
        opened(data)


def test_a_state_with_several_free_axes_must_be_given() -> None:
    wide = Signature((SUMS.inputs[0], TensorSpec("state", FP32, (1, -1, -1)), SUMS.inputs[2]), SUMS.outputs)
    with pytest.raises(InvalidData, match="the first value of state 'state' is unknown"):
        open_data(samples(), wide, hints=HINTS)
    given = [{**one, "state": np.zeros((1, 1, 2), np.float32)} for one in samples()]
    check(open_data(given, wide, hints=HINTS))


def test_a_model_without_states_ignores_the_name() -> None:
    plain = Signature(SUMS.inputs[:1], SUMS.outputs)
    data = open_data({"x": X, "sequence": np.array(SEQUENCES)}, plain, hints=InputHints({}, add))
    assert (data.sequences, data.count, data.stacks) == (None, 6, True)


def test_an_input_of_that_name_is_no_number_of_a_sequence() -> None:
    named = Signature((TensorSpec("sequence", FP32, (-1, 2)), *SUMS.inputs[1:]), SUMS.outputs)
    with pytest.raises(InvalidData, match="no array for the state"):
        open_data([{"sequence": X[0], "rate": 8}], named, hints=HINTS)


def test_lists_of_samples_need_a_model_with_states() -> None:
    plain = Signature(SUMS.inputs[:1], SUMS.outputs)
    with pytest.raises(InvalidData, match="sample 0 of the data is of type list"):
        open_data([[{"x": X[0]}]], plain, hints=InputHints({}, add))
