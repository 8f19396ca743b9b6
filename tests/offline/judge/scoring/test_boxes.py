from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.offline.judge.scoring.boxes import iou, mean_average_precision

TRUTH = np.float32(
    [[[0, 0, 10, 10, 0], [20, 20, 40, 40, 1], [0, 0, 0, 0, -1]], [[5, 5, 15, 25, 0], [0] * 4 + [-1], [0] * 4 + [-1]]]
)


def scored(truth: np.ndarray, score: float = 0.9) -> np.ndarray:
    return np.insert(truth, 4, score, axis=2)


def test_the_truth_itself_is_perfect() -> None:
    assert mean_average_precision(scored(TRUTH), TRUTH) == 1


def test_each_error_costs_what_it_should() -> None:
    missed = scored(TRUTH)
    missed[0, 1, 5] = -1
    assert mean_average_precision(missed, TRUTH) == pytest.approx(0.5)  # class 1 has no box
    wrong = scored(TRUTH)
    wrong[1, 1] = [50, 50, 60, 60, 0.99, 0]  # a false box with the highest score: precision 1/2, then 2/3
    assert mean_average_precision(wrong, TRUTH) == pytest.approx((2 / 3 + 1) / 2)
    shifted = scored(TRUTH)
    shifted[0, 0, :4] = [0, 0, 10, 7.2]  # an overlap of 0.72 counts at 0.50, 0.55, …, 0.70
    # Where it does not match, one of two boxes is found at full precision or after it: ties by order.
    assert 0.75 - 1e-6 <= mean_average_precision(shifted, TRUTH) < 1
    twice = scored(TRUTH)
    twice[0, 2] = [0, 0, 10, 10, 0.1, 0]  # a second box on the same place, after all others
    assert mean_average_precision(twice, TRUTH) == 1


def test_no_boxes_are_an_error() -> None:
    with pytest.raises(InvalidData, match="have no boxes"):
        mean_average_precision(scored(TRUTH), np.full_like(TRUTH, -1))


def test_the_overlap_of_segments() -> None:
    truth = np.array([[[0, 0], [1, 1]]])
    found = np.array([[[0, 1], [1, 1]]])
    assert iou(found, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    scores = np.moveaxis(np.eye(2, dtype=np.float32)[found], -1, 1)
    assert iou(scores, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert iou(found, np.array([[[0, -1], [1, 1]]])) == 1
