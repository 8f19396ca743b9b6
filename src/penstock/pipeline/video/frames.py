"""Reads the frames of video files with PyAV, which is imported only here.

::

    file ── demux ── decode (FFmpeg's threads) ── sample ── rotate, RGB ── Frame ── caller

Frames are decoded as the caller takes them: FFmpeg's threads work ahead by a few frames, and memory stays constant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from msgspec import Meta

from penstock.errors import InvalidArgument, InvalidInput, NotFound, Unsupported, printable
from penstock.pipeline.video.containers import check_parts, is_fragmented
from penstock.tensor import Array

try:
    import av
    from av.video.reformatter import Interpolation, VideoReformatter
except ImportError as missing:
    raise Unsupported("video needs PyAV", "pip install 'penstock[video]'") from missing

_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,mpegvideo,ogg,flv,asf,ivf,h264,hevc,m4v,obu,mxf,gif,mjpeg"
"""FFmpeg's formats that contain all of their data. Playlists could make it read other files or open connections."""
_TOLERANCE_S, _TOLERANCE_FRAMES = 0.1, 3
"""A clip may end this much before the time that its header declares, or this number of frames if they take longer."""
_LEAST_SELECTED = 0.05
"""An edit list that selects less than one frame, and less than this part of the clip, is damaged: a clip of few slides may be cut."""
_ROUNDING_S = 1e-6
_MOST, _MOST_THREADS = 1e9, 256


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Which frames to read."""

    every: Annotated[int, Meta(ge=1)] = 1
    """Read one of this many frames."""
    fps: Annotated[float, Meta(ge=0)] = 0
    """Read this many frames per second: the first frame at or after each tick. 0: all frames. ``every`` counts the frames read."""
    start: Annotated[float, Meta(ge=0)] = 0
    """Skip frames before this time, in seconds."""
    end: Annotated[float, Meta(gt=0)] | None = None
    """Stop at the first frame at or after this time, in seconds."""
    max_pixels: Annotated[int, Meta(ge=1)] = 1 << 26
    """Maximum number of pixels of a frame. A larger frame is refused before it is decoded."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Threads that decode. 0: one per CPU."""

    def __post_init__(self) -> None:
        for name in ("fps", "start", "end"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MOST:
                raise InvalidArgument(f"'{name}' must be from 0 to {_MOST:.0e}, got {value}")
        if not 0 <= self.threads <= _MOST_THREADS:
            raise InvalidArgument(f"'threads' must be from 0 to {_MOST_THREADS}, got {self.threads}")


class Frame(msgspec.Struct, frozen=True, eq=False):
    """One frame."""

    index: int
    """Number of the frame among those at or after ``start``, from 0."""
    seconds: float
    """Time since the start of the clip."""
    pixels: Array
    """UINT8 of shape [height, width, 3] in RGB, upright. The size may differ from that of other frames."""


class VideoInfo(msgspec.Struct, frozen=True):
    """What the header of a video file declares."""

    codec: str
    width: int
    height: int
    fps: float
    """Average number of frames per second; 0 if unknown."""
    seconds: float
    """Duration; 0 if unknown."""

    def expected_frames(self, sampling: Sampling) -> int:
        """About how many frames ``sampling`` reads; 0 if unknown."""
        end = self.seconds if sampling.end is None else min(self.seconds, sampling.end)
        rate = min(sampling.fps or self.fps, self.fps)
        return math.ceil(max(0.0, end - sampling.start) * rate / sampling.every)


def probe(path: Path) -> VideoInfo:
    """What the header of the file ``path`` declares. Raises NotFound or InvalidInput."""
    with closing(_opened(path)) as container:
        stream = _stream(container, path)
        context = stream.codec_context
        fps = float(stream.average_rate or 0)
        return VideoInfo(context.name, context.width, context.height, fps, _declared_seconds(container, stream))


def read_frames(path: Path, sampling: Sampling | None = None) -> Iterator[Frame]:
    """The frames of the file ``path``, in order of time. Closing the iterator closes the file.

    Colours are converted to RGB by the matrix and range that the clip declares, with the same bits as OpenCV for 8-bit video.
    A frame with rotation is turned upright. Interlaced frames and HDR colours are kept as they are.

    Raises NotFound; InvalidInput if the file is no video, is damaged or truncated, or has frames that are too large. The frames before
    the damage are returned first, except a few that the decoder's threads may lose. Some damage cannot be noticed: truncation in a
    container without a duration, such as MPEG-TS, and headers that still describe a valid clip or fragment, such as one with another
    frame rate. docs/howto/video.md lists what is noticed in each format.
    """
    sampling = sampling or Sampling()
    reformatter, counted, tick = VideoReformatter(), 0, sampling.start
    for index, (seconds, frame) in enumerate(_decoded(path, sampling)):
        if sampling.fps:
            if seconds < tick - _ROUNDING_S:
                continue
            tick = (
                sampling.start
                + (math.floor((seconds - sampling.start + _ROUNDING_S) * sampling.fps) + 1) / sampling.fps
            )
        counted += 1
        if (counted - 1) % sampling.every == 0:
            yield Frame(index, seconds, _pixels(frame, reformatter, path, sampling.max_pixels))


def _decoded(path: Path, sampling: Sampling) -> Iterator[tuple[float, Any]]:
    """Times and frames at or after ``start``. Seeks if that leads to a frame before ``start``, otherwise decodes all frames."""
    if sampling.start:
        frames = _decode(path, sampling, sampling.start)
        try:
            first = next(frames, None)
        except InvalidInput:
            first = None  # some codecs cannot start at the position that the index of the file names
        if first is not None and first[0] <= sampling.start:
            yield from (each for each in chain([first], frames) if each[0] >= sampling.start)
            return
        del frames  # closes its file
    yield from (each for each in _decode(path, sampling, 0) if each[0] >= sampling.start)


def _decode(path: Path, sampling: Sampling, seek_s: float) -> Iterator[tuple[float, Any]]:
    """Times and frames from the last key frame at or before ``seek_s``, or from the start if frames are numbered. Raises
    InvalidInput.
    """
    count, ended, last = 0, 0.0, None
    with closing(_opened(path)) as container:
        stream = _stream(container, path)
        context = stream.codec_context
        _check_size(path, context.width, context.height, sampling.max_pixels)
        stream.thread_type, context.thread_count = "AUTO", sampling.threads
        # Without "explode", damaged frames are patched with pixels of their neighbours.
        context.options = {"err_detect": "explode", "max_pixels": str(sampling.max_pixels)}
        base, origin = stream.time_base, stream.start_time or 0
        try:
            samples = _Samples(container, stream, path)
            if is_sought := seek_s > 0 and not _is_numbered(container, stream):
                container.seek(origin + math.floor(seek_s / base), stream=stream, backward=True)
            for frame in chain.from_iterable(packet.decode() for packet in samples.packets(is_sought)):
                seconds = _seconds(samples.time(frame), stream, count, origin)
                if frame.is_corrupt:
                    raise InvalidInput(f"{_name(path)} is damaged or truncated at {seconds:.3f} s")
                samples.check_order(frame)
                count += 1
                if sampling.end is not None and seconds >= sampling.end:
                    last = samples.position
                    break
                ended = seconds + float((frame.duration or 0) * base)
                yield seconds, frame
        except (av.FFmpegError, ValueError) as error:
            reason = printable(str(getattr(error, "strerror", "") or error))
            raise InvalidInput(f"{_name(path)} is damaged or truncated after {ended:.3f} s: {reason}") from None
        container_format, missing_s = container.format.name, _declared_seconds(container, stream) - ended
        tolerance_s = max(_TOLERANCE_S, _TOLERANCE_FRAMES / float(stream.average_rate or math.inf))
    if not count:
        raise InvalidInput(f"{_name(path)} has no frames", "the file may be truncated")
    if missing_s > tolerance_s and last is None:
        raise InvalidInput(f"{_name(path)} is truncated: it ends {missing_s:.1f} s before the time in its header")
    try:
        check_parts(path, container_format, last)
    except ValueError as error:
        raise InvalidInput(f"{_name(path)} is damaged or truncated: {error}") from None


class _Samples:
    """The packets of a clip. FFmpeg follows the table of samples and the edit list of an MP4 file even if they contradict each other
    because the header is damaged, so that frames are missing. This raises ValueError.
    """

    def __init__(self, container: Any, stream: Any, path: Path) -> None:
        self._container, self._stream, self._path = container, stream, path
        self.position = 0
        """Where the last packet is in the file."""
        self._is_ordered = container.format.name.startswith(("mov", "matroska"))
        self._latest: int | None = None
        self._numbers: deque[int] | None = deque() if _is_numbered(container, stream) else None
        self._is_whole = False
        """True if the file declares its number of samples, and its edit list selects all of them."""
        if container.format.name.startswith("mov") and stream.frames:
            self._check_edits()

    def _check_edits(self) -> None:
        frames, rate, duration = self._stream.frames, self._stream.average_rate, self._stream.duration
        if duration is None or not rate:
            raise ValueError("the header does not tell the duration of the video")
        selected = duration * self._stream.time_base * rate
        shown = sum(not entry.is_discard for entry in self._stream.index_entries)
        if shown > frames and not is_fragmented(self._path):
            raise ValueError(f"the header shows {shown} frames, but the file has {frames}")
        if selected < min(1, frames * _LEAST_SELECTED):
            raise ValueError(f"the header selects {float(selected):.3g} of {frames} frames")
        self._is_whole = selected > frames - 0.5

    def packets(self, is_sought: bool) -> Iterator[Any]:
        """The packets, from the current position. Raises ValueError if some of them are missing, unless ``is_sought``."""
        count, frames = 0, self._stream.frames
        for packet in self._container.demux(self._stream):
            if packet.dts is not None:
                count, self.position = count + 1, max(self.position, packet.pos or 0)
                if self._numbers is not None and packet.size:
                    self._numbers.append(packet.dts)
                if self._is_whole and packet.is_discard:
                    self._check_discarded(packet)
            yield packet
        if self._is_whole and not is_sought and count < frames:
            raise ValueError(f"the file has {count} of the {frames} frames that its header declares")

    def _check_discarded(self, packet: Any) -> None:
        """Raise ValueError if ``packet`` is not shown although the clip is not cut. Writers are inexact at the end."""
        seconds = float((packet.pts or 0) * packet.time_base)
        end = float(self._stream.duration * self._stream.time_base + _TOLERANCE_FRAMES / self._stream.average_rate)
        if not 0 <= seconds <= end:
            raise ValueError(f"the time of a frame, {seconds:.3f} s, is outside of the clip")

    def time(self, frame: Any) -> int | None:
        """The time of ``frame``, the next that is shown. In AVI with B-frames, the next is the one with the next number."""
        if self._numbers is None:
            return cast("int | None", frame.pts)
        return self._numbers.popleft() if self._numbers else None

    def check_order(self, frame: Any) -> None:
        """Raise ValueError if ``frame`` is earlier than the last one, in containers that store the time of each frame."""
        if self._is_ordered and frame.pts is not None:
            if self._latest is not None and frame.pts < self._latest:
                raise ValueError("the frames are not in order of time")
            self._latest = frame.pts


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise NotFound(f"there is no file {_name(path)}")
    options = {"protocol_whitelist": "file", "format_whitelist": _CONTAINERS}
    try:
        return av.open(f"file:{path}", options=options, metadata_errors="replace")
    except (av.FFmpegError, ValueError) as error:
        reason = printable(str(getattr(error, "strerror", "") or error))
        raise InvalidInput(
            f"{_name(path)} cannot be read as video: {reason}", "give MP4, WebM, AVI or MPEG-TS"
        ) from None


def _stream(container: Any, path: Path) -> Any:
    stream = container.streams.best("video")
    if stream is None or stream.codec_context is None:
        raise InvalidInput(f"{_name(path)} has no video that can be decoded")
    return stream


def _is_numbered(container: Any, stream: Any) -> bool:
    """True if packets have their number in the file instead of a time: in AVI. With B-frames, that is not the order of the frames."""
    return bool(container.format.name == "avi" and stream.codec_context.has_b_frames)


def _seconds(time: int | None, stream: Any, count: int, origin: int) -> float:
    """Seconds from the start of the clip to ``time``. Raises InvalidInput if neither the frame nor the clip tells."""
    if time is not None:
        return float((time - origin) * stream.time_base)
    if stream.average_rate:
        return float(count / Fraction(stream.average_rate))
    raise InvalidInput("the frames have no times, and the clip has no rate", "convert the clip to MP4")


def _declared_seconds(container: Any, stream: Any) -> float:
    """The duration of the video in the header; 0 if it is unknown, as in containers that declare one duration for all streams."""
    if container.format.name == "avi" and stream.frames and stream.average_rate:
        return float(stream.frames / stream.average_rate)  # the duration is estimated from the file's size
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        begin = (stream.start_time or 0) * stream.time_base if container.format.name.startswith("matroska") else 0
        return max(0.0, float(container.duration / av.time_base - begin))  # Matroska has the time of the end
    return 0.0


def _pixels(frame: Any, reformatter: VideoReformatter, path: Path, max_pixels: int) -> Array:
    _check_size(path, frame.width, frame.height, max_pixels)
    try:
        converted = reformatter.reformat(frame, format="rgb24", interpolation=Interpolation.BICUBIC, threads=1)
    except (av.FFmpegError, ValueError) as error:
        raise InvalidInput(f"{_name(path)} has pixels that cannot be converted: {printable(str(error))}") from None
    pixels: Array = converted.to_ndarray()
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _check_size(path: Path, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidInput(
            f"{_name(path)} has frames of {width}x{height}, which is more than {max_pixels} pixels",
            "make the frames smaller, or raise max_pixels",
        )


def _name(path: Path) -> str:
    return f"'{printable(path.name)}'"
