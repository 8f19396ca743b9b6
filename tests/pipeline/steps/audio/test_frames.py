"""Frames against librosa."""

from __future__ import annotations

from typing import Any

import librosa
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.frames import Frames
from penstock.pipeline.value import TEXT, Media, ValueType

SOUND = ValueType(Media.AUDIO, shape=(-1,), rate=16_000)


@given(st.integers(1, 300), st.integers(1, 90), st.integers(1, 90), st.sampled_from(["pad", "drop"]))
def test_frames_equal_those_of_librosa(count: int, length: int, hop: int, tail: Any) -> None:
    samples = np.arange(count, dtype=np.float32)
    step = Frames(length=length, hop=hop, tail=tail)
    if tail == "drop" and count < length:
        with pytest.raises(InvalidInput, match=f"has {count} samples, a frame has {length}"):
            step.run({"value": samples})
        return
    found = step.run({"value": samples})["value"]
    whole = 0 if count < length else 1 + (count - length) // hop
    if whole:
        expected = librosa.util.frame(samples, frame_length=length, hop_length=hop, axis=0)
        assert np.array_equal(np.stack(found[:whole]), expected)
    if tail == "drop":
        assert len(found) == whole
        return
    last = np.concatenate([samples, np.zeros(length, np.float32)])[whole * hop : whole * hop + length]
    is_rest = whole * hop < count and (not whole or (whole - 1) * hop + length < count)
    assert len(found) == whole + is_rest
    if is_rest:
        assert np.array_equal(found[-1], last)


def test_an_empty_sound_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the sound has 0 samples"):
        Frames(length=4, hop=2).run({"value": np.zeros(0, np.float32)})


def test_frames_are_a_list_of_sounds() -> None:
    found = Frames(length=400, hop=160).check({"value": SOUND})["value"]
    assert found == ValueType(Media.AUDIO, shape=(400,), many=True, rate=16_000)
    with pytest.raises(InvalidConfig, match="step 'frames' needs"):
        Frames(length=400, hop=160).check({"value": TEXT})
