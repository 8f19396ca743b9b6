"""Normalise and layout against torchvision and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from transformers.image_transforms import normalize, rescale

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.channels import Colour
from penstock.pipeline.steps.image.normalise import ImageLayout, Normalise
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures, random_pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RGB = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")


def run(step: Step, pixels: Array) -> Array:
    """The result of a step."""
    found: Array = step.run({"value": pixels})["value"]
    return found


@settings(deadline=None)
@given(pictures((3,)))
def test_normalise_and_layout_equal_torchvision_and_transformers(pixels: Array) -> None:
    found = run(ImageLayout(), run(Normalise(mean=MEAN, std=STD), pixels))
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(torch.float32).div(255)  # ToTensor, then Normalize
    mean, std = torch.tensor(MEAN).view(-1, 1, 1), torch.tensor(STD).view(-1, 1, 1)
    np.testing.assert_array_equal(found, tensor.sub_(mean).div_(std).numpy())
    processed = normalize(rescale(pixels, 1 / 255), MEAN, STD, input_data_format="channels_last")
    np.testing.assert_array_equal(found, processed.transpose(2, 0, 1))
    assert found.flags.c_contiguous


def test_numbers_are_normalised_as_pixels_are() -> None:
    pixels = random_pixels(9, 8)
    step = Normalise(mean=MEAN, std=STD)
    np.testing.assert_array_equal(run(step, pixels), run(step, pixels.astype(np.float32)))


@pytest.mark.parametrize(
    "options",
    [
        {"std": (0.0,)},
        {"std": (1e-60,)},
        {"mean": (float("nan"),)},
        {"mean": ()},
        {"std": ()},
        {"mean": (1, 2), "std": (1, 2, 3)},
    ],
)
def test_wrong_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="step 'normalise'"):
        Normalise(**options)


def test_wrong_channels() -> None:
    with pytest.raises(InvalidConfig, match="numbers for 2 channels"):
        Normalise(mean=(1, 2)).check({"value": RGB})
    with pytest.raises(InvalidInput, match="3 channels, but 'normalise' has numbers for 2"):
        run(Normalise(mean=(1, 2)), random_pixels(2, 2))
    with pytest.raises(InvalidConfig, match="'source: bgr', but the picture has rgb"):
        Colour(source="bgr", to="grey").check({"value": RGB})
    with pytest.raises(InvalidConfig, match="UINT8 only"):
        Colour(source="rgb", to="grey").check(Normalise().check({"value": RGB}))
    with pytest.raises(InvalidInput, match=r"1 channels, not 3 \(rgb\)"):
        run(Colour(source="rgb", to="grey"), random_pixels(2, 2, 1))
