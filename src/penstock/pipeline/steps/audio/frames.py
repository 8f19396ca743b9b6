"""Sliding windows over sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from penstock.errors import InvalidInput
from penstock.pipeline.steps.audio.resample import check_is_sound
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array


class Frames(Step, frozen=True, kw_only=True):
    """Cut a sound into a list of frames of equal length, which may overlap, as ``librosa.util.frame`` does."""

    length: Annotated[int, Meta(ge=1)]
    """Samples per frame."""
    hop: Annotated[int, Meta(ge=1)]
    """Samples from the start of one frame to the start of the next."""
    tail: Literal["pad", "drop"] = "pad"
    """What happens to samples at the end that do not fill a frame: ``pad`` adds zeros, ``drop`` ignores these samples."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A list of sounds. Raises InvalidConfig unless the input is a sound."""
        given = inputs["value"]
        check_is_sound("frames", given)
        return {"value": replace(given, media=Media.AUDIO, shape=(self.length,), many=True)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The frames, which share memory. Raises InvalidInput if there is none."""
        samples: Array = inputs["value"]
        if not len(samples) or (self.tail == "drop" and len(samples) < self.length):
            raise InvalidInput(
                f"the sound has {len(samples)} samples, a frame has {self.length}", "send a longer sound"
            )
        if self.tail == "pad":
            last = max(0, -(-(len(samples) - self.length) // self.hop)) * self.hop
            if last < len(samples):  # a hop may be longer than a frame, and end beyond the sound
                samples = np.pad(samples, (0, max(0, last + self.length - len(samples))))
        return {"value": list(np.lib.stride_tricks.sliding_window_view(samples, self.length)[:: self.hop])}
