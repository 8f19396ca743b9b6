"""Pictures for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from penstock.tensor import Array


def random_pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    """Random UINT8 pixels, smooth with some noise, so that neighbours are related as in photos."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, channels))
    smooth = coarse.repeat(8, 0).repeat(8, 1)[:height, :width]
    found: Array = np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8)
    return found


def encoded(picture: Image.Image | Array, format: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    image = (
        Image.fromarray(picture.squeeze(-1) if picture.shape[-1] == 1 else picture)
        if isinstance(picture, np.ndarray)
        else picture
    )
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@st.composite
def pictures(draw: st.DrawFn, channels: tuple[int, ...] = (1, 3), largest: int = 70) -> Array:
    """Pictures of all sizes from one pixel, also with extreme aspect ratios."""
    sides = st.one_of(st.just(1), st.integers(1, largest))
    return random_pixels(draw(sides), draw(sides), draw(st.sampled_from(channels)), draw(st.integers(0, 9)))


def some_boxes(count: int, seed: int, largest: float = 100) -> Array:
    """Random boxes, also outside of a picture and with edges in the wrong order."""
    return ((np.random.default_rng(seed).random((count, 4)) - 0.2) * largest).astype(np.float32)
