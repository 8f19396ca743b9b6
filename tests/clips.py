"""Clips of a pattern that moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np

from penstock.tensor import Array

RATE = 30
KINDS = {
    "mp4": ("libx264", {"g": "12"}),
    "webm": ("libvpx-vp9", {"g": "12"}),
    "avi": ("mpeg4", {}),
    "ts": ("libx264", {}),
}
"""Suffix -> codec and its options."""


def pictures(count: int, width: int, height: int) -> list[Array]:
    """The frames of a clip."""
    base = np.random.default_rng(0).integers(0, 255, (height // 8, width // 8, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    return [np.roll(base, 3 * index, axis=1) for index in range(count)]


def write_clip(path: Path, count: int = 60, size: tuple[int, int] = (160, 96), fade: bool = False) -> Path:
    """A clip in the format of the path's suffix. With ``fade``, it becomes darker."""
    codec, options = KINDS[path.suffix[1:]]
    with av.open(str(path), "w", options={"movflags": "faststart"} if path.suffix == ".mp4" else {}) as container:
        stream: Any = container.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for number, pixels in enumerate(pictures(count, *size)):
            shown = (pixels * (1 - number / count)).astype(np.uint8) if fade else pixels
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        container.mux(stream.encode())
    return path
