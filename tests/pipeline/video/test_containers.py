"""Walks through the parts of containers. ``test_frames`` damages real clips."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.video.containers import check_parts, is_fragmented

_BOXES = st.lists(
    st.tuples(st.sampled_from([b"free", b"moof", b"mdat", b"udta"]), st.binary(max_size=40)), min_size=1, max_size=6
)

_HEADER = b"moov", b"\0\0\0\x08mvex"
"""The header of a fragmented file."""


def _file(boxes: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, list[int]]:
    """An MP4 file of these boxes, and where they end."""
    parts = [(8 + len(content)).to_bytes(4, "big") + name + content for name, content in boxes]
    return b"".join(parts), list(accumulate(map(len, parts)))


@given(_BOXES, st.data())
def test_a_fragmented_file_that_is_cut_within_a_box_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, boxes: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    content, ends = _file([_HEADER, *boxes])
    path = tmp_path_factory.mktemp("boxes") / "clip.mp4"
    path.write_bytes(content)
    check_parts(path, "mov,mp4", None)
    check_parts(path, "mp3", None)  # has no walk
    cut = data.draw(st.integers(ends[0] + 1, len(content) - 1).filter(lambda place: place not in ends), "cut")
    path.write_bytes(content[:cut])
    with pytest.raises(ValueError, match=r"shorter|ends within|no box"):
        check_parts(path, "mov,mp4", None)


@pytest.mark.parametrize("extends", [True, False])
def test_fragments_are_announced_in_the_header(tmp_path: Path, extends: bool) -> None:
    content, _ = _file([(b"ftyp", b"isom"), _HEADER if extends else (b"moov", b""), (b"mdat", b"mvex")])
    (tmp_path / "clip.mp4").write_bytes(content)
    assert is_fragmented(tmp_path / "clip.mp4") == extends


@pytest.mark.parametrize("form", ["matroska,webm", "gif", "asf", "mov,mp4"])
def test_noise_ends_with_an_error_or_without(tmp_path: Path, form: str) -> None:
    """Only ValueError may be raised."""
    for seed in range(200):
        (path := tmp_path / "noise").write_bytes(bytes((seed * 37 + n * n) % 256 for n in range(1 + seed)))
        with suppress(ValueError):
            check_parts(path, form, None)
