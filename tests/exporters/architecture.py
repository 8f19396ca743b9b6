"""An architecture to export: how its model is made, and rows for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.tensor import Array

Rows = Callable[[int, int], dict[str, Array]]
"""Rows for a model, from their number and a seed."""


class Architecture(NamedTuple):
    """A model with random weights, small enough to be tried in seconds."""

    name: str
    library: str
    """The package that it comes from; it is skipped if that is not installed."""
    make: Callable[[], Any]
    """The torch module, whose inputs have the names of the rows; or, for other libraries, the ONNX model as bytes."""
    rows: Rows
    opset: int = 17


def images(channels: int = 3, size: int = 32) -> Rows:
    """Smooth images, as images are, with some noise."""

    def rows(count: int, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        coarse = rng.standard_normal((count, channels, 4, 4))
        smooth = np.kron(coarse, np.ones((1, 1, -(-size // 4), -(-size // 4))))[:, :, :size, :size]
        return {"image": (smooth + 0.3 * rng.standard_normal(smooth.shape)).astype(np.float32)}

    return rows


def normal(**shapes: tuple[int, ...]) -> Rows:
    """Normal values of the shapes, without the axis of rows."""

    def rows(count: int, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((count, *shape)).astype(np.float32) for name, shape in shapes.items()}

    return rows


def tokens(length: int = 16, words: int = 100, name: str = "input_ids", masked: bool = True) -> Rows:
    """Word numbers and, if ``masked``, an attention mask that leaves the end of some rows out."""

    def rows(count: int, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        found = {name: rng.integers(1, words, (count, length))}
        if masked:
            found["attention_mask"] = (np.arange(length) < rng.integers(length // 2, length + 1, (count, 1))).astype(
                int
            )
        return found

    return rows


def both(*parts: Rows) -> Rows:
    """The inputs of several kinds of rows."""

    def rows(count: int, seed: int) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for number, part in enumerate(parts):
            found |= part(count, seed + 1000 * number)
        return found

    return rows


def integers(**ranges: tuple[tuple[int, ...], int]) -> Rows:
    """Whole numbers from 0: for each input, the shape of a row and the limit."""

    def rows(count: int, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        return {name: rng.integers(0, limit, (count, *shape)) for name, (shape, limit) in ranges.items()}

    return rows
