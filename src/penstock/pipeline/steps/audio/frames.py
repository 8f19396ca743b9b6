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
        """The frames. All but a padded one share the memory of the sound. Raises InvalidInput if there is none."""
        samples: Array = inputs["value"]
        count = len(samples)
        if not count or (self.tail == "drop" and count < self.length):
            raise InvalidInput(f"the sound has {count} samples, a frame has {self.length}", "send a longer sound")
        whole = max(0, (count - self.length) // self.hop + 1)
        (stride,) = samples.strides
        shape, strides = (whole, self.length), (self.hop * stride, stride)
        frames = list(np.lib.stride_tricks.as_strided(samples, shape, strides, writeable=False))
        start, end = whole * self.hop, (whole - 1) * self.hop + self.length
        if (
            self.tail == "pad" and start < count and (not whole or end < count)
        ):  # not if a long hop ends beyond the sound
            rest = samples[start:]
            frames.append(np.concatenate([rest, np.zeros(self.length - len(rest), samples.dtype)]))
        return {"value": frames}
