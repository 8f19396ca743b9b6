"""Fused steps return what the steps return one by one."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.channels import Colour
from penstock.pipeline.steps.image.fuse import NormalisePlanes, fuse
from penstock.pipeline.steps.image.geometry import CropImage, Letterbox, PadImage
from penstock.pipeline.steps.image.normalise import ImageLayout, Normalise
from penstock.pipeline.steps.image.resize import Resize
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType
from pictures import pictures

MEAN = (0.485, 0.456, 0.406)
RGB = ValueType(Media.IMAGE, DataType.UINT8, (-1, -1, 3), colour="rgb")


def run(step: Step, pixels: Array) -> Array:
    """The result of a step."""
    found: Array = step.run({"value": pixels})["value"]
    return found


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
        [
            Colour(source="rgb", to="bgr"),
            Colour(source="bgr", to="rgb"),
            Colour(source="rgb", to="rgb"),
            Colour(source="rgb", to="grey"),
        ]
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


@pytest.mark.parametrize("swap", [None, ("rgb", "bgr"), ("bgr", "rgb")], ids=str)
def test_each_channel_gets_its_own_mean_and_std(
    swap: tuple[Literal["rgb", "bgr"], Literal["rgb", "bgr"]] | None,
) -> None:
    """The numbers of ``normalise`` belong to the channels after the swap."""
    pixels = np.array([[[0, 100, 200], [255, 1, 2]], [[10, 20, 30], [7, 77, 177]]], np.uint8)
    mean, std = (0.1, 0.4, 0.8), (0.5, 0.25, 2.0)
    steps: list[Step] = [Normalise(mean=mean, std=std), ImageLayout()]
    if swap is not None:
        steps.insert(0, Colour(source=swap[0], to=swap[1]))
    fused = fuse(steps)
    assert isinstance(fused, NormalisePlanes)
    found = run(fused, pixels)

    ordered = pixels if swap is None else pixels[:, :, ::-1]
    scaled = (ordered / 255).astype(np.float32)
    by_channel = [(scaled[:, :, c] - np.float32(mean[c])) / np.float32(std[c]) for c in range(3)]
    np.testing.assert_allclose(found, np.stack(by_channel), rtol=1e-6, atol=1e-6)

    unfused = pixels
    for step in steps:
        unfused = run(step, unfused)
    assert found.dtype == unfused.dtype == np.float32
    np.testing.assert_array_equal(found, unfused)
