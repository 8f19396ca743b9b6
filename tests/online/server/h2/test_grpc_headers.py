"""Timeouts, metadata and status messages in gRPC's encoding."""

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidArgument
from penstock.online.server.h2.grpc_headers import encode_message, parse_metadata, parse_timeout


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"250m", 0.25), (b"5u", 5e-6), (b"99999999n", 0.099999999), (b"0S", 0)],
)
def test_timeouts(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b" 1S", b"1 S"])
def test_what_is_no_timeout(value: bytes) -> None:
    with pytest.raises(InvalidArgument, match="grpc-timeout"):
        parse_timeout(value)


@given(st.text(max_size=200))
def test_messages_survive(message: str) -> None:
    encoded = encode_message(message)
    assert all(0x20 <= byte < 0x7F for byte in encoded)
    assert unquote(encoded.decode()) == message.encode(errors="replace").decode()


def test_long_messages_are_cut_between_characters() -> None:
    encoded = encode_message("ä" * 5000)
    assert len(encoded) <= 4096
    assert set(unquote(encoded.decode())) == {"ä"}


def test_metadata() -> None:
    metadata = parse_metadata(
        [
            (b":path", b"/x"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"grpc-timeout", b"1S"),
            (b"user-agent", b"me"),
            (b"key", b"one"),
            (b"key", b"two"),
            (b"padded-bin", b"AAE="),
            (b"bare-bin", b"AAE"),
            (b"many-bin", b"AAE,/////w"),
            (b"wrong-bin", b"!"),
            (b"latin", b"\xe4"),
        ]
    )
    assert metadata == {
        "user-agent": "me",
        "key": "one,two",
        "padded-bin": b"\0\1",
        "bare-bin": b"\0\1",
        "many-bin": b"\0\1",
        "wrong-bin": b"",
        "latin": "ä",
    }
