"""Resampling against librosa."""

from __future__ import annotations

from typing import Any

import librosa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig
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


def test_types() -> None:
    sound = ValueType(Media.AUDIO, DataType.FP32, (-1,), rate=8_000)
    assert Resample(source_rate=8_000, rate=16_000).check({"value": sound})["value"].shape == (-1,)
    with pytest.raises(InvalidConfig, match="expects 16000 samples per second, but its input has 8000"):
        Resample(source_rate=16_000, rate=8_000).check({"value": sound})
    with pytest.raises(InvalidConfig, match="needs sound"):
        Resample(source_rate=8_000, rate=8_000).check({"value": TEXT})
