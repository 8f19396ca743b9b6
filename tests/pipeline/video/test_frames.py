"""Frames of video files, against OpenCV, and files that are damaged."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clips import KINDS, RATE, pictures, write_clip
from penstock.errors import InvalidArgument, InvalidInput, NotFound
from penstock.pipeline.video import Sampling, VideoInfo, probe, read_frames
from penstock.pipeline.video.containers import check_parts

_ODD = (float("nan"), float("inf"), -1.0)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clip of two seconds in each format."""
    folder = tmp_path_factory.mktemp("clips")
    return {kind: write_clip(folder / f"clip.{kind}") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_equal_those_of_opencv(clips: dict[str, Path], kind: str) -> None:
    capture, count = cv2.VideoCapture(str(clips[kind])), 0
    for frame in read_frames(clips[kind]):
        is_read, expected = capture.read()
        assert is_read
        assert np.array_equal(frame.pixels, expected[:, :, ::-1])
        assert frame.index == count
        assert frame.seconds == pytest.approx(count / RATE, abs=1e-3)
        count += 1
    assert count == 60
    info = probe(clips[kind])
    assert (info.width, info.height, info.fps) == (160, 96, RATE)
    assert info.seconds == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(every=7),
        Sampling(fps=4),
        Sampling(fps=4, every=2),
        Sampling(fps=1000),
        Sampling(start=0.75, end=1.25),
        Sampling(start=1.0, every=3),
        Sampling(start=1.5, fps=10, threads=1),
        Sampling(start=60.0),
    ],
    ids=str,
)
def test_sampling_takes_the_frames_of_a_full_read(clips: dict[str, Path], kind: str, sampling: Sampling) -> None:
    end = sampling.end or 1e9
    within = [frame for frame in read_frames(clips[kind]) if sampling.start <= frame.seconds < end]
    if sampling.fps:
        ticks = [sampling.start + number / sampling.fps for number in range(int(sampling.fps * 3))]
        at = {next((i for i, frame in enumerate(within) if frame.seconds >= tick - 1e-6), None) for tick in ticks}
        within = [within[position] for position in sorted(position for position in at if position is not None)]
    expected, found = within[:: sampling.every], list(read_frames(clips[kind], sampling))
    assert [frame.seconds for frame in found] == [frame.seconds for frame in expected]
    for one, two in zip(found, expected, strict=True):
        assert np.array_equal(one.pixels, two.pixels)
    assert abs(probe(clips[kind]).expected_frames(sampling) - len(found)) <= 2


