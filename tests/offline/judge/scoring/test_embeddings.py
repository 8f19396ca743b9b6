from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from penstock.offline.judge.scoring.embeddings import cosine, rank

A = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
B = (A + np.random.default_rng(1).normal(0, 0.5, A.shape)).astype(np.float32)


def test_the_cosine_of_each_row() -> None:
    want = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(A, B, strict=True)]
    np.testing.assert_allclose(cosine(B, A), want, rtol=1e-5)
    np.testing.assert_allclose(cosine(3 * A, A), 1)
    np.testing.assert_array_equal(cosine(np.zeros_like(A), A), 0)


def test_rank_agreement_is_spearmans_of_the_similarities() -> None:
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (A.astype(float), B.astype(float)))
    want = np.mean([stats.spearmanr(p, q).statistic for p, q in zip(a @ a.T, b @ b.T, strict=True)])
    assert rank(B, A) == pytest.approx(want)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(16, 16)))
    assert rank(A @ turn, A) > 0.999
