from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.online.server.body_buffer import BodyBuffer


@given(content=st.binary(min_size=1, max_size=5000), cuts=st.lists(st.integers(1, 700)), direct=st.booleans())
def test_what_arrives_is_what_can_be_read(content: bytes, cuts: list[int], direct: bool) -> None:
    room = BodyBuffer(len(content))
    for cut in [*cuts, len(content)]:
        piece = content[room.filled : room.filled + cut]
        if direct and room.spare:
            piece = piece[: room.spare]
            room.next()[: len(piece)] = piece
            room.advance(len(piece))
        else:
            room.add(piece)
        assert bytes(room.content()) == content[: room.filled]
        assert room.filled + room.spare <= min(len(content), 8 * max(room.filled, 1))
        room.grow()
    while room.filled < len(content):
        room.add(content[room.filled : room.filled + 100])
    assert bytes(room.content()) == content
    assert room.content().readonly
    assert room.spare == 0


@given(size=st.integers(1, 3000), aligned=st.integers(0, 3000), first=st.integers(0, 100))
def test_the_memory_is_announced_and_its_tensors_are_aligned(size: int, aligned: int, first: int) -> None:
    room = BodyBuffer(size, aligned)
    for piece in (bytes(min(first, size)), bytes(size - min(first, size))):
        wanted = room.wanted(len(piece))
        room.add(piece)
        assert room.filled + room.spare == wanted
    address = np.frombuffer(room.content(), np.uint8).__array_interface__["data"][0]
    assert (address + aligned) % 64 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not report huge pages")
def test_the_memory_has_no_huge_pages() -> None:
    room = BodyBuffer(16 << 20)
    room.add(bytes(4 << 20))
    inside = np.frombuffer(room.content(), np.uint8).__array_interface__["data"][0] + (1 << 20)
    mappings = re.findall(
        r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL
    )
    (flags,) = [flags for start, stop, flags in mappings if int(start, 16) <= inside < int(stop, 16)]
    assert "hg" not in flags.split()
