"""Mel spectrograms against librosa and transformers."""

from __future__ import annotations

import itertools
from typing import Any

import librosa.filters
import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.decode import DecodeAudio
from penstock.pipeline.steps.audio.log_mel import LogMel, WhisperLogMel, _filters
from penstock.pipeline.steps.audio.resample import Resample
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Media, ValueType
from penstock.tensor import Array, DataType

RATE = 16_000
OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_fft": 400, "hop": 160, "n_mels": 40},
    {"n_fft": 1024, "hop": 256, "window": 801, "htk": True, "norm": "none", "power": 1.0},
    {"n_fft": 1023, "hop": 300, "fmin": 50.0, "fmax": 7000.0, "pad_mode": "reflect", "power": 1.5},
    {"center": False, "n_mels": 64},
]


def _sound(count: int) -> Array:
    moments = np.arange(count) / RATE
    noise = np.random.default_rng(1).normal(0, 1e-4, count)
    return (0.5 * np.sin(2 * np.pi * 440 * moments) * np.exp(-moments) + noise).astype(np.float32)


def _librosa(step: LogMel, samples: Array) -> Array:
    found: Array = librosa.feature.melspectrogram(
        y=samples,
        sr=step.rate,
        n_fft=step.n_fft,
        hop_length=step.hop,
        win_length=step.window or None,
        n_mels=step.n_mels,
        fmin=step.fmin,
        fmax=step.fmax or None,
        htk=step.htk,
        norm=None if step.norm == "none" else step.norm,
        power=step.power,
        center=step.center,
        pad_mode=step.pad_mode,
    )
    return found


@pytest.mark.parametrize(("rate", "n_fft", "n_mels"), [(16_000, 400, 40), (22_050, 2048, 128), (8_000, 255, 20)])
def test_filters_equal_those_of_librosa(rate: int, n_fft: int, n_mels: int) -> None:
    for htk, norm in itertools.product((False, True), ("slaney", None)):
        expected = librosa.filters.mel(sr=rate, n_fft=n_fft, n_mels=n_mels, htk=htk, norm=norm)
        assert np.array_equal(_filters(rate, n_fft, n_mels, 0.0, rate / 2, htk, norm == "slaney"), expected)


@pytest.mark.parametrize("count", [2050, 5_000, 33_333])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_agree_with_librosa(options: dict[str, Any], count: int) -> None:
    samples = _sound(count)
    step = LogMel(rate=RATE, scale="power", **options)
    power = _librosa(step, samples)
    found = step.run({"value": samples})["value"]
    np.testing.assert_allclose(found, power, rtol=1e-5)
    kind = ValueType(Media.AUDIO, DataType.FP32, (count,), rate=RATE)
    assert step.check({"value": kind})["value"] == ValueType(shape=found.shape)
    for more, expected in (
        ({}, librosa.power_to_db(power)),
        ({"reference": "max"}, librosa.power_to_db(power, ref=np.max)),
        ({"reference": 2.0, "top_db": None}, librosa.power_to_db(power, ref=2.0, top_db=None)),
        ({"scale": "log", "floor": 1e-6}, np.log(np.maximum(power, 1e-6))),
        ({"scale": "log10"}, np.log10(np.maximum(power, 1e-10))),
    ):
        found = LogMel(rate=RATE, **options, **more).run({"value": samples})["value"]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_silence_has_a_spectrogram() -> None:
    silence = np.zeros(4000, np.float32)
    for reference, level in ((1.0, -100), ("max", 0)):
        found = LogMel(rate=RATE, reference=reference).run({"value": silence})["value"]  # type: ignore[arg-type]
        np.testing.assert_allclose(found, level, atol=1e-4)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_whisper_features_agree_with_transformers(n_mels: int) -> None:
    extract = WhisperFeatureExtractor(feature_size=n_mels)
    for samples in (_sound(RATE * 2), _sound(RATE * 31), np.zeros(100, np.float32)):
        expected = extract(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
        found = WhisperLogMel(n_mels=n_mels, truncate=True).run({"value": samples})["value"]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_wrong_sounds_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"lasts 31\.0 s, the limit is 30 s"):
        WhisperLogMel().run({"value": _sound(RATE * 31)})
    with pytest.raises(InvalidInput, match="has 1024 samples, at least 1025"):
        LogMel(rate=RATE, pad_mode="reflect").run({"value": _sound(1024)})
    with pytest.raises(InvalidInput, match="has 0 samples, at least 1 "):
        LogMel(rate=RATE).run({"value": _sound(0)})
    with pytest.raises(InvalidInput, match="has 2047 samples, at least 2048"):
        LogMel(rate=RATE, center=False).run({"value": _sound(2047)})
    sound = ValueType(Media.AUDIO, DataType.FP32, (-1,), rate=8_000)
    with pytest.raises(InvalidConfig, match="expects 16000 samples per second"):
        WhisperLogMel().check({"value": sound})
    with pytest.raises(InvalidConfig, match="fmax 5000, but the rate is 8000"):
        LogMel(rate=8_000, fmax=5000).check({"value": sound})
    with pytest.raises(InvalidConfig, match="a window of 3000, but n_fft is only 2048"):
        LogMel(rate=8_000, window=3000).check({"value": sound})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("step", [LogMel(rate=16_000), WhisperLogMel(), Resample(source_rate=16_000, rate=8_000)])
def test_samples_that_are_not_finite_are_refused_as_by_librosa(step: Step, bad: float) -> None:
    samples = np.zeros(16_000, np.float32)
    step.run({"value": samples})
    samples[500] = bad
    with pytest.raises(InvalidInput, match="the sound has samples that are NaN or infinite"):
        step.run({"value": samples})
    with pytest.raises(InvalidInput, match="the sound has samples that are NaN or infinite"):
        DecodeAudio(rate=16_000).run({"file": samples})
