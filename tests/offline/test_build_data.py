from __future__ import annotations

import numpy as np
import pytest

import models
from penstock.errors import InvalidArgument, InvalidData
from penstock.offline.build_data import read_data
from penstock.offline.judge.contract import Contract

X = {"x": np.arange(60, dtype=np.float32).reshape(20, 3)}


def test_without_evaluation_data_a_fifth_of_the_calibration_data_is_held_out() -> None:
    calibration, evaluation = read_data(models.linear(3, 2), X, None, Contract())
    assert calibration is not None
    assert (calibration.count, evaluation.count) == (16, 4)
    rows = np.concatenate([calibration.inputs["x"], evaluation.inputs["x"]])
    assert {tuple(row) for row in rows} == {tuple(row) for row in X["x"]}


def test_evaluation_data_alone_are_enough() -> None:
    calibration, evaluation = read_data(models.linear(3, 2), None, X, Contract())
    assert (calibration, evaluation.count) == (None, 20)


def test_without_any_data_the_error_names_the_options() -> None:
    with pytest.raises(InvalidData) as raised:
        read_data(models.linear(3, 2), None, None, Contract())
    assert all(option in raised.value.hint for option in ("--evaluate", "--calibrate", "--synthetic"))


def test_synthetic_data_replace_no_data_of_the_user() -> None:
    with pytest.raises(InvalidArgument):
        read_data(models.linear(3, 2), X, None, Contract(), synthetic=16)
    calibration, evaluation = read_data(models.linear(3, 2), None, None, Contract(), synthetic=16)
    assert calibration is not None
    assert (calibration.count, evaluation.count) == (16, 16)


def test_copies_prove_nothing() -> None:
    again = {"x": np.concatenate([X["x"], X["x"]])}
    read_data(models.linear(3, 2), None, again, Contract())
    with pytest.raises(InvalidData, match="20 of 40 evaluation rows are copies"):
        read_data(models.linear(3, 2), None, again, Contract(prove_accuracy=True))
