"""Mel spectrograms: that of librosa, and that of Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.audio.resample import check_is_sound, finite
from penstock.pipeline.steps.base import Step
from penstock.pipeline.value import Value, ValueType
from penstock.tensor import Array

_BLOCK_SAMPLES = 1 << 16
"""Samples of the frames that are transformed at once, so that they stay in the CPU's cache."""
_HZ_PER_MEL, _LOG_START_HZ, _LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27.0
"""Slaney's mel scale: linear below 1000 Hz, logarithmic above."""
_LOG_START = _LOG_START_HZ / _HZ_PER_MEL


class LogMel(Step, frozen=True, kw_only=True):
    """Compute the mel spectrogram of a sound, on a logarithmic scale, as ``librosa.feature.melspectrogram`` does.

    The output is FP32 of shape [n_mels, frames]. It agrees with librosa to a relative error of 1e-5 in power, 1e-4 dB.
    """

    rate: Annotated[int, Meta(ge=1)]
    """Samples per second of the sound."""
    n_fft: Annotated[int, Meta(ge=2)] = 2048
    """Length of the Fourier transform, in samples."""
    hop: Annotated[int, Meta(ge=1)] = 512
    """Samples from one frame to the next: librosa's ``hop_length``."""
    window: Annotated[int, Meta(ge=0)] = 0
    """Length of the Hann window, in samples: librosa's ``win_length``. 0: ``n_fft``."""
    n_mels: Annotated[int, Meta(ge=1)] = 128
    """Number of mel bands."""
    fmin: Annotated[float, Meta(ge=0)] = 0.0
    """Lowest frequency, in Hz."""
    fmax: Annotated[float, Meta(ge=0)] = 0.0
    """Highest frequency, in Hz. 0: half the rate."""
    htk: bool = False
    """Use HTK's mel scale instead of Slaney's."""
    norm: Literal["slaney", "none"] = "slaney"
    """``slaney`` divides each band by its width."""
    power: Annotated[float, Meta(gt=0)] = 2.0
    """Exponent of the magnitudes: 1 for energy, 2 for power."""
    center: bool = True
    """Pad the sound so that frame t is centred at sample t * hop. Otherwise, it begins there."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    """Padding with zeros, or with the mirrored sound."""
    scale: Literal["power", "db", "log", "log10"] = "db"
    """``power`` keeps the values, ``db`` is ``librosa.power_to_db``, ``log`` and ``log10`` are logarithms."""
    reference: Annotated[float, Meta(gt=0)] | Literal["max"] = 1.0
    """The power of 0 dB. ``max`` is the loudest value of the sound."""
    floor: Annotated[float, Meta(gt=0)] = 1e-10
    """Smaller values are raised to this one before the logarithm."""
    top_db: Annotated[float, Meta(ge=0)] | None = 80.0
    """With ``db``, values are at most this far below the loudest one."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The spectrogram. Raises InvalidConfig unless the input is sound with ``rate`` samples per second."""
        given = inputs["value"]
        check_is_sound("log_mel", given, self.rate)
        if self.window > self.n_fft:
            raise InvalidConfig(f"step 'log_mel' has a window of {self.window}, but n_fft is only {self.n_fft}")
        if not self.fmin < self._fmax <= self.rate / 2:
            raise InvalidConfig(
                f"step 'log_mel' has fmin {self.fmin:g} and fmax {self._fmax:g}, but the rate is {self.rate}",
                "0 <= fmin < fmax <= rate / 2",
            )
        count = given.shape[0]
        frames = (
            count if count < 0 else 1 + (count + (self.n_fft // 2 * 2 if self.center else 0) - self.n_fft) // self.hop
        )
        return {"value": ValueType(shape=(self.n_mels, frames))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The spectrogram. Raises InvalidInput if the sound is too short, or a sample is not finite."""
        samples: Array = inputs["value"]
        if self.center:
            samples = _centred(samples, self.n_fft // 2, self.pad_mode)
        filters = _bands(self.rate, self.n_fft, self.n_mels, self.fmin, self._fmax, self.htk, self.norm == "slaney")
        with np.errstate(over="ignore", invalid="ignore"):  # ``finite`` finds them in the result
            spectrogram = _spectrogram(samples, self.n_fft, self.hop, self.window or self.n_fft, self.power)
            values = finite(_filtered(spectrogram, filters))
        if self.scale == "power":
            return {"value": values}
        logarithm = np.log if self.scale == "log" else np.log10
        found = logarithm(np.maximum(values, np.float32(self.floor)))
        if self.scale == "db":
            reference = float(values.max()) if self.reference == "max" else self.reference
            found = 10 * found - np.float32(10 * np.log10(max(self.floor, reference)))
            if self.top_db is not None:
                found = np.maximum(found, found.max() - np.float32(self.top_db))
        return {"value": found}

    @property
    def _fmax(self) -> float:
        return self.fmax or self.rate / 2


_WHISPER = LogMel(rate=16_000, n_fft=400, hop=160, pad_mode="reflect", scale="log10")


class WhisperLogMel(Step, frozen=True, kw_only=True):
    """Compute the input features of Whisper: a mel spectrogram of 30 seconds of sound at 16,000 samples per second.

    The output is FP32 of shape [n_mels, 3000]. It agrees with ``WhisperFeatureExtractor`` of ``transformers`` to 1e-4.
    """

    n_mels: Annotated[int, Meta(ge=1)] = 80
    """Number of mel bands: 80, or 128 for the large models since version 3."""
    seconds: Annotated[int, Meta(ge=1)] = 30
    """Duration of the features. A shorter sound is followed by silence."""
    truncate: bool = False
    """Ignore the end of a longer sound, as ``transformers`` does. Otherwise such a sound is refused."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """The features. Raises InvalidConfig unless the input is sound with 16,000 samples per second."""
        check_is_sound("whisper_log_mel", inputs["value"], _WHISPER.rate)
        return {"value": ValueType(shape=(self.n_mels, self.seconds * _WHISPER.rate // _WHISPER.hop))}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The features. Raises InvalidInput if the sound is too long."""
        samples: Array = inputs["value"]
        count = self.seconds * _WHISPER.rate
        if len(samples) > count and not self.truncate:
            raise InvalidInput(
                f"the sound lasts {len(samples) / _WHISPER.rate:.1f} s, the limit is {self.seconds} s",
                "split it with the step frames, or set the step's truncate",
            )
        samples = np.pad(samples[:count], (0, max(0, count - len(samples))))
        values = msgspec.structs.replace(_WHISPER, n_mels=self.n_mels).run({"value": samples})["value"][:, :-1]
        return {"value": (np.maximum(values, values.max() - np.float32(8)) + np.float32(4)) / np.float32(4)}


def _centred(samples: Array, padding: int, mode: Literal["constant", "reflect"]) -> Array:
    """``samples`` with ``padding`` more at both ends. Raises InvalidInput if they are too few to be mirrored."""
    if not len(samples) or (mode == "reflect" and len(samples) <= padding):
        needed = padding + 1 if mode == "reflect" else 1
        raise InvalidInput(f"the sound has {len(samples)} samples, at least {needed} are needed", "send a longer sound")
    return np.pad(samples, padding, mode=mode)


def _spectrogram(samples: Array, n_fft: int, hop: int, window: int, power: float) -> Array:
    """The magnitudes of the short-time Fourier transform, to the exponent ``power``: FP32 of shape [n_fft // 2 + 1, frames].

    As in librosa, the transform is computed in double precision, so that quiet bands keep their digits.
    """
    if len(samples) < n_fft:
        raise InvalidInput(f"the sound has {len(samples)} samples, at least {n_fft} are needed", "send a longer sound")
    frames = np.lib.stride_tricks.sliding_window_view(samples, n_fft)[::hop]
    shape, bins = _window(n_fft, window), n_fft // 2 + 1
    found = np.empty((bins, len(frames)), np.float32)
    size = max(1, min(_BLOCK_SAMPLES // n_fft, len(frames)))
    real, transformed = np.empty((size, n_fft)), np.empty((size, bins), np.complex128)
    for start in range(0, len(frames), size):
        block = frames[start : start + size]
        count = len(block)
        np.fft.rfft(np.multiply(block, shape, out=real[:count]), out=transformed[:count])
        parts = transformed[:count].view(np.float64)
        parts *= parts
        squares = parts[:, ::2].T + parts[:, 1::2].T
        found[:, start : start + count] = squares if power == 2 else squares ** (power / 2)
    return found


@lru_cache(maxsize=16)
def _window(n_fft: int, length: int) -> Array:
    """A periodic Hann window of ``length`` samples in the middle of ``n_fft``."""
    window = 0.5 + 0.5 * np.cos(np.linspace(-np.pi, np.pi, length + 1)[:-1])
    left = (n_fft - length) // 2
    return np.pad(window, (left, n_fft - length - left))


def _filtered(spectrogram: Array, bands: tuple[tuple[int, Array], ...]) -> Array:
    """The energy of each band, of shape [n_mels, frames].

    A matrix product would give other bits with other numbers of BLAS threads, so a server and a script could differ.
    """
    found = np.empty((len(bands), spectrogram.shape[1]), np.float32)
    for (start, weights), energy in zip(bands, found, strict=True):
        np.einsum("b,bf->f", weights, spectrogram[start : start + weights.size], out=energy)
    return found


@lru_cache(maxsize=16)
def _bands(
    rate: int, n_fft: int, n_mels: int, fmin: float, fmax: float, htk: bool, by_width: bool
) -> tuple[tuple[int, Array], ...]:
    """The filters as their first column that is not 0, and the columns from there to the last such column."""
    found = []
    for weights in _filters(rate, n_fft, n_mels, fmin, fmax, htk, by_width):
        columns = np.flatnonzero(weights)
        start, stop = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 0)
        found.append((start, weights[start:stop].copy()))
    return tuple(found)


def _filters(rate: int, n_fft: int, n_mels: int, fmin: float, fmax: float, htk: bool, by_width: bool) -> Array:
    """The triangular mel filters, of shape [n_mels, n_fft // 2 + 1]: those of ``librosa.filters.mel``."""
    limits = _to_mel(np.array([fmin, fmax]), htk)
    centres = _to_hz(np.linspace(limits[0], limits[1], n_mels + 2), htk)
    widths, ramps = np.diff(centres), np.subtract.outer(centres, np.fft.rfftfreq(n_fft, 1 / rate))
    rising, falling = -ramps[:-2] / widths[:-1, None], ramps[2:] / widths[1:, None]
    filters: Array = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    if by_width:
        filters *= (2.0 / (centres[2:] - centres[:-2]))[:, None]
    return filters


def _to_mel(hz: Array, htk: bool) -> Array:
    if htk:
        return 2595.0 * np.log10(1.0 + hz / 700.0)
    return np.where(
        hz < _LOG_START_HZ,
        hz / _HZ_PER_MEL,
        _LOG_START + np.log(np.maximum(hz, _LOG_START_HZ) / _LOG_START_HZ) / _LOG_STEP,
    )


def _to_hz(mel: Array, htk: bool) -> Array:
    if htk:
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return np.where(mel < _LOG_START, _HZ_PER_MEL * mel, _LOG_START_HZ * np.exp(_LOG_STEP * (mel - _LOG_START)))
