"""The harm done to answers: of scores their angle, of the rest their relative error."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.offline.compress.ptq.ranges.harm import output_harm


def test_harm_of_scores_is_their_angle_and_of_the_rest_their_error() -> None:
    scores = np.float32([[3, 1, 2], [0, 5, 1]])
    assert output_harm({"y": scores}, {"y": 7 * scores + 2}) == pytest.approx(0, abs=1e-9)
    assert output_harm({"y": scores}, {"y": scores[:, ::-1].copy()}) > 0.1
    assert output_harm({"y": scores}, {"y": np.full_like(scores, np.nan)}) == 1
    two = scores[:, :2]
    assert output_harm({"y": two}, {"y": 1.1 * two}) == pytest.approx(0.1, rel=1e-5)
    assert output_harm({"y": scores, "z": two}, {"y": scores, "z": 1.1 * two}) == pytest.approx(0.1, rel=1e-5)
