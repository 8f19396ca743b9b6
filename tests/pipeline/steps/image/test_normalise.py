"""Colour, normalise, layout, and their fusion."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_transforms import normalize, rescale

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.channels import Colour
from penstock.pipeline.steps.image.fuse import NormalisePlanes, fuse
from penstock.pipeline.steps.image.geometry import CropImage, Letterbox, PadImage
from penstock.pipeline.steps.image.normalise import ImageLayout, Normalise
from penstock.pipeline.steps.image.resize import Resize
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


@settings(deadline=None)
@given(pictures((1, 3, 4)), st.sampled_from(["rgb", "bgr", "grey"]))
def test_colours_equal_both_libraries(pixels: Array, to: Any) -> None:
    source: Any = {1: "grey", 3: "rgb", 4: "rgba"}[pixels.shape[2]]
    mode = "L" if to == "grey" else "RGB"
    wanted = np.asarray(Image.fromarray(pixels.squeeze(-1) if source == "grey" else pixels).convert(mode))
    wanted = wanted[..., ::-1] if to == "bgr" else wanted.reshape(*pixels.shape[:2], -1)
    np.testing.assert_array_equal(run(Colour(source=source, to=to), pixels), wanted)
    if source == "rgb" and to == "grey":
        found = run(Colour(source=source, to=to, like="opencv"), pixels)[..., 0]
        np.testing.assert_array_equal(found, cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY))
        swapped = Colour(source="bgr", to="grey")
        np.testing.assert_array_equal(run(swapped, pixels[..., ::-1]), wanted)


def some_steps() -> st.SearchStrategy[list[Step]]:
    """Chains of steps on pictures, in all orders that fit together."""
    sides = st.tuples(st.integers(1, 30), st.integers(1, 30))
    geometry: st.SearchStrategy[Step] = st.one_of(
        sides.map(lambda size: Resize(size=size)),
        sides.map(lambda size: CropImage(size=size)),
        sides.map(lambda size: Letterbox(size=size)),
        st.integers(1, 9).map(lambda number: PadImage(multiple_of=number)),
    )
    swap: st.SearchStrategy[Step] = st.sampled_from(
        [Colour(source="rgb", to="bgr"), Colour(source="bgr", to="rgb"), Colour(source="rgb", to="grey")]
    )
    numbers: st.SearchStrategy[Step] = st.sampled_from(
        [Normalise(), Normalise(scale=1, mean=(3.0,), std=(2.0,)), Normalise(mean=(0.1, 0.2, 0.3))]
    )
    last: st.SearchStrategy[Step] = st.sampled_from([ImageLayout(), ImageLayout(order="hwc")])
    chain = st.tuples(
        st.lists(geometry, max_size=2),
        st.lists(swap, max_size=1),
        st.lists(numbers, max_size=2),
        st.lists(last, max_size=1),
    )
    return chain.map(lambda parts: [step for part in parts for step in part]).filter(bool)


@settings(deadline=None)
@given(some_steps(), pictures((3,), 30))
def test_fused_steps_return_the_same(steps: list[Step], pixels: Array) -> None:
    def separately() -> Array:
        value = pixels
        for step in steps:
            value = run(step, value)
        return value

    try:
        wanted = separately()
    except InvalidInput:
        with pytest.raises(InvalidInput):
            run(fuse(steps), pixels)
        return
    found = run(fuse(steps), pixels)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(found, wanted)


def test_what_is_fused() -> None:
    swap = Colour(source="bgr", to="rgb")
    assert isinstance(fuse([swap, Normalise(), ImageLayout()]), NormalisePlanes)
    assert fuse([swap]) is swap
    steps = [Resize(size=(4, 5)), Normalise(mean=MEAN), ImageLayout()]
    assert fuse(steps).check({"value": RGB})["value"].shape == (3, 4, 5)


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
