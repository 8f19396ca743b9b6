"""Crops, padding and letterboxes against the code that people train with."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.image_transforms import center_crop
from transformers.image_utils import ChannelDimension

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.image.geometry import CropImage, Letterbox, PadImage
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels

SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))


def torchvision_center_crop(pixels: Array, size: tuple[int, int]) -> Array:
    """``torchvision.transforms.functional.center_crop``, line by line."""
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1))
    height, width = tensor.shape[1:]
    crop_height, crop_width = size
    if crop_width > width or crop_height > height:
        padding = [
            (crop_width - width) // 2 if crop_width > width else 0,
            (crop_width - width + 1) // 2 if crop_width > width else 0,
            (crop_height - height) // 2 if crop_height > height else 0,
            (crop_height - height + 1) // 2 if crop_height > height else 0,
        ]
        tensor = torch.nn.functional.pad(tensor, padding)
        height, width = tensor.shape[1:]
    top = round((height - crop_height) / 2.0)
    left = round((width - crop_width) / 2.0)
    found: Array = tensor[:, top : top + crop_height, left : left + crop_width].numpy().transpose(1, 2, 0)
    return found


def ultralytics_letterbox(image: Array, new_shape: tuple[int, int], scaleup: bool) -> Array:
    """``LetterBox(auto=False, scale_fill=False, center=True)`` of Ultralytics, line by line."""
    shape = image.shape[:2]
    r = min(new_shape[0] / shape[0], new_shape[1] / shape[1])
    if not scaleup:
        r = min(r, 1.0)
    new_unpad = round(shape[1] * r), round(shape[0] * r)
    dw, dh = new_shape[1] - new_unpad[0], new_shape[0] - new_unpad[1]
    dw /= 2
    dh /= 2
    if shape[::-1] != new_unpad:
        image = cv2.resize(image, new_unpad, interpolation=cv2.INTER_LINEAR)
    top, bottom = round(dh - 0.1), round(dh + 0.1)
    left, right = round(dw - 0.1), round(dw + 0.1)
    return cv2.copyMakeBorder(image, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))


def yolox_preproc(image: Array, size: tuple[int, int]) -> Array:
    """The resizing and padding of YOLOX's ``preproc``, line by line."""
    padded = np.ones((size[0], size[1], 3), dtype=np.uint8) * 114
    r = min(size[0] / image.shape[0], size[1] / image.shape[1])
    scaled = (int(image.shape[1] * r), int(image.shape[0] * r))
    padded[: scaled[1], : scaled[0]] = cv2.resize(image, scaled, interpolation=cv2.INTER_LINEAR)
    return padded


def run(step: Any, pixels: Array) -> Array:
    """The result of a step, whose type must be as checked."""
    given = ValueType(Media.IMAGE, DataType.UINT8, pixels.shape)
    found: Array = step.run({"value": pixels})["value"]
    assert found.dtype == pixels.dtype
    assert found.shape == step.check({"value": given})["value"].shape
    return found


@settings(deadline=None)
@given(pictures(), SIZES)
def test_centre_crops(pixels: Array, size: tuple[int, int]) -> None:
    np.testing.assert_array_equal(run(CropImage(size=size), pixels), torchvision_center_crop(pixels, size))
    wanted = center_crop(pixels, size, input_data_format=ChannelDimension.LAST)
    np.testing.assert_array_equal(run(CropImage(size=size, like="transformers"), pixels), wanted)


def test_crops_at_a_place() -> None:
    pixels = random_pixels(10, 12)
    np.testing.assert_array_equal(run(CropImage(size=(3, 4), at=(7, 8)), pixels), pixels[7:, 8:])
    with pytest.raises(InvalidInput, match=r"a crop of \[3, 4\] at \[8, 8\] is not in a picture of \[10, 12\]"):
        run(CropImage(size=(3, 4), at=(8, 8)), pixels)


@settings(deadline=None)
@given(pictures(), SIZES, st.booleans())
def test_letterbox_equals_ultralytics(pixels: Array, size: tuple[int, int], scale_up: bool) -> None:
    found = run(Letterbox(size=size, scale_up=scale_up), pixels)
    try:
        wanted = ultralytics_letterbox(pixels, size, scale_up)
    except cv2.error:
        return  # a side would be 0
    np.testing.assert_array_equal(found, wanted.reshape(found.shape))


@settings(deadline=None)
@given(pictures((3,)), SIZES)
def test_letterbox_equals_yolox(pixels: Array, size: tuple[int, int]) -> None:
    found = run(Letterbox(size=size, like="yolox"), pixels)
    try:
        wanted = yolox_preproc(pixels, size)
    except cv2.error:
        return  # a side would be 0
    np.testing.assert_array_equal(found, wanted)


def test_a_line_has_a_letterbox() -> None:
    found = run(Letterbox(size=(64, 64)), np.full((1, 5000, 3), 7, np.uint8))
    assert (found == 7).any()
    assert (found == 114).any()


@settings(deadline=None)
@given(pictures(), st.integers(1, 40), st.booleans())
def test_padding_keeps_the_picture(pixels: Array, multiple: int, centred: bool) -> None:
    found = run(PadImage(multiple_of=multiple, centred=centred, value=9), pixels)
    height, width = pixels.shape[:2]
    assert found.shape[0] % multiple == found.shape[1] % multiple == 0
    assert 0 <= found.shape[0] - height < multiple
    top, left = ((found.shape[0] - height) // 2, (found.shape[1] - width) // 2) if centred else (0, 0)
    np.testing.assert_array_equal(found[top : top + height, left : left + width], pixels)
    assert int(found.sum()) == int(pixels.sum()) + 9 * (found.size - pixels.size)


def test_padding_to_a_size() -> None:
    assert run(PadImage(size=(5, 6)), random_pixels(5, 2)).shape == (5, 6, 3)
    with pytest.raises(InvalidInput, match=r"the picture of \[6, 2\] is larger than \[5, 6\]"):
        PadImage(size=(5, 6)).run({"value": random_pixels(6, 2)})
    with pytest.raises(InvalidConfig, match="but the picture is image UINT8"):
        PadImage(size=(5, 6)).check({"value": ValueType(Media.IMAGE, DataType.UINT8, (6, 2, 3))})
    with pytest.raises(InvalidConfig, match="exactly one of"):
        PadImage()
