"""Reads sound files: WAV with the standard library, FLAC and other forms of WAV with soundfile, which is imported only here."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.errors import InvalidData, PenstockError, Unsupported, printable
from penstock.samples.hints import SoundForm
from penstock.tensor import Array, TensorSpec

SUFFIXES = (".wav", ".flac")
_MAX_VALUES = 1 << 26
"""Maximum number of values of a sound. The header has it, so that a small file cannot fill the memory."""
_SAVE = "save it again as WAV with 16 bits, or remove it"
_FULL = 1 << 15
"""The largest amplitude of a sound in integers."""
_INTEGERS = {2: "<i2", 4: "<i4"}


class Sound(NamedTuple):
    """The content of a sound file."""

    values: Array
    """FP32 from -1 to 1, one per moment."""
    rate: int


def read_sound(path: Path) -> Sound:
    """The sound in a file. Raises InvalidData if it is damaged, too long, or has several channels; Unsupported if soundfile is needed
    and not installed.
    """
    try:
        return _wav(path) if path.suffix.lower() == ".wav" else _by_soundfile(path)
    except PenstockError:
        raise
    except Exception as error:  # noqa: BLE001 - the readers raise arbitrary exceptions for damaged or forged files
        raise InvalidData(
            f"cannot read '{printable(str(path))}': {printable(str(error)) or 'the file is cut'}", _SAVE
        ) from None


def as_inputs(
    path: Path, sound: Sound, spec: TensorSpec, form: SoundForm, rate: TensorSpec | None = None
) -> dict[str, Array]:
    """The inputs that a sound gives: ``spec``, which takes sounds, and ``rate``, which takes their rate. Raises InvalidData."""
    length = spec.shape[-1]
    if length > 0 and len(sound.values) != length:
        raise InvalidData(
            f"'{printable(str(path))}' has {len(sound.values)} moments, but input '{spec.name}' takes {length}",
            f"cut it into parts of {length}, or add silence",
        )
    if form.rates and sound.rate not in form.rates:
        rates = " or ".join(map(str, form.rates))
        raise InvalidData(
            f"'{printable(str(path))}' has {sound.rate} Hz, but the model takes {rates}", "convert it to this rate"
        )
    values = sound.values.reshape([1] * (len(spec.shape) - 1) + [-1])
    if not spec.datatype.is_float:
        values = np.rint(values * _FULL).clip(-_FULL, _FULL - 1)
    found = {form.name: values.astype(spec.datatype.dtype)}
    return found | ({form.rate: np.full(rate.shape, sound.rate, rate.datatype.dtype)} if rate else {})


def assumed(spec: TensorSpec, form: SoundForm) -> str:
    """What was assumed about sounds, as text."""
    known = "" if form.rates else ", and the sampling rate of the files"
    ends = "-1 to 1" if spec.datatype.is_float else f"-{_FULL} to {_FULL - 1}"
    return f"sounds have values from {ends}{known}; if the model was trained on others, give arrays in npz files"


def _wav(path: Path) -> Sound:
    try:
        file = wave.open(str(path), "rb")  # noqa: SIM115 - closed below
    except wave.Error:
        return _by_soundfile(path)  # it reads more forms of WAV
    with file:
        width, count = file.getsampwidth(), file.getnframes()
        _check(path, file.getnchannels(), count)
        content = file.readframes(count)
    if len(content) != width * count:
        raise InvalidData(f"'{printable(str(path))}' is cut: it has {len(content)} of {width * count} bytes", _SAVE)
    if width == 1:
        values = (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        padded = np.zeros((count, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(count, 3)
        values = padded.view("<i4")[:, 0].astype(np.float64) / 2.0**31
    else:
        values = np.frombuffer(content, _INTEGERS[width]).astype(np.float64) / 2.0 ** (8 * width - 1)
    return Sound(values.astype(np.float32), file.getframerate())


def _by_soundfile(path: Path) -> Sound:
    try:
        import soundfile  # noqa: PLC0415 - an extra
    except (ImportError, OSError):
        raise Unsupported(
            f"'{printable(str(path))}' needs soundfile", "pip install 'penstock[audio]', or save it as WAV with 16 bits"
        ) from None
    with soundfile.SoundFile(str(path)) as file:
        _check(path, file.channels, file.frames)
        values = file.read(dtype="float32")
        if len(values) != file.frames:
            raise InvalidData(f"'{printable(str(path))}' is cut: it has {len(values)} of {file.frames} moments", _SAVE)
        return Sound(values, file.samplerate)


def _check(path: Path, channels: int, moments: int) -> None:
    if channels != 1:
        raise InvalidData(f"'{printable(str(path))}' has {channels} channels", "save it with one channel")
    if not 0 < moments <= _MAX_VALUES:
        raise InvalidData(
            f"'{printable(str(path))}' has {moments} moments, 1 to {_MAX_VALUES} are read", "cut it into parts"
        )