@pytest.mark.parametrize("kind", ["mp4", "webm", "avi"])
def test_a_truncated_clip_returns_its_frames_and_an_error(clips: dict[str, Path], kind: str, tmp_path: Path) -> None:
    content = clips[kind].read_bytes()
    for part in (0.0, 0.01, 0.3, 0.6, 0.8):
        cut = tmp_path / f"cut.{kind}"
        cut.write_bytes(content[: int(len(content) * part)])
        indices: list[int] = []
        with pytest.raises(InvalidInput, match=r"'cut\.\w+' (is (damaged or )?truncated|cannot be read|has no)"):
            indices.extend(frame.index for frame in read_frames(cut))
        assert len(indices) < 60
        assert indices == list(range(len(indices)))
        assert indices or part < 0.6


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1),
)
def test_damage_gives_frames_or_a_clear_error(
    clips: dict[str, Path], kind: str, changes: list[tuple[float, int]], tmp_path: Path
) -> None:
    content = bytearray(clips[kind].read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    path = tmp_path / f"damaged.{kind}"
    path.write_bytes(content)
    with suppress(InvalidInput):
        for frame in read_frames(path, Sampling(max_pixels=1 << 16)):
            assert 0 < frame.pixels.shape[0] * frame.pixels.shape[1] <= 1 << 16


_ENDS = {"mp4": b"mdat", "avi": b"JUNK", "webm": b"\x1f\x43\xb6\x75"}
"""The name after the header."""
_OTHER_CLIPS = (b"elst", b"stts", b"mvhd", b"tkhd", b"stsd", b"\x1f\x43\xb6\x75")
"""Boxes that describe another valid clip if they are damaged: cut, with other times, turned, or with other colours."""


@pytest.mark.parametrize("kind", sorted(_ENDS))
def test_a_damaged_header_gives_all_frames_or_an_error(kind: str, tmp_path: Path) -> None:
    clip, damaged = write_clip(tmp_path / f"clip.{kind}", 12, (64, 48)), tmp_path / f"damaged.{kind}"
    wanted, content = [frame.pixels for frame in read_frames(clip)], clip.read_bytes()
    refused = 0
    for place in range(content.index(_ENDS[kind])):
        changed = bytearray(content)
        changed[place] ^= (0xFF, 0x01, 0x80, content[place] or 0x10)[place % 4]
        damaged.write_bytes(changed)
        try:
            found = [frame.pixels for frame in read_frames(damaged, Sampling(threads=1, max_pixels=64 * 48))]
        except InvalidInput:
            refused += 1
            continue
        if not any(0 <= place - content.find(box) < 200 for box in _OTHER_CLIPS):
            assert len(found) == len(wanted), place
            assert all(map(np.array_equal, found, wanted)), place
    assert refused


def _patched(clip: Path, box: bytes, offset: int, value: int) -> Path:
    content = bytearray(clip.read_bytes())
    struct.pack_into(">I", content, content.index(box) + 4 + offset, value)
    path = clip.with_name(f"patched-{box.decode()}.mp4")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("box", "offset", "value", "message"),
    [
        (b"mvhd", 12, 1 << 24, r"selects [\d.e-]+ of 60 frames"),  # time scale
        (b"mdhd", 12, 0, r"selects [\d.e-]+ of 60 frames"),
        (b"ctts", 12, 1 << 24, "is outside of the clip"),
        (b"ctts", 8 + 8 * 3, 255, "not in order of time"),
        (b"mdhd", -4, 0, "does not tell the duration"),  # the name of the box
        (b"stsz", 12 + 4 * 50, 1 << 31, "has 50 of the 60 frames that its header"),
        (b"stsz", 12 + 4 * 50, 1 << 24, r"has 51 of the 60 frames that its header|Invalid data"),
    ],
)
def test_an_mp4_file_that_contradicts_itself(
    clips: dict[str, Path], box: bytes, offset: int, value: int, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        list(read_frames(_patched(clips["mp4"], box, offset, value)))


@pytest.mark.parametrize("flags", ["faststart", "frag_keyframe", "frag_keyframe+empty_moov", "negative_cts_offsets"])
@pytest.mark.parametrize("start", [0, 0.03, 0.5, 1.7])
def test_a_clip_cut_by_its_edit_list_is_no_damage(clips: dict[str, Path], start: float, flags: str) -> None:
    path = clips["mp4"].with_name(f"cut-{flags}.mp4")
    with av.open(str(clips["mp4"])) as clip, av.open(str(path), "w", options={"movflags": flags}) as cut:
        stream = clip.streams.video[0]
        copied, skipped = cut.add_stream_from_template(stream), int(start / (stream.time_base or 1))
        clip.seek(skipped, stream=stream, backward=True)
        for packet in clip.demux(stream):
            if packet.dts is not None and packet.pts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - skipped, packet.dts - skipped, copied
                cut.mux(packet)
    capture, count = cv2.VideoCapture(str(path)), 0
    while capture.read()[0]:
        count += 1
    assert len(list(read_frames(path))) == count >= 60 - start * RATE - 1


@pytest.mark.parametrize("b_frames", ["0", "2"])
@pytest.mark.parametrize(
    "times",
    [
        [0, 0.03, 0.5, 0.51, 2, 7, 7.01, 7.02, 30],
        [0, 20, 40],
        [0.5 + number / RATE for number in range(20)],  # the edit list begins with an empty part
        [number / 2000 for number in range(20)],
        [0, 0.001],
        [0],
    ],
    ids=["uneven", "slides", "late", "fast", "two", "one"],
)
def test_unusual_times_are_no_damage(times: list[float], b_frames: str, tmp_path: Path) -> None:
    base = Fraction(1, 90_000)
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream: Any = container.add_stream("libx264", rate=RATE, options={"bf": b_frames})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = base
        for time, pixels in zip(times, pictures(len(times), 64, 48), strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time / base), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = [frame.seconds for frame in read_frames(tmp_path / "clip.mp4")]
    assert found == pytest.approx([time - times[0] for time in times], abs=1e-3)


_OPTIONS = {codec: {"g": "12", "bf": "2"} for codec in ("libx264", "mpeg4")}


def _encoded(path: Path, shades: list[int], first: int = 0, codec: str = "libx264", flags: str = "") -> Path:
    """A clip of grey frames with these shades, which begins ``first`` frames late."""
    with av.open(str(path), "w", options={"movflags": flags} if flags else {}) as container:
        stream: Any = container.add_stream(codec, rate=RATE, options=_OPTIONS.get(codec, {}))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb8" if codec == "gif" else "yuv420p"
        for number, shade in enumerate(shades):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number + first, Fraction(1, RATE)
            container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("kind", ["mkv", "flv", "mp4", "ts"])
def test_a_clip_may_begin_late(kind: str, tmp_path: Path) -> None:
    path = _encoded(tmp_path / f"late.{kind}", [100] * 60, first=300)
    assert [frame.seconds for frame in read_frames(path)] == pytest.approx([n / RATE for n in range(60)], abs=1e-3)
    assert probe(path).seconds == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("start", [0, 0.5, 1])
def test_times_in_avi_with_b_frames_are_those_of_the_frames(codec: str, start: float, tmp_path: Path) -> None:
    path = _encoded(tmp_path / "clip.avi", [4 * number for number in range(60)], codec=codec)
    found = list(read_frames(path, Sampling(start=start, end=1.5)))
    numbers = list(range(round(start * RATE), 45))
    assert [frame.seconds for frame in found] == pytest.approx([number / RATE for number in numbers])
    shades = [float(frame.pixels.mean()) for frame in found]
    assert shades == sorted(shades)
    assert shades == pytest.approx([4 * number for number in numbers], abs=6)  # the codecs are lossy
    assert len(list(read_frames(path, Sampling(fps=15)))) == 30


def _without(content: bytes, start: int, end: int) -> bytes:
    return content[:start] + content[end:]


def _zeroed(content: bytes, start: int, end: int) -> bytes:
    return content[:start] + bytes(end - start) + content[end:]


def _in_fragment(content: bytes, number: int) -> int:
    """The place of the box that has the samples of a fragment."""
    place = 0
    for _ in range(number):
        place = content.index(b"moof", place + 1)
    return content.index(b"mdat", place)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("mp4", lambda b: b[: _in_fragment(b, 3) + 20], "shorter than it declares"),
        ("mp4", lambda b: _zeroed(b, b.index(b"moof", _in_fragment(b, 2)) - 4, _in_fragment(b, 3)), "no box begins"),
        ("wmv", lambda b: b[: len(b) // 3], "shorter than it declares"),
        ("wmv", lambda b: b[:-1], "shorter than it declares"),
        ("webm", lambda b: _without(b, len(b) // 2, len(b) // 2 + 200), "no element begins|shorter than it declares"),
        ("webm", lambda b: _zeroed(b, len(b) // 2, len(b) // 2 + 200), "no element begins"),
        ("gif", lambda b: b[: len(b) // 4], "ends within its last part"),
        ("gif", lambda b: b[:-1], "ends within its last part"),
    ],
)
def test_parts_that_do_not_fit(kind: str, damage: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    codec = {"mp4": "libx264", "wmv": "wmv2", "webm": "libvpx-vp9", "gif": "gif"}[kind]
    whole = _encoded(
        tmp_path / f"clip.{kind}",
        [4 * n for n in range(60)],
        codec=codec,
        flags="frag_keyframe+empty_moov" if kind == "mp4" else "",
    )
    assert len(list(read_frames(whole))) == 60
    damaged = tmp_path / f"damaged.{kind}"
    damaged.write_bytes(damage(whole.read_bytes()))
    assert damaged.read_bytes() != whole.read_bytes()
    form = {"mp4": "mov", "wmv": "asf", "webm": "matroska,webm", "gif": "gif"}[kind]
    check_parts(whole, form, None)
    with pytest.raises(ValueError, match=message):
        check_parts(damaged, form, None)
    with pytest.raises(InvalidInput, match=r"'damaged\.\w+' is (damaged or )?truncated"):  # or FFmpeg has noticed it
        list(read_frames(damaged))


def test_damage_after_the_end_is_not_read(tmp_path: Path) -> None:
    whole, cut = _encoded(tmp_path / "clip.mp4", [100] * 60, flags="frag_keyframe+empty_moov"), tmp_path / "cut.mp4"
    cut.write_bytes(whole.read_bytes()[: _in_fragment(whole.read_bytes(), 4) + 20])
    assert len(list(read_frames(cut, Sampling(end=0.2, threads=1)))) == 6


def test_an_edit_list_that_repeats_the_clip(tmp_path: Path) -> None:
    late = _encoded(tmp_path / "late.mp4", [100] * 60, first=300)
    with pytest.raises(InvalidInput, match="the header shows 1[12][0-9] frames, but the file has 60"):
        list(read_frames(_patched(late, b"elst", 12, 0)))  # the empty part becomes one of media


def test_frames_may_change_their_size(tmp_path: Path) -> None:
    small, large = write_clip(tmp_path / "a.ts", 20), write_clip(tmp_path / "b.ts", 20, (320, 192))
    both = tmp_path / "both.ts"
    both.write_bytes(small.read_bytes() + large.read_bytes())
    shapes = [frame.pixels.shape for frame in read_frames(both)]
    assert set(shapes) == {(96, 160, 3), (192, 320, 3)}
    with pytest.raises(InvalidInput, match="320x192|damaged"):
        list(read_frames(both, Sampling(max_pixels=160 * 96)))


def test_large_frames_are_refused(clips: dict[str, Path]) -> None:
    with pytest.raises(InvalidInput, match="has frames of 160x96, which is more than 15359 pixels"):
        next(read_frames(clips["mp4"], Sampling(max_pixels=15_359)))


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_rotated_clips_are_turned_upright(
    clips: dict[str, Path], matrix: tuple[int, ...], turns: int, tmp_path: Path
) -> None:
    content, (a, b, c, d) = bytearray(clips["mp4"].read_bytes()), matrix
    place = content.index(b"tkhd") + 44
    one = 1 << 16
    content[place : place + 36] = struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
    path = tmp_path / "turned.mp4"
    path.write_bytes(content)
    plain, turned = next(read_frames(clips["mp4"])), next(read_frames(path))
    assert np.array_equal(turned.pixels, np.rot90(plain.pixels, turns))
    _, expected = cv2.VideoCapture(str(path)).read()  # which also turns it
    assert np.array_equal(turned.pixels, expected[:, :, ::-1])


def test_other_files_are_refused(tmp_path: Path, clips: dict[str, Path]) -> None:
    with pytest.raises(NotFound, match=r"there is no file 'none\.mp4'"):
        list(read_frames(tmp_path / "none.mp4"))
    playlists = {
        "a.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{clips['ts']}\n#EXT-X-ENDLIST\n",
        "a.ffconcat": f"ffconcat version 1.0\nfile '{clips['mp4']}'\n",
        "a.txt": "hello",
        "empty.mp4": "",
    }
    for name, text in playlists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidInput, match=f"'{name}' cannot be read as video"):
            list(read_frames(tmp_path / name))
    sound = tmp_path / "sound.mp4"
    with av.open(str(sound), "w") as container:
        stream: Any = container.add_stream("aac", rate=8_000)
        stream.layout = "mono"
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.rate, silence.time_base = 8_000, Fraction(1, 8_000)
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    with pytest.raises(InvalidInput, match="has no video"):
        probe(sound)


def test_frames_are_not_collected(tmp_path: Path) -> None:
    path, peaks = write_clip(tmp_path / "long.mp4", 300), []
    for count in (30, 300):
        tracemalloc.start()
        for frame, _ in zip(read_frames(path), range(count), strict=False):
            assert frame.pixels.size
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 200_000, "a frame takes 46,080 bytes"


def test_expected_frames() -> None:
    info = VideoInfo("h264", 16, 16, 30.0, 10.0)
    assert info.expected_frames(Sampling()) == 300
    assert info.expected_frames(Sampling(every=2, start=4, end=6)) == 30
    assert info.expected_frames(Sampling(fps=60)) == 300
    assert info.expected_frames(Sampling(start=20)) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *[({name: value}, f"'{name}' must be from 0 to 1e\\+09") for name in ("fps", "start", "end") for value in _ODD],
        ({"threads": 100_000}, "'threads' must be from 0 to 256, got 100000"),
    ],
)
def test_wrong_samplings_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Sampling(**wrong)
