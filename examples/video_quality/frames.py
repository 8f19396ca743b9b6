"""Frames of random scenes, their damage by blur and compression, and their true quality: the similarity to the undamaged frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from numpy.typing import NDArray

SIZE = 96
Pixels = NDArray[np.uint8]


def scene(seed: int, time: float = 0) -> Pixels:
    """A grey frame [96, 96] of a random scene: smooth ground, texture, and shapes that move."""
    chance = np.random.default_rng(seed)
    frame = cv2.resize(chance.uniform(60, 200, (4, 4)), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    frame += cv2.resize(chance.normal(0, chance.uniform(4, 14), (48, 48)), (SIZE, SIZE), interpolation=cv2.INTER_CUBIC)
    for _ in range(12):
        centre = (chance.uniform(0, SIZE, 2) + time * chance.uniform(-20, 20, 2)) % SIZE
        angle = chance.uniform(0, 180) + 30 * time
        corners = cv2.boxPoints((centre.tolist(), chance.uniform(8, 40, 2).tolist(), angle))
        cv2.fillConvexPoly(frame, (corners * 16).astype(np.int32), chance.uniform(0, 255), cv2.LINE_AA, 4)
    return frame.clip(0, 255).astype(np.uint8)


def damaged(frame: Pixels, blur: float, jpeg: float) -> Pixels:
    """The frame with blur of a radius in pixels, and the blocks of JPEG at a quality of 1 to 100."""
    if blur > 0:
        frame = cv2.GaussianBlur(frame, (0, 0), blur)
    found: Pixels = cv2.imdecode(
        cv2.imencode(".jpg", frame, (cv2.IMWRITE_JPEG_QUALITY, int(jpeg)))[1], cv2.IMREAD_GRAYSCALE
    )
    return found


def similarity(one: Pixels, other: Pixels) -> float:
    """SSIM [Z. Wang et al., 2004], with a Gaussian window."""
    a, b = one.astype(np.float64), other.astype(np.float64)

    def mean(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return cv2.GaussianBlur(x, (11, 11), 1.5)

    both, squares = mean(a) * mean(b), mean(a) ** 2 + mean(b) ** 2
    covariance, variances = mean(a * b) - both, mean(a * a) + mean(b * b) - squares
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    return float(np.mean((2 * both + c1) * (2 * covariance + c2) / ((squares + c1) * (variances + c2))))


def some(count: int, first: int) -> tuple[list[Pixels], NDArray[np.float32]]:
    """Damaged frames of ``count`` scenes, and their similarity to the undamaged frames."""
    frames, truths = [], []
    for seed in range(first, first + count):
        chance, sharp = np.random.default_rng(seed), scene(seed)
        frame = damaged(
            sharp, max(0.3, chance.uniform(-1.5, 2.5)) if chance.random() < 0.7 else 0, chance.uniform(3, 95)
        )
        frames.append(frame)
        truths.append(similarity(sharp, frame))
    return frames, np.array(truths, np.float32)


def write_clip(path: Path, count: int = 90) -> list[float]:
    """A clip of three seconds: undamaged, then more and more blocks, then blur. Returns the true qualities of the frames."""
    truths = []
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"crf": "8"})
        stream.width, stream.height, stream.pix_fmt = SIZE, SIZE, "yuv420p"
        for number in range(count):
            sharp, part = scene(2_000_000, number / 30), number * 3 // count
            frame = damaged(sharp, 2.0 if part == 2 else 0, 40 - 37 * (number / count * 3 - 1) if part == 1 else 95)
            truths.append(similarity(sharp, frame))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.dstack([frame] * 3), format="rgb24")))
        container.mux(stream.encode())
    return truths
