"""Interpolation against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.steps.image.interpolate import interpolated
from pictures import random_pixels

SIDES = st.tuples(st.integers(1, 60), st.integers(1, 60))


@settings(deadline=None)
@given(SIDES, SIDES, st.sampled_from(["nearest", "area", "bilinear", "bicubic"]), st.booleans())
def test_numbers_are_those_of_pytorch(old: tuple[int, int], new: tuple[int, int], filter: str, antialias: bool) -> None:
    pixels = random_pixels(*old).astype(np.float32)
    antialias = antialias and filter in ("bilinear", "bicubic")
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
    wanted = torch.nn.functional.interpolate(tensor, new, mode=filter, antialias=antialias)[0].numpy()
    found = interpolated(pixels, *new, filter, antialias=antialias)
    np.testing.assert_allclose(found, wanted.transpose(1, 2, 0), atol=0 if filter == "nearest" else 0.02)


@pytest.mark.parametrize("filter", ["nearest", "area", "bilinear", "bicubic"])
def test_pixels_stay_pixels(filter: str) -> None:
    pixels = np.where(random_pixels(30, 40) > 128, 255, 0).astype(np.uint8)  # bicubic overshoots at these edges
    found = interpolated(pixels, 61, 17, filter, antialias=filter == "bicubic")
    assert found.dtype == np.uint8
    assert found.shape == (61, 17, 3)
    real = interpolated(pixels.astype(np.float32), 61, 17, filter, antialias=filter == "bicubic")
    np.testing.assert_array_equal(found, np.rint(real).clip(0, 255))


@pytest.mark.parametrize("value", [255.7, 0.1])
def test_the_mean_of_many_equal_pixels_is_the_pixel(value: float) -> None:
    pixels = np.full((3000, 2000, 1), value, np.float32)
    np.testing.assert_allclose(interpolated(pixels, 1, 1, "area", antialias=True), pixels[:1, :1], rtol=1e-6)


@pytest.mark.parametrize("new", [(1, 7), (13, 2), (33, 500), (500, 33)])
@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "area"])
def test_extreme_sizes_are_those_of_pytorch(new: tuple[int, int], filter: str) -> None:
    for old in ((1, 301), (257, 1), (257, 301)):  # to width 1, PyTorch 2.13 repeats the first row
        pixels = random_pixels(*old).astype(np.float32)
        tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
        wanted = torch.nn.functional.interpolate(tensor, new, mode=filter, antialias=filter != "area")[0].numpy()
        found = interpolated(pixels, *new, filter, antialias=True)
        assert found.flags.c_contiguous
        np.testing.assert_allclose(found, wanted.transpose(1, 2, 0), atol=0.02)
