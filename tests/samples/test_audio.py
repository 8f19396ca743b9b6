from __future__ import annotations

import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from penstock.dataset import Dataset
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.samples.audio import read_sound
from penstock.samples.folder import read_folder
from penstock.samples.hints import InputHints, SoundForm
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 2)),)
SOUND = TensorSpec("sound", DataType.FP32, (-1, -1))
TONE = 0.5 * np.sin(np.arange(400) / 9)


def write(path: Path, values: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = np.rint(values * (2.0 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes())


def read(folder: Path, *specs: TensorSpec, form: SoundForm | None = None) -> Dataset:
    return read_folder(
        folder, Signature(specs or (SOUND,), Y), hints=InputHints({}, lambda _: {}, None, form or SoundForm("sound"))
    )


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_every_width_are_numbers_from_minus_1_to_1(tmp_path: Path, width: int) -> None:
    write(tmp_path / "a.wav", TONE, width=width)
    found = read(tmp_path).sample(0)["sound"]
    assert (found.shape, found.dtype) == ((1, 400), np.float32)
    np.testing.assert_allclose(found[0], TONE, atol=2.1 / 2 ** (8 * width - 1) + 1e-6)


def test_the_least_value_is_minus_1(tmp_path: Path) -> None:
    for width in (2, 3, 4):
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((1, width, 8000, 0, "NONE", ""))
            file.writeframes((-(1 << (8 * width - 1))).to_bytes(width, "little", signed=True))
        assert read(tmp_path).sample(0)["sound"].tolist() == [[-1.0]]


def test_flac_and_other_forms_of_wav_are_read_by_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.flac", TONE, 16_000)
    soundfile.write(tmp_path / "b.wav", TONE, 16_000, subtype="FLOAT")
    data = read(tmp_path)
    for number in range(2):
        np.testing.assert_allclose(data.sample(number)["sound"][0], TONE, atol=1e-4)


def test_the_rate_is_an_input(tmp_path: Path) -> None:
    form = SoundForm("sound", "sr", (8000, 16000))
    specs = SOUND, TensorSpec("sr", DataType.INT64, ())
    write(tmp_path / "a.wav", TONE, 8000)
    assert int(read(tmp_path, *specs, form=form).sample(0)["sr"]) == 8000
    write(tmp_path / "b.wav", TONE, 44_100)
    with pytest.raises(InvalidData, match=r"b.wav' has 44100 Hz, but the model takes 8000 or 16000 .*convert it"):
        read(tmp_path, *specs, form=form)


def test_integers_are_whole_amplitudes(tmp_path: Path) -> None:
    write(tmp_path / "a.wav", TONE)
    found = read(tmp_path, TensorSpec("sound", DataType.INT16, (-1, -1))).sample(0)["sound"]
    assert found.dtype == np.int16
    np.testing.assert_allclose(found[0], TONE * 32767, atol=1)


def test_subfolders_are_classes_and_lengths_may_differ(tmp_path: Path) -> None:
    for number, name in enumerate(["yes", "no", "yes"]):
        write(tmp_path / name / f"{number}.wav", TONE[: 300 + 50 * (number % 2)])
    data = read(tmp_path)
    assert data.labels is not None
    assert (data.labels.tolist(), data.sizes) == ([0, 1, 1], 2)


@pytest.mark.parametrize("length", [1, 399, 401, 16_000])
def test_a_wrong_length_says_what_to_do(tmp_path: Path, length: int) -> None:
    write(tmp_path / "a.wav", TONE)
    with pytest.raises(
        InvalidData, match=f"a.wav' has 400 moments, but input 'sound' takes {length} .*cut it into parts"
    ):
        read(tmp_path, TensorSpec("sound", DataType.FP32, (-1, length)))


def test_hostile_files_are_rejected_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.wav", TONE)
    whole = (tmp_path / "a.wav").read_bytes()
    claims = whole[:40] + (0x7FFFFF00).to_bytes(4, "little") + whole[44:]
    write(tmp_path / "b.wav", np.zeros(0))
    silent = (tmp_path / "b.wav").read_bytes()
    write(tmp_path / "b.wav", TONE, channels=2)
    stereo = (tmp_path / "b.wav").read_bytes()
    cases = [
        (b"", "cannot read"),
        (b"RIFF\xff\xff\xff\xffWAVEjunk", "cannot read"),
        (whole[:30], "cannot read"),
        (whole[:-7], "is cut|cannot read"),
        (claims, "moments|is cut|cannot read"),
        (silent, "0 moments"),
        (stereo, "has 2 channels .*one channel"),
    ]
    for content, cause in cases:
        (tmp_path / "b.wav").write_bytes(content)
        with pytest.raises(PenstockError, match=cause):
            read(tmp_path)


def test_changed_bytes_are_an_error_or_a_sound(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    write(path, TONE)
    whole = path.read_bytes()
    for seed in range(150):
        content, rng = bytearray(whole), np.random.default_rng(seed)
        for _ in range(2):
            content[int(rng.integers(60))] = int(rng.integers(256))
        path.write_bytes(content)
        try:
            sound = read_sound(path)
        except PenstockError:
            continue
        assert np.isfinite(sound.values).all()
        assert len(sound.values) <= len(whole)


def test_without_soundfile_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(Unsupported, match=r"pip install 'penstock\[audio\]'"):
        read(tmp_path)
