"""Decoding of sound files with soundfile, which is imported only here."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from penstock.errors import InvalidInput, Unsupported, printable
from penstock.pipeline.steps.audio.resample import Resampler, finite, resampled
from penstock.pipeline.steps.base import BASE64_HINT, Step, is_base64, wrong_type
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

try:
    import soundfile
except (ImportError, OSError) as missing:
    raise Unsupported("step 'decode_audio' needs soundfile", "pip install 'penstock[audio]'") from missing

_FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "FLAC": "FLAC", "OGG": "OGG", "MP3": "MP3", "MPEG": "MP3"}
"""Formats of libsndfile that are read. Others have no check for truncated files."""
_UNKNOWN_SIZE = 0xFFFFFFFF
_PAGE = 27
"""Size of an Ogg page's header, without the table of segments."""
_LAST_PAGE = 4


class DecodeAudio(Step, frozen=True, kw_only=True):
    """Decode a WAV, FLAC, OGG (Vorbis, Opus) or MP3 file to one channel at a fixed rate.

    Channels are averaged, then the sound is resampled. The samples equal those of ``librosa.load``, bit for bit. The limits are
    checked against the file's header before anything is decoded. A truncated file is refused; in an MP3 file without a Xing header,
    truncation cannot be noticed. An array in place of a file counts as samples at ``rate``.
    """

    inputs: ClassVar = ("file",)
    outputs: ClassVar = ("samples",)

    rate: Annotated[int, Meta(ge=1)]
    """Samples per second of the output."""
    filter: Resampler = "soxr_hq"
    """The filter that resamples, as in the step ``resample``."""
    max_seconds: Annotated[float, Meta(gt=0)] = 600
    """Maximum duration. A longer sound is refused."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 28
    """Maximum memory of the decoded samples of all channels."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """Sound of any length. Raises InvalidConfig unless the input is a file."""
        if inputs["file"].media is not Media.FILE or inputs["file"].many:
            raise wrong_type("decode_audio", "file", "the content of a file", inputs["file"])
        return {"samples": ValueType(Media.AUDIO, DataType.FP32, (-1,), rate=self.rate)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The samples. Raises InvalidInput if the file is damaged, truncated, empty or too long."""
        content: bytes | Array = inputs["file"]
        if isinstance(content, np.ndarray):
            return {"samples": self._decoded(content)}
        try:
            with soundfile.SoundFile(_Content(content)) as file:
                source = file.samplerate
                samples = self._read(file, content)
        except soundfile.SoundFileError as error:
            if is_base64(content):
                raise InvalidInput("the sound is text in base64, not a file", BASE64_HINT) from None
            reason = printable(str(getattr(error, "error_string", error)))
            raise InvalidInput(f"the sound cannot be decoded: {reason}", "send WAV, FLAC, OGG or MP3") from None
        return {"samples": resampled(finite(samples), source, self.rate, self.filter)}

    def _decoded(self, samples: Array) -> Array:
        if samples.dtype != np.float32 or samples.ndim != 1 or not samples.size:
            shown = f"{samples.dtype} of shape {list(samples.shape)}"
            raise InvalidInput(f"the sound is an array {shown}", "give float32 of shape [samples], in -1 to 1")
        if len(samples) > self.max_seconds * self.rate:
            raise InvalidInput(f"the sound lasts {len(samples) / self.rate:.1f} s, the limit is {self.max_seconds:g} s")
        return finite(samples)

    def _read(self, file: soundfile.SoundFile, content: bytes) -> Array:
        """The decoded samples, averaged over the channels."""
        form, count = _FORMATS.get(file.format), file.frames
        if form is None:
            raise InvalidInput(f"the sound has the format {file.format}", "send WAV, FLAC, OGG or MP3")
        if count > self.max_seconds * file.samplerate:
            raise InvalidInput(
                f"the sound lasts {count / file.samplerate:.1f} s, the limit is {self.max_seconds:g} s",
                "send a part of it",
            )
        if count * file.channels * 4 > self.max_bytes:
            raise InvalidInput(
                f"the sound takes {count * file.channels * 4} bytes decoded, the limit is {self.max_bytes}",
                "send fewer channels, a lower rate, or a part of it",
            )
        if (form == "WAV" and _is_cut_wav(content)) or (form == "OGG" and _is_cut_ogg(content)):
            raise InvalidInput(f"the sound is truncated after {count / file.samplerate:.1f} s", "send the whole file")
        if count < 1:
            raise InvalidInput("the sound has no samples", "send a sound that is not empty")
        samples: Array = file.read(frames=count, dtype="float32")
        if len(samples) < count:
            raise InvalidInput(
                f"the sound is truncated: it has {len(samples)} of {count} samples", "send the whole file"
            )
        return samples if samples.ndim == 1 else np.mean(samples.T, axis=0)


class _Content(io.BytesIO):
    """A file in memory. libsndfile seeks to negative positions in damaged files."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return super().seek(max(0, offset) if whence == 0 else offset, whence)


def _is_cut_wav(content: bytes) -> bool:
    """True if the samples end before the size in the header. Streams have a header without a size."""
    if content[:4] != b"RIFF":  # RF64 has its sizes elsewhere
        return False
    position = 12
    while position + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, position)
        position += 8
        if name == b"data":
            return bool(size != _UNKNOWN_SIZE and position + size > len(content))
        position += size + size % 2
    return True


def _is_cut_ogg(content: bytes) -> bool:
    """True if the last page is incomplete, or is not marked as the last."""
    start = content.rfind(b"OggS")
    header = content[start : start + _PAGE]
    if len(header) < _PAGE or not header[5] & _LAST_PAGE:
        return True
    table = content[start + _PAGE : start + _PAGE + header[-1]]
    return len(content) < start + _PAGE + header[-1] + sum(table)
