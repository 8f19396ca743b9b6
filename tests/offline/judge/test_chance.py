from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.offline.judge.chance import check_labels

RNG = np.random.default_rng


def accuracy_on(answers: np.ndarray):
    return lambda labels: float((answers == labels).mean())


def test_labels_that_the_original_predicts_pass() -> None:
    for seed in range(20):
        labels = RNG(seed).integers(0, 10, 100)
        answers = np.where(RNG(seed + 100).random(100) < 0.5, labels, 0)
        check_labels("top-1", accuracy_on(answers), labels, higher=True)


def test_permuted_labels_pass_in_at_most_a_twentieth() -> None:
    refused = 0
    for seed in range(200):
        answers = RNG(seed).integers(0, 5, 300)
        try:
            check_labels("top-1", accuracy_on(answers), RNG(seed + 1000).permutation(answers), higher=True)
        except InvalidData:
            refused += 1
    assert refused / 200 >= 0.95 - 3 * (0.05 * 0.95 / 200) ** 0.5


def test_the_error_gives_both_figures_and_the_way_out() -> None:
    answers = RNG(0).integers(0, 5, 300)
    with pytest.raises(
        InvalidData, match=r"no better than chance on the labels: its top-1 is 0\.\d+, and 0\.\d+ on"
    ) as error:
        check_labels("top-1", accuracy_on(answers), RNG(1).permutation(answers), higher=True)
    assert "--trust-labels" in (error.value.hint or "")


def test_a_model_that_always_answers_the_most_frequent_class_is_no_better_than_chance() -> None:
    labels = (np.arange(200) % 10 == 0).astype(int)
    with pytest.raises(InvalidData, match="no better than chance"):
        check_labels("top-1", accuracy_on(np.zeros(200, int)), labels, higher=True)


def test_for_an_error_lower_is_better() -> None:
    target = RNG(0).normal(size=100)

    def error(labels: np.ndarray) -> float:
        return float(np.abs(target - labels).mean())

    check_labels("mae", error, target + 0.1, higher=False)
    with pytest.raises(InvalidData, match="its mae is"):
        check_labels("mae", error, RNG(1).permutation(target), higher=False)


def test_labels_of_one_class_show_nothing() -> None:
    with pytest.raises(InvalidData, match="all 30 labels are the same"):
        check_labels("top-1", accuracy_on(np.ones(30, int)), np.ones(30, int), higher=True)


def test_few_labels_are_not_tested() -> None:
    check_labels("top-1", accuracy_on(np.zeros(19, int)), np.arange(19), higher=True)


@pytest.mark.parametrize("higher", [True, False])
def test_one_of_39_shuffles_may_be_as_good_but_not_two(higher: bool) -> None:
    labels, sign = np.arange(20), 1 if higher else -1

    def value(as_good: int) -> Callable[[np.ndarray], float]:
        found = iter([0.5, *[0.5] * as_good, *[0.5 - sign * 0.1] * 39])
        return lambda labels: next(found)

    check_labels("any", value(1), labels, higher)
    with pytest.raises(InvalidData, match="its any is 0.5, and 0"):
        check_labels("any", value(2), labels, higher)


def test_one_label_cannot_differ_from_others() -> None:
    check_labels("top-1", accuracy_on(np.ones(1, int)), np.ones(1, int), higher=True)
    with pytest.raises(InvalidData, match="all 2 labels are the same"):
        check_labels("top-1", accuracy_on(np.ones(2, int)), np.ones(2, int), higher=True)
    rows = np.array([[0, 1], [0, 2], [0, 1]])
    check_labels("top-1", lambda labels: 1.0, rows, higher=True)


def test_labels_are_shuffled_as_rows() -> None:
    rows, seen = np.arange(60).reshape(30, 2), []
    check_labels("any", lambda labels: float(seen.append(labels) or labels is rows), rows, higher=True)
    assert all({tuple(row) for row in labels} == {tuple(row) for row in rows} for labels in seen)
    assert sum(np.array_equal(labels, rows) for labels in seen) == 1
