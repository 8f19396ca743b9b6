"""Convert the channels of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import cv2
import numpy as np
from PIL import Image

from penstock.errors import InvalidConfig
from penstock.pipeline.steps.base import Step
from penstock.pipeline.steps.image.pixels import CHANNELS, Channels, Library, image_type, pixels_of
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

_CODES = {
    ("rgb", "bgr"): cv2.COLOR_RGB2BGR,
    ("bgr", "rgb"): cv2.COLOR_BGR2RGB,
    ("grey", "rgb"): cv2.COLOR_GRAY2RGB,
    ("grey", "bgr"): cv2.COLOR_GRAY2BGR,
    ("rgba", "rgb"): cv2.COLOR_RGBA2RGB,
    ("rgba", "bgr"): cv2.COLOR_RGBA2BGR,
    ("rgb", "grey"): cv2.COLOR_RGB2GRAY,
    ("bgr", "grey"): cv2.COLOR_BGR2GRAY,
    ("rgba", "grey"): cv2.COLOR_RGBA2GRAY,
}


def converted(pixels: Array, source: str, to: str, like: str) -> Array:
    """``pixels``, whose channels have the order ``source``, in the order ``to``."""
    if source == to:
        return pixels
    if to == "grey" and like == "pillow":
        if source == "bgr":
            pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_BGR2RGB)
        return np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
    found: Array = cv2.cvtColor(np.ascontiguousarray(pixels), _CODES[source, to])
    return found.reshape(*found.shape[:2], -1)


class Colour(Step, frozen=True, kw_only=True):
    """Convert the channels of a picture, such as RGB to BGR or grey. Transparency is dropped, not blended."""

    source: Literal["rgb", "bgr", "grey", "rgba"]
    """Order of the channels of the input."""
    to: Channels
    """Order of the channels of the result: ``rgb``, ``bgr``, or ``grey`` (one channel)."""
    like: Library = "pillow"
    """Library whose rounding of ``grey`` is reproduced to the bit."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The picture with other channels. Raises InvalidConfig if it is not of UINT8, or has other channels than ``source``."""
        given = image_type("colour", inputs)
        if given.datatype is not DataType.UINT8:
            raise InvalidConfig("step 'colour' converts pixels of UINT8 only", "convert the colour before 'normalise'")
        if given.colour not in ("", self.source) or given.shape[2] not in (-1, CHANNELS[self.source]):
            found = given.colour or f"{given.shape[2]} channels"
            raise InvalidConfig(f"step 'colour' has 'source: {self.source}', but the picture has {found}")
        shape = (*given.shape[:2], CHANNELS[self.to])
        return {"value": ValueType(Media.IMAGE, given.datatype, shape, colour=self.to)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The converted pixels."""
        return {"value": converted(pixels_of(inputs["value"], order=self.source), self.source, self.to, self.like)}
