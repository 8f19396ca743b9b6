"""What is known or assumed about a model besides its signature, so that samples need not be arrays of all inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from penstock.tensor import Array


class ImageForm(msgspec.Struct, frozen=True):
    """The images that an input takes."""

    name: str
    """The input."""
    layout: str
    """The axes: a selection of N, C, H and W."""
    low: float
    high: float
    """The values of black and white."""
    reason: str


class SoundForm(msgspec.Struct, frozen=True):
    """The sounds that an input takes."""

    name: str
    """The input."""
    rate: str = ""
    """The input that takes the sampling rate; empty if there is none."""
    rates: tuple[int, ...] = ()
    """The sampling rates that the model distinguishes; empty if unknown."""


class InputHints(msgspec.Struct, frozen=True):
    """What is known or assumed about a model."""

    states: Mapping[str, str]
    """The states among the inputs, and for each the output that returns its next value; empty if the model has no states."""
    forward: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    """Runs the model."""
    images: ImageForm | None = None
    """The only input that takes images, if there is one."""
    sounds: SoundForm | None = None
    """The only input that takes sounds, if there is one."""
    missing: frozenset[str] = frozenset()
    """The inputs in which NaN stands for a missing value."""
