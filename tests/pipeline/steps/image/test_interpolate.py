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
