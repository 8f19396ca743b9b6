from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidData
from penstock.offline.judge.scoring import boxes as boxes_module
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


def one_by_one(output: np.ndarray, truth: np.ndarray) -> float:
    """The definition: class by class, overlap by overlap, box by box. Boxes without area are left out."""
    shares = []
    boxes = truth.reshape(-1, 5).astype(np.float64)
    for number in {box[4] for box in boxes if box[4] >= 0 and overlap(box, box)}:
        for least in np.arange(0.5, 1, 0.05):
            found, total = [], 0
            for row, known in zip(output.astype(np.float64), truth.astype(np.float64), strict=True):
                left = [box[:4] for box in known if box[4] == number and overlap(box, box)]
                total += len(left)
                for box in sorted(
                    (box for box in row if box[5] == number and overlap(box, box)), key=lambda box: -box[4]
                ):
                    best = max(range(len(left)), key=lambda at: overlap(box, left[at]), default=None)
                    hit = best is not None and overlap(box, left[best]) >= least - 1e-9
                    if hit:
                        left.pop(best)
                    found.append((-box[4], hit))
            hits = np.array([hit for _, hit in sorted(found, key=lambda one: one[0])], float)
            precision = hits.cumsum() / np.arange(1, len(hits) + 1)
            best_after = [precision[at:].max() for at in range(len(hits))]
            shares.append(float(hits @ best_after) / total if len(hits) else 0.0)
    return float(np.mean(shares))


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    common = np.clip(np.minimum(one[2:4], other[2:4]) - np.maximum(one[:2], other[:2]), 0, None).prod()
    areas = sum(np.clip(box[2:4] - box[:2], 0, None).prod() for box in (one, other))
    return float(common / (areas - common)) if areas > common else 0.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 40), st.integers(0, 12), st.integers(1, 6))
def test_it_is_the_definition_on_any_boxes(seed: int, samples: int, boxes: int, known: int) -> None:
    rng = np.random.default_rng(seed)
    truth = np.concatenate([rng.integers(0, 4, (samples, known, 2)), rng.integers(2, 8, (samples, known, 2))], 2)
    truth = np.concatenate([truth, rng.integers(-1, 3, (samples, known, 1))], 2).astype(np.float32)
    truth[0, 0] = [1, 1, 4, 4, 1]
    output = scored(truth[:, rng.integers(0, known, boxes)])
    output[..., :4] += rng.integers(-1, 2, output[..., :4].shape)
    output[..., 4] = rng.integers(0, 5, output.shape[:2]) / 4  # with ties
    assert mean_average_precision(output, truth) == pytest.approx(one_by_one(output, truth))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 20), st.integers(1, 8))
def test_a_detector_is_perfect_against_itself_whatever_pads_its_boxes(seed: int, samples: int, boxes: int) -> None:
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 6, (samples, boxes, 2))
    truth = np.concatenate([corners, corners + rng.integers(-1, 3, (samples, boxes, 2))], 2)  # many without area
    truth = np.concatenate([truth, rng.integers(-1, 3, (samples, boxes, 1))], 2).astype(np.float32)
    truth[0, 0] = [0, 0, 2, 2, 1]
    output = np.insert(truth, 4, rng.random((samples, boxes)), axis=2)
    assert mean_average_precision(output, truth) == 1
    padding = np.zeros_like(output[:, :1])
    padding[..., 4] = 1.0  # the highest score
    assert mean_average_precision(np.concatenate([padding, output], axis=1), truth) == 1
    assert mean_average_precision(output, np.concatenate([padding[..., [0, 1, 2, 3, 5]], truth], axis=1)) == 1


def random_boxes(samples: int, boxes: int, size: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    corner = rng.random((samples, boxes, 2))
    far = corner + size * (0.5 + rng.random((samples, boxes, 2)))
    score, number = rng.random((samples, boxes, 1)), rng.integers(0, 3, (samples, boxes, 1))
    return np.concatenate([corner, far, score, number], axis=2)


def test_many_boxes_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    output = random_boxes(3, 40, 0.5)
    truth = np.delete(random_boxes(3, 60, 0.5)[:, ::2], 4, axis=2)
    whole = mean_average_precision(output, truth)
    monkeypatch.setattr(boxes_module, "_PAIRS", 700)
    assert 0 < whole < 1
    assert mean_average_precision(output, truth) == whole


def test_the_memory_of_many_boxes_is_limited() -> None:
    """All overlaps at once would take 256 MiB, and several times as much on the way."""
    output = random_boxes(2, 2896, 1e-4)
    tracemalloc.start()
    try:
        assert mean_average_precision(output, np.delete(output, 4, axis=2)) == 1
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_no_boxes_are_an_error() -> None:
    with pytest.raises(InvalidData, match="have no boxes"):
        mean_average_precision(scored(TRUTH), np.full_like(TRUTH, -1))
    with pytest.raises(InvalidData, match="have no boxes") as error:
        mean_average_precision(scored(TRUTH), np.zeros_like(TRUTH))
    assert "right above left" in (error.value.hint or "")


def test_every_position_may_have_its_own_number() -> None:
    """Comparing every position with every class would take hours."""
    truth = (1 << 40) + np.arange(400_000).reshape(4, -1)
    assert iou(truth, truth) == 1
    assert iou(np.where(np.arange(4)[:, None] < 2, truth, -1), truth) == pytest.approx(0.5, abs=1e-5)


def test_the_overlap_of_segments() -> None:
    truth = np.array([[[0, 0], [1, 1]]])
    found = np.array([[[0, 1], [1, 1]]])
    assert iou(found, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    scores = np.moveaxis(np.eye(2, dtype=np.float32)[found], -1, 1)
    assert iou(scores, truth) == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert iou(found, np.array([[[0, -1], [1, 1]]])) == 1
