"""Regions of text in probability maps."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.boxes.contours import ContourBoxes
from penstock.pipeline.value import ValueType
from penstock.tensor import Array

QUADS = ValueType(shape=(-1, 4, 2))


def rectangle(
    centre: tuple[float, float], size: tuple[float, float], angle: float, shape: tuple[int, int] = (120, 160)
) -> Array:
    """A probability map with a rectangle of 0.9."""
    chart = np.zeros(shape, np.float32)
    cv2.fillPoly(chart, [np.round(cv2.boxPoints((centre, size, angle))).astype(np.int32)], [0.9])
    return chart


@settings(deadline=None)
@given(st.integers(-40, 40), st.integers(24, 50), st.integers(8, 16))
def test_a_rectangle_is_found_and_enlarged(angle: int, width: int, height: int) -> None:
    chart = rectangle((80, 60), (width, height), angle)
    found = ContourBoxes(unclip=1.5).run({"value": chart})
    assert found["boxes"].shape == (1, 4, 2)
    assert found["scores"][0] > 0.7
    contours, _ = cv2.findContours((chart > 0.3).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    short, long = sorted(cv2.minAreaRect(contours[0])[1])
    distance = long * short * 1.5 / (2 * (long + short))
    sides = np.linalg.norm(found["boxes"][0] - np.roll(found["boxes"][0], -1, 0), axis=1)
    np.testing.assert_allclose(sides, [long + 2 * distance, short + 2 * distance] * 2, atol=0.01)
    np.testing.assert_allclose(found["boxes"][0].mean(0), (80, 60), atol=1.5)
    assert found["boxes"][0].sum(1).argmin() == 0, "the first corner is the top left"


def test_regions_are_in_reading_order_and_filtered() -> None:
    chart = np.zeros((60, 100), np.float32)
    chart[40:50, 10:40] = chart[5:15, 60:90] = chart[5:15, 5:35] = 0.8
    chart[25:35, 10:40] = 0.4  # under box_threshold
    chart[20, 50] = 1  # too small
    found = ContourBoxes().run({"value": chart[None]})
    assert [box[0].tolist() < [40, 60] for box in found["boxes"]] == [True, False, True]
    np.testing.assert_allclose(found["scores"], [0.8] * 3, atol=0.05)
    assert found["boxes"][2][:, 1].min() > 30


@pytest.mark.parametrize(
    "chart", [np.zeros((1, 1)), np.ones((1, 1)), np.ones((2, 500)), np.zeros((30, 30)), np.ones((40, 40))]
)
def test_every_map_has_a_result(chart: Array) -> None:
    found = ContourBoxes().run({"value": chart.astype(np.float32)})
    assert found["boxes"].shape == (len(found["scores"]), 4, 2)
    assert len(found["boxes"]) == (chart.shape == (40, 40))


def test_a_map_needs_two_dimensions() -> None:
    assert ContourBoxes().check({"value": ValueType(shape=(1, -1, -1))})["boxes"] == QUADS
    with pytest.raises(InvalidConfig, match=r"\[height, width\]"):
        ContourBoxes().check({"value": ValueType(shape=(2, -1, -1))})
    with pytest.raises(InvalidInput, match="NaN"):
        ContourBoxes().run({"value": np.full((3, 3), np.nan, np.float32)})
    with pytest.raises(InvalidInput, match=r"not \[height, width\]"):
        ContourBoxes().run({"value": np.zeros((0, 3), np.float32)})


@pytest.mark.parametrize(("rows", "count"), [(3, 0), (4, 1)])
def test_regions_of_three_rows_are_noise(rows: int, count: int) -> None:
    chart = np.zeros((60, 120), np.float32)
    chart[20 : 20 + rows, 20:80] = 1  # from the first row's centre to that of the last, a rectangle is one pixel less
    assert len(ContourBoxes().run({"value": chart})["boxes"]) == count
