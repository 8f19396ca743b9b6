"""Resizing against Pillow, OpenCV and PyTorch."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.image.resize import Resize
from penstock.pipeline.value import TEXT, Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels

FILTERS = ["nearest", "bilinear", "bicubic", "lanczos", "area"]
PILLOW = dict(
    zip(
        FILTERS,
        [
            Image.Resampling.NEAREST,
            Image.Resampling.BILINEAR,
            Image.Resampling.BICUBIC,
            Image.Resampling.LANCZOS,
            Image.Resampling.BOX,
        ],
        strict=True,
    )
)
OPENCV = dict(
    zip(
        FILTERS,
        [cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_CUBIC, cv2.INTER_LANCZOS4, cv2.INTER_AREA],
        strict=True,
    )
)
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))


def resized(pixels: Array, **options: Any) -> Array:
    """The result of the step."""
    found: Array = Resize(**options).run({"value": pixels})["value"]
    assert found.dtype == pixels.dtype
    assert found.flags.c_contiguous
    return found


@settings(deadline=None)
@given(pictures(), SIZES, st.sampled_from(FILTERS))
def test_like_pillow(pixels: Array, size: tuple[int, int], filter: str) -> None:
    picture = Image.fromarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)
    wanted = np.asarray(picture.resize(size[::-1], PILLOW[filter])).reshape(*size, -1)
    np.testing.assert_array_equal(resized(pixels, size=size, filter=filter), wanted)


@settings(deadline=None)
@given(pictures((1, 3, 4)), SIZES, st.sampled_from(FILTERS), st.sampled_from([np.uint8, np.float32]))
def test_like_opencv(pixels: Array, size: tuple[int, int], filter: str, dtype: type) -> None:
    pixels = pixels.astype(dtype)
    wanted = cv2.resize(pixels, size[::-1], interpolation=OPENCV[filter]).reshape(*size, -1)
    np.testing.assert_array_equal(resized(pixels, size=size, filter=filter, like="opencv"), wanted)


@settings(deadline=None)
@given(pictures((1, 3, 4)), SIZES, st.sampled_from(["nearest", "bilinear", "bicubic", "area"]), st.booleans())
def test_like_torch(pixels: Array, size: tuple[int, int], filter: str, antialias: bool) -> None:
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32))[None]
    extra = {"antialias": antialias} if filter.startswith("bi") else {}
    wanted = torch.nn.functional.interpolate(tensor, size=size, mode=filter, **extra)[0].numpy().transpose(1, 2, 0)
    options = {"size": size, "filter": filter, "like": "torch", "antialias": antialias}
    tolerance = 255 * (2e-5 + 2e-7 * max(*pixels.shape[:2], *size))
    np.testing.assert_allclose(resized(pixels.astype(np.float32), **options), wanted, rtol=0, atol=tolerance)
    rounded = resized(pixels, **options)
    np.testing.assert_allclose(rounded, np.rint(wanted).clip(0, 255), atol=1)
    assert (rounded != np.rint(wanted).clip(0, 255)).mean() < 0.05 or rounded.size < 200


@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_large_pictures_like_torch(filter: str, antialias: bool) -> None:
    edges = np.where(random_pixels(2300, 70, 3) > 127, 255, 0).astype(np.uint8)
    for pixels, size in ((edges, (1190, 65)), (np.ascontiguousarray(edges.swapaxes(0, 1)), (65, 1190))):
        options: dict[str, Any] = {"size": size, "filter": filter, "like": "torch", "antialias": antialias}

        def wanted(pixels: Array, size: tuple[int, int] = size) -> Array:
            tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]
            resize = torch.nn.functional.interpolate(tensor, size=size, mode=filter, antialias=antialias)
            found: Array = resize[0].numpy().transpose(1, 2, 0)
            return found

        real = wanted(pixels.astype(np.float32))
        tolerance = np.abs(real).max() * (2e-5 + 2e-7 * max(pixels.shape))
        np.testing.assert_allclose(resized(pixels.astype(np.float32), **options), real, rtol=0, atol=tolerance)
        if filter == "bilinear":
            difference = resized(pixels, **options).astype(int) - wanted(pixels)
            assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("filter", FILTERS)
def test_fp32_like_pillow_is_mode_f(filter: str) -> None:
    pixels = random_pixels(30, 41, 3).astype(np.float32)
    found = resized(pixels, size=(17, 50), filter=filter)
    for channel in range(3):
        wanted = np.asarray(Image.fromarray(pixels[..., channel].copy()).resize((50, 17), PILLOW[filter]))
        np.testing.assert_array_equal(found[..., channel], wanted)


@pytest.mark.parametrize(
    ("options", "shape", "wanted"),
    [
        ({"shortest": 256}, (480, 641), (256, 341)),
        ({"shortest": 256}, (641, 480), (341, 256)),
        ({"shortest": 7}, (5, 5), (7, 7)),
        ({"longest": 100}, (480, 641), (74, 100)),
        ({"longest": 10}, (1, 10_000), (1, 10)),
        ({"size": (3, 4)}, (10, 10), (3, 4)),
    ],
)
def test_sizes(options: dict[str, Any], shape: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert resized(random_pixels(*shape, 1), **options).shape[:2] == wanted
    given = ValueType(Media.IMAGE, DataType.UINT8, (*shape, 1), colour="grey")
    assert Resize(**options).check({"value": given})["value"].shape == (*wanted, 1)


def test_unknown_sizes_stay_unknown() -> None:
    given = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")
    assert Resize(shortest=5).check({"value": given})["value"].shape == (-1, -1, 3)
    assert Resize(size=(5, 6)).check({"value": given})["value"].shape == (5, 6, 3)


def test_a_long_picture_does_not_exhaust_the_memory() -> None:
    with pytest.raises(InvalidInput, match="too large"):
        resized(np.zeros((1, 1_000_000, 3), np.uint8), shortest=640)


def test_wrong_options_and_types() -> None:
    with pytest.raises(InvalidConfig, match="exactly one of"):
        Resize()
    with pytest.raises(InvalidConfig, match="exactly one of"):
        Resize(size=(1, 2), longest=3)
    with pytest.raises(InvalidConfig, match="no filter 'lanczos'"):
        Resize(size=(1, 2), filter="lanczos", like="torch")
    with pytest.raises(InvalidConfig, match="needs a picture"):
        Resize(size=(1, 2)).check({"value": TEXT})
    for pixels in (np.zeros((2, 2), np.uint8), np.zeros((0, 2, 3), np.uint8)):
        with pytest.raises(InvalidInput, match=r"not \[height, width, channels\]"):
            resized(pixels, size=(1, 1))
