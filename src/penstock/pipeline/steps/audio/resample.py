"""Resampling of sound with soxr, which is imported only here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from penstock.errors import InvalidConfig, InvalidInput, Unsupported
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

try:
    import soxr
except ImportError as missing:
    raise Unsupported("resampling needs soxr", "pip install 'penstock[audio]'") from missing

Resampler = Literal["soxr_vhq", "soxr_hq", "soxr_mq", "soxr_lq", "polyphase"]


class Resample(Step, frozen=True, kw_only=True):
    """Resample a sound to another rate.

    The samples equal those of ``librosa.resample`` with the ``res_type`` of the same name, bit for bit.
    """

    source_rate: Annotated[int, Meta(ge=1)]
    """Samples per second of the input."""
    rate: Annotated[int, Meta(ge=1)]
    """Samples per second of the output."""
    filter: Resampler = "soxr_hq"
    """Quality of soxr, or ``polyphase``: ``scipy.signal.resample_poly``, which needs scipy."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Sound with the new rate. Raises InvalidConfig unless the input is sound with ``source_rate``."""
        given = inputs["value"]
        check_is_sound("resample", given, self.source_rate)
        length = given.shape[0] if given.shape[0] < 0 else resampled_length(given.shape[0], self.source_rate, self.rate)
        return {"value": replace(given, media=Media.AUDIO, shape=(length,), rate=self.rate)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The resampled sound. Raises InvalidInput if a sample is not finite."""
        return {"value": resampled(finite(inputs["value"]), self.source_rate, self.rate, self.filter)}


def check_is_sound(step: str, given: ValueType, rate: int = 0) -> None:
    """Raises InvalidConfig unless ``given`` is a vector of FP32 samples, with ``rate`` samples per second if both rates are known."""
    if given.many or given.datatype is not DataType.FP32 or len(given.shape) != 1:
        raise wrong_type(step, "value", "sound (FP32 of shape [samples])", given)
    if rate and given.rate and rate != given.rate:
        raise InvalidConfig(
            f"step '{step}' expects {rate} samples per second, but its input has {given.rate}", "make the rates equal"
        )


def finite(samples: Array) -> Array:
    """``samples``, or anything that has been computed from them. Raises InvalidInput if one is NaN or infinite."""
    if not np.isfinite(samples).all():
        raise InvalidInput("the sound has samples that are NaN or infinite", "check how they are computed")
    return samples


def resampled_length(count: int, source: int, rate: int) -> int:
    """Number of samples after resampling."""
    return math.ceil(count * (rate / source))


def resampled(samples: Array, source: int, rate: int, quality: Resampler) -> Array:
    """``samples`` at ``rate`` instead of ``source`` samples per second."""
    if source == rate or not len(samples):
        return samples
    if quality == "polyphase":
        divisor = math.gcd(source, rate)
        found = _polyphase()(samples, rate // divisor, source // divisor)
    else:
        found = soxr.resample(samples, source, rate, quality=quality)
    count = resampled_length(len(samples), source, rate)
    if len(found) < count:
        found = np.pad(found, (0, count - len(found)))
    return np.asarray(found[:count], np.float32)


def _polyphase() -> Callable[..., Array]:
    try:
        from scipy.signal import resample_poly  # noqa: PLC0415 - no extra includes scipy, for one filter
    except ImportError:
        raise Unsupported("the filter 'polyphase' needs scipy", "pip install scipy, or use a filter of soxr") from None
    found: Callable[..., Array] = resample_poly
    return found
