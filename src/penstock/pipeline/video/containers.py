"""Damage that FFmpeg skips without an error: a container whose parts do not follow each other as their sizes say.

A walk goes from the start of a part to the next, and raises ValueError where no part can be.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

_MATROSKA = {
    *(0x1A45DFA3, 0x18538067, 0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1F43B675, 0x1941A469, 0x1043A770),
    *(0x1254C367, 0x1B538667, 0xE7, 0x5854, 0xA7, 0xAB, 0xA3, 0xA0, 0xAF, 0xEC, 0xBF),
}
"""The elements of a file, of a segment and of a cluster (RFC 9559)."""
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
"""The name of the object that tells the size of the file, at byte 40, and flags, at byte 88."""
_ASF_HEADER_BYTES, _ASF_IS_LIVE = 1 << 16, 1
_GIF_TRAILER, _GIF_IMAGE, _GIF_EXTENSION = 0x3B, 0x2C, 0x21


def check_parts(path: Path, form: str, last: int | None) -> None:
    """Raise ValueError if the parts of the file ``path`` up to the byte ``last`` do not fit, in FFmpeg's format ``form``."""
    walk = next((walk for prefix, walk in _WALKS.items() if form.startswith(prefix)), None)
    if walk is None:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            for end in walk(content):
                if last is not None and end > last:
                    return
                if end > len(content):
                    raise ValueError(f"the file is {end - len(content)} bytes shorter than it declares")
        except IndexError:
            raise ValueError("the file ends within its last part") from None


def is_fragmented(path: Path) -> bool:
    """True if the MP4 file ``path`` may have more samples than the table in its header."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name, start, end in _boxes(content):
            if name == b"moov":
                return content.find(b"mvex", start, end) >= 0
    return False


def _boxes(content: mmap.mmap) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the boxes of an MP4 file. The name is empty where no box can be."""
    place = 0
    while place < len(content):
        header, name = content[place : place + 16], content[place + 4 : place + 8]
        size = int.from_bytes(header[:4])
        if size == 1:
            size = int.from_bytes(header[8:16])
        elif size == 0:
            size = len(content) - place
        if size < 8 or len(name) < 4 or not name.decode("latin-1").isprintable():
            name, size = b"", 8
        yield name, place, place + size
        place += size if name else len(content)


def _mp4(content: mmap.mmap) -> Iterator[int]:
    """The boxes of a fragmented file. The samples of any other are counted in the table of its header."""
    is_split = False
    for name, start, end in _boxes(content):
        is_split = is_split or (name == b"moov" and content.find(b"mvex", start, end) >= 0)
        if is_split and not name:
            raise ValueError(f"no box begins at byte {start}")
        if is_split:
            yield end


def _matroska(content: mmap.mmap) -> Iterator[int]:
    place = end = 0
    while place < len(content):
        start, width = place, 9 - content[place].bit_length()
        name = int.from_bytes(content[place : place + width])
        if name not in _MATROSKA:
            raise ValueError(f"no element begins at byte {start}")
        place += width
        width = 9 - content[place].bit_length()
        unknown = (1 << 7 * width) - 1
        size = int.from_bytes(content[place : place + width]) & unknown
        place += width
        if name not in (_SEGMENT, _CLUSTER):
            place += size
            yield place
        elif size != unknown:
            end = max(end, place + size)
    yield end


def _asf(content: mmap.mmap) -> Iterator[int]:
    place = content.find(_ASF_FILE, 0, _ASF_HEADER_BYTES)
    if place >= 0 and not content[place + 88] & _ASF_IS_LIVE:
        yield int.from_bytes(content[place + 40 : place + 48], "little")


def _gif(content: mmap.mmap) -> Iterator[int]:
    place = 13 + _table_bytes(content[10])
    while (kind := content[place]) != _GIF_TRAILER:
        if kind not in (_GIF_IMAGE, _GIF_EXTENSION):
            raise ValueError(f"no block begins at byte {place}")
        place += 2 if kind == _GIF_EXTENSION else 11 + _table_bytes(content[place + 9])
        while size := content[place]:
            place += 1 + size
        place += 1
        yield place


def _table_bytes(flags: int) -> int:
    """Length of the table of colours in a GIF file."""
    return 6 << (flags & 7) if flags & 0x80 else 0


_WALKS: dict[str, Callable[[mmap.mmap], Iterator[int]]] = {"mov": _mp4, "matroska": _matroska, "asf": _asf, "gif": _gif}
"""The walk of each of FFmpeg's formats, by the start of its name. A walk gives the end of each part."""
