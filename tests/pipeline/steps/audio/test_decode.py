"""Decoding of sound files against librosa."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path

import librosa
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.decode import DecodeAudio
from penstock.pipeline.value import FILE, TEXT, Media

pytestmark = pytest.mark.filterwarnings(
    "ignore:'(aifc|audioop|sunau)' is deprecated:DeprecationWarning"
)  # imports of librosa
FORMS = {
    "wav": ("WAV", "PCM_16"),
    "wav-24": ("WAV", "PCM_24"),
    "wav-float": ("WAV", "FLOAT"),
    "wavex": ("WAVEX", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "vorbis": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
}


def encoded(form: str, channels: int = 1, rate: int = 48_000, seconds: float = 1.0) -> bytes:
    """A file with noise."""
    samples = np.random.default_rng(3).uniform(-0.5, 0.5, (int(rate * seconds), channels)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=FORMS[form][0], subtype=FORMS[form][1])
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_samples_equal_those_of_librosa(form: str, channels: int) -> None:
    content = encoded(form, channels)
    for rate in (48_000, 16_000, 22_050):
        expected, _ = librosa.load(io.BytesIO(content), sr=rate)
        found = DecodeAudio(rate=rate).run({"file": content})["samples"]
        assert found.dtype == np.float32
        assert found.flags.c_contiguous
        assert np.array_equal(found, expected)


def test_five_channels_are_averaged() -> None:
    content = encoded("wav", 5)
    expected, _ = librosa.load(io.BytesIO(content), sr=None)
    assert np.array_equal(DecodeAudio(rate=48_000).run({"file": content})["samples"], expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_file_is_refused(form: str) -> None:
    content = encoded(form)
    for cut in (*range(0, 200, 7), len(content) // 3, len(content) // 2, len(content) * 9 // 10):
        with pytest.raises(InvalidInput, match="truncated|cannot be decoded"):
            DecodeAudio(rate=16_000).run({"file": content[:cut]})


def test_a_stream_has_no_size_in_its_header() -> None:
    content = bytearray(encoded("wav"))
    position = content.index(b"data") + 4
    content[position : position + 4] = struct.pack("<I", 0xFFFFFFFF)
    assert len(DecodeAudio(rate=48_000).run({"file": bytes(content)})["samples"]) == 48_000


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_damaged_headers_give_samples_or_a_clear_error(form: str, changes: list[tuple[int, int]]) -> None:
    content = bytearray(encoded(form, seconds=0.1))
    for position, value in changes:
        content[position] = value
    try:
        found = DecodeAudio(rate=8_000, max_seconds=5).run({"file": bytes(content)})["samples"]
    except InvalidInput:
        return
    assert 0 < len(found) <= 5 * 8_000
    assert np.isfinite(found).all()


def test_limits_are_checked_from_the_header() -> None:
    content = encoded("flac", 2, seconds=2)
    with pytest.raises(InvalidInput, match=r"lasts 2\.0 s, the limit is 1 s"):
        DecodeAudio(rate=16_000, max_seconds=1).run({"file": content})
    with pytest.raises(InvalidInput, match="takes 768000 bytes decoded, the limit is 767999"):
        DecodeAudio(rate=16_000, max_bytes=767_999).run({"file": content})
    forged = bytearray(content)
    forged[21:26] = bytes([forged[21] & 0xF0 | 0x0F, 0xFF, 0xFF, 0xFF, 0xFF])  # 2**36 - 1 samples
    with pytest.raises(InvalidInput, match="lasts"):
        DecodeAudio(rate=16_000).run({"file": bytes(forged)})


def test_other_contents_are_refused(tmp_path: Path) -> None:
    aiff = io.BytesIO()
    soundfile.write(aiff, np.zeros(100), 8_000, format="AIFF")
    with pytest.raises(InvalidInput, match="has the format AIFF"):
        DecodeAudio(rate=8_000).run({"file": aiff.getvalue()})
    for content in (b"", b"hello", b"\x00" * 1000):
        with pytest.raises(InvalidInput, match="cannot be decoded"):
            DecodeAudio(rate=8_000).run({"file": content})
    empty, broken = io.BytesIO(), io.BytesIO()
    soundfile.write(empty, np.zeros(0), 8_000, format="WAV")
    with pytest.raises(InvalidInput, match="has no samples"):
        DecodeAudio(rate=8_000).run({"file": empty.getvalue()})
    soundfile.write(broken, np.array([0, np.nan], np.float32), 8_000, format="WAV", subtype="FLOAT")
    with pytest.raises(InvalidInput, match="NaN"):
        DecodeAudio(rate=8_000).run({"file": broken.getvalue()})


def test_types() -> None:
    found = DecodeAudio(rate=8_000).check({"file": FILE})["samples"]
    assert (found.media, found.shape, found.rate) == (Media.AUDIO, (-1,), 8_000)
    with pytest.raises(InvalidConfig, match="the content of a file"):
        DecodeAudio(rate=8_000).check({"file": TEXT})


def test_samples_may_come_as_an_array() -> None:
    samples, step = np.zeros(100, np.float32), DecodeAudio(rate=8_000, max_seconds=1)
    assert step.run({"file": samples})["samples"] is samples
    for wrong in (samples.astype(np.float64), samples[None], samples[:0], np.zeros(8_001, np.float32)):
        with pytest.raises(InvalidInput, match="the sound (is an array|lasts)"):
            step.run({"file": wrong})


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_base64_is_named_with_the_fix(form: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(3000, np.float32), 16_000, format=form)
    for head in (b"", b"data:audio/wav;base64,"):
        with pytest.raises(InvalidInput, match="the sound is text in base64"):
            DecodeAudio(rate=16_000).run({"file": head + base64.b64encode(file.getvalue())})
