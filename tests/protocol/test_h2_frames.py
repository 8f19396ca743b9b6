"""Encoding and parsing of frames."""

import pytest

from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode


def test_frames() -> None:
    assert h2.frame(h2.DATA, 1, 5, b"ab") == bytes.fromhex("000002 00 01 00000005") + b"ab"
    assert len(h2.frame(h2.DATA, 0, 1, bytes(70_000))) == 70_009
    assert h2.frame(h2.DATA, 0, 1, bytes(70_000))[:3] == (70_000).to_bytes(3, "big")
    assert h2.settings({3: 7}) == bytes.fromhex("000006 04 00 00000000 0003 00000007")
    assert bytes.fromhex("000000 04 01 00000000") == h2.SETTINGS_ACK
    assert h2.ping(b"12345678", h2.ACK) == bytes.fromhex("000008 06 01 00000000") + b"12345678"
    assert h2.goaway(9, ErrorCode.CANCEL, "x") == bytes.fromhex("000009 07 00 00000000 00000009 00000008") + b"x"
    assert h2.rst_stream(3, ErrorCode.REFUSED_STREAM) == bytes.fromhex("000004 03 00 00000003 00000007")
    assert h2.window_update(0, 256) == bytes.fromhex("000004 08 00 00000000 00000100")


@pytest.mark.parametrize(
    ("payload", "flags", "content"),
    [
        (b"abc", 0, b"abc"),
        (b"\x02abc\0\0", h2.PADDED, b"abc"),
        (b"\x00", h2.PADDED, b""),
        (b"12345abc", h2.PRIORITISED, b"abc"),
        (b"\x0112345a\0", h2.PADDED | h2.PRIORITISED, b"a"),
    ],
)
def test_padding_and_priority_are_taken_off(payload: bytes, flags: int, content: bytes) -> None:
    assert h2.without_padding(payload, flags) == content


@pytest.mark.parametrize(("payload", "flags"), [(b"", h2.PADDED), (b"\x02a", h2.PADDED), (b"1234", h2.PRIORITISED)])
def test_padding_beyond_its_frame(payload: bytes, flags: int) -> None:
    with pytest.raises(ConnectionFault):
        h2.without_padding(payload, flags)


def test_settings_are_read_in_their_order() -> None:
    payload = h2.settings({h2.MAX_FRAME_SIZE: 16384, 99: 1})[9:] + h2.settings({h2.MAX_FRAME_SIZE: 16385})[9:]
    assert h2.parse_settings(payload) == [(5, 16384), (99, 1), (5, 16385)]
