"""Colours against Pillow and OpenCV."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.channels import Colour
from penstock.tensor import Array
from pictures import pictures


def run(step: Step, pixels: Array) -> Array:
    """The result of a step."""
    found: Array = step.run({"value": pixels})["value"]
    return found


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
