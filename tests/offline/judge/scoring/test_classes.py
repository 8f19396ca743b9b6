from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.offline.judge.scoring.classes import auc, average_precision, classes_of, cut_of, f1, hits, top_5

RNG = np.random.default_rng
SEEDS = pytest.mark.parametrize("seed", range(5))


def case(seed: int, classes: int = 7, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    labels = RNG(seed).integers(0, classes, count)
    # Rounded, so that scores tie.
    scores = (RNG(seed + 1).normal(size=(count, classes)) + 1.5 * np.eye(classes)[labels]).round(1)
    return scores.astype(np.float32), labels


def test_f1_of_large_class_numbers_needs_no_table_of_all_numbers() -> None:
    names = np.array([0, 3, 1 << 62, -5])
    found, truth = RNG(0).integers(0, 4, (2, 50))
    assert f1(names[found], names[truth]) == f1(found, truth)


@SEEDS
def test_as_in_scikit_learn(seed: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = case(seed)
    found = scores.argmax(axis=1)
    assert hits(scores, labels).mean() == pytest.approx(metrics.accuracy_score(labels, found))
    assert hits(found, labels).mean() == pytest.approx(metrics.accuracy_score(labels, found))
    assert f1(scores, labels) == pytest.approx(metrics.f1_score(labels, found, average="macro"))
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    by_class = [metrics.roc_auc_score(labels == one, shares[:, one]) for one in range(7)]
    assert auc(shares, labels) == pytest.approx(np.mean(by_class))
    by_class = [metrics.average_precision_score(labels == one, scores[:, one]) for one in range(7)]
    assert average_precision(scores, labels) == pytest.approx(np.mean(by_class))
    binary = labels % 2
    for output in (scores[:, 0], scores[:, :1], np.stack([-scores[:, 0], scores[:, 0]], 1)):
        assert auc(output, binary) == pytest.approx(metrics.roc_auc_score(binary, scores[:, 0]))
        assert average_precision(output, binary) == pytest.approx(metrics.average_precision_score(binary, scores[:, 0]))
    many = (scores + RNG(9).normal(size=scores.shape) > 0).astype(int)
    assert auc(scores, many) == pytest.approx(metrics.roc_auc_score(many, scores, average="macro"))


def test_top_5_by_hand() -> None:
    scores = np.arange(10, dtype=np.float32)[None].repeat(3, 0)
    np.testing.assert_array_equal(top_5(scores, np.array([9, 5, 4])), [1, 1, 0])
    np.testing.assert_array_equal(top_5(np.zeros((2, 10), np.float32), np.array([0, 9])), [0, 0])


def test_auc_by_hand() -> None:
    # Three of four pairs in order, one of them a tie that counts half.
    assert auc(np.float32([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])) == pytest.approx(3.5 / 4)


def test_a_single_score_is_a_probability_or_a_logit() -> None:
    for scores in (np.float32([0.4, 0.6]), np.float32([[-2.0], [0.2]])):
        np.testing.assert_array_equal(classes_of(scores, cut_of(scores))[:, 0], [0, 1])


def test_the_cut_is_given_whatever_the_scores_are() -> None:
    scores, labels = np.float32([0.1, 0.3, 0.9, 1.2]), np.array([0, 0, 1, 1])
    for kept in (scores, scores[:3], scores[:2]):
        assert hits(kept, labels[: len(kept)], 0.5).all()
        assert not hits(kept, labels[: len(kept)], 0.0)[:2].any()
    assert f1(scores, labels, 0.5) == 1 > f1(scores, labels, 0.0)


def test_nan_is_a_miss_even_where_it_would_be_picked() -> None:
    np.testing.assert_array_equal(hits(np.float32([[np.nan, 1], [1, 0]]), np.array([0, 0])), [0, 1])


def test_dense_classes_count_by_their_share() -> None:
    scores = np.moveaxis(np.eye(3, dtype=np.float32)[np.array([[[0, 1], [2, 2]]])], -1, 1)
    np.testing.assert_allclose(hits(scores, np.array([[[0, 1], [2, 0]]])), [0.75])


def test_one_class_cannot_be_ranked() -> None:
    with pytest.raises(InvalidData, match="all labels are of one class"):
        auc(np.float32([0.1, 0.2]), np.array([1, 1]))


@pytest.mark.parametrize("kind", ["U", "S", "object"])
def test_text_is_compared_as_bytes(kind: str) -> None:
    output = np.array(["é", "b", "b"], object)
    encoded = np.array([one.encode() for one in output], object)
    labels = {"U": output.astype(str), "S": encoded.astype("S"), "object": output}[kind]
    assert hits(encoded, np.roll(labels, 1)).tolist() == [0, 0, 1]
    assert hits(output, labels).tolist() == hits(encoded, labels[:, None]).tolist() == [1, 1, 1]
