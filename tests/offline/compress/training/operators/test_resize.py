from __future__ import annotations

import numpy as np
import pytest

from one_node import Const, agree, floats

_X = floats(2, 3, 5, 6)
_COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
_SCALES = [[1, 1, 2, 2], [1, 1, 0.6, 0.5], [1, 1, 1.7, 1], [1, 1, 3, 0.4]]


@pytest.mark.parametrize("coordinates", _COORDINATES)
@pytest.mark.parametrize("scales", _SCALES, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_by_scales(mode: str, scales: list[float], coordinates: str) -> None:
    agree(
        "Resize", _X, None, Const(scales, np.float32), mode=mode, coordinate_transformation_mode=coordinates, opset=13
    )


@pytest.mark.parametrize("coordinates", _COORDINATES)
@pytest.mark.parametrize("sizes", [[2, 3, 10, 12], [2, 3, 3, 9], [2, 3, 1, 1]], ids=str)
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_to_sizes(mode: str, sizes: list[int], coordinates: str) -> None:
    agree("Resize", _X, None, None, Const(sizes), mode=mode, coordinate_transformation_mode=coordinates, opset=13)


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scales", _SCALES, ids=str)
@pytest.mark.parametrize("coordinates", _COORDINATES)
def test_nearest(coordinates: str, scales: list[float], nearest: str) -> None:
    agree(
        "Resize",
        _X,
        None,
        Const(scales, np.float32),
        nearest_mode=nearest,
        coordinate_transformation_mode=coordinates,
        opset=18,
    )


def test_resize_of_some_axes() -> None:
    agree("Resize", _X, None, None, Const([7, 4]), axes=[3, 2], mode="linear", opset=18)


def test_symmetric_half_pixels() -> None:
    agree(
        "Resize", _X, None, Const([1, 1, 1.7, 0.6], np.float32), mode="linear",
        coordinate_transformation_mode="half_pixel_symmetric", opset=19,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", _SCALES[:2], ids=str)
def test_resize_before_it_had_regions(mode: str, scales: list[float]) -> None:
    agree("Resize", _X, Const(scales, np.float32), mode=mode, opset=10)
