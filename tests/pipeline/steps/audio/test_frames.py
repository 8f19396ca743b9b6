"""Frames against librosa."""

from __future__ import annotations

import librosa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.frames import Frames
from penstock.pipeline.value import TEXT, Media, ValueType

SOUND = ValueType(Media.AUDIO, shape=(-1,), rate=16_000)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30))
def test_whole_frames_are_librosas(samples: int, length: int, hop: int) -> None:
    sound = np.arange(samples, dtype=np.float32)
    step = Frames(length=length, hop=hop, tail="drop")
    if samples < length:
        with pytest.raises(InvalidInput, match=f"the sound has {samples} samples, a frame has {length}"):
            step.run({"value": sound})
        return
    wanted = librosa.util.frame(sound, frame_length=length, hop_length=hop, axis=0)
    np.testing.assert_array_equal(step.run({"value": sound})["value"], wanted)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30))
def test_padded_frames_begin_with_the_whole_ones_and_reach_the_end(samples: int, length: int, hop: int) -> None:
    sound = np.arange(1, samples + 1, dtype=np.float32)
    frames = Frames(length=length, hop=hop).run({"value": sound})["value"]
    for number, frame in enumerate(frames):
        part = sound[number * hop : number * hop + length]
        np.testing.assert_array_equal(frame, np.pad(part, (0, length - len(part))))
        assert len(part)
    assert len(frames) * hop >= samples or (len(frames) - 1) * hop + length >= samples


def test_an_empty_sound_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the sound has 0 samples"):
        Frames(length=4, hop=2).run({"value": np.zeros(0, np.float32)})


def test_frames_are_a_list_of_sounds() -> None:
    found = Frames(length=400, hop=160).check({"value": SOUND})["value"]
    assert found == ValueType(Media.AUDIO, shape=(400,), many=True, rate=16_000)
    with pytest.raises(InvalidConfig, match="step 'frames' needs"):
        Frames(length=400, hop=160).check({"value": TEXT})
