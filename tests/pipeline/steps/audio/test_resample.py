"""Resampling and frames against librosa."""

from __future__ import annotations

from typing import Any

import librosa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.frames import Frames
from penstock.pipeline.steps.audio.resample import Resample
from penstock.pipeline.value import TEXT, Media, ValueType
from penstock.tensor import DataType

FILTERS: Any = ["soxr_vhq", "soxr_hq", "soxr_mq", "soxr_lq", "polyphase"]
RATES = st.sampled_from([8_000, 11_025, 16_000, 22_050, 44_100, 48_000])


@settings(deadline=None)
@given(st.sampled_from(FILTERS), RATES, RATES, st.integers(1, 5000))
def test_samples_equal_those_of_librosa(quality: Any, source: int, rate: int, count: int) -> None:
    samples = np.random.default_rng(count).uniform(-1, 1, count).astype(np.float32)
    step = Resample(source_rate=source, rate=rate, filter=quality)
    found = step.run({"value": samples})["value"]
    expected = librosa.resample(samples, orig_sr=source, target_sr=rate, res_type=quality)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    known = ValueType(Media.AUDIO, DataType.FP32, (count,), rate=source)
    assert step.check({"value": known})["value"] == ValueType(Media.AUDIO, DataType.FP32, (len(found),), rate=rate)


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


def test_types() -> None:
    sound = ValueType(Media.AUDIO, DataType.FP32, (-1,), rate=8_000)
    assert Resample(source_rate=8_000, rate=16_000).check({"value": sound})["value"].shape == (-1,)
    frames = Frames(length=400, hop=160).check({"value": sound})["value"]
    assert (frames.many, frames.shape, frames.rate) == (True, (400,), 8_000)
    with pytest.raises(InvalidConfig, match="expects 16000 samples per second, but its input has 8000"):
        Resample(source_rate=16_000, rate=8_000).check({"value": sound})
    with pytest.raises(InvalidConfig, match="needs sound"):
        Frames(length=1, hop=1).check({"value": TEXT})
