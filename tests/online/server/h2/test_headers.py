"""Header blocks: decoding, caching, and the blocks that the server sends."""

from contextlib import suppress

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import NotFound, Unavailable
from penstock.online.server.access.web import WebAccess
from penstock.online.server.grpc.call import GrpcMethod
from penstock.online.server.h2.headers import OK_TRAILERS, RESPONSE, HeaderReader, literal, trailers
from penstock.protocol.h2_frames import ConnectionFault, ErrorCode

METHOD = GrpcMethod(unary=lambda call, data: None)
USUAL = {":method": "POST", ":scheme": "http", ":path": "/a/B", "content-type": "application/grpc"}


def decode(block: bytes) -> list[tuple[str, str]]:
    return [(name, value) for name, value in hpack.Decoder().decode(block)]


def reader(max_header_bytes: int = 8192) -> HeaderReader:
    return HeaderReader({b"/a/B": METHOD}, max_header_bytes, WebAccess())


def test_requests() -> None:
    headers, encoder = reader(), hpack.Encoder()
    more = {"grpc-timeout": "2S", "grpc-encoding": "gzip", "content-length": "7", "k": "v"}
    head = headers.read(encoder.encode(list((USUAL | more).items())))
    assert (head.method, head.timeout_s, head.encoding, head.content_length) == (METHOD, 2, b"gzip", 7)
    assert head.metadata["k"] == "v"
    refused = headers.read(encoder.encode(list((USUAL | {"grpc-encoding": "br"}).items())))
    assert refused.method is None
    assert dict(decode(refused.refusal)) | {"grpc-message": ""} == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-accept-encoding": "identity,deflate,gzip",
        "grpc-status": "12",
        "grpc-message": "",
    }
    late = headers.read(encoder.encode(list((USUAL | {"grpc-timeout": "soon"}).items())))
    assert dict(decode(late.refusal))["grpc-status"] == "3"


def test_the_same_bytes_are_decoded_once() -> None:
    headers, encoder = reader(), hpack.Encoder()
    fields = list(USUAL.items())
    encoder.encode(fields)
    first = headers.read(hpack.Encoder().encode(fields))
    again = [headers.read(encoder.encode(fields)) for _ in range(3)]
    assert again[0] is again[1] is again[2]
    assert again[0].method is first.method


FIELDS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "22", "3" * 900, "4" * 3000]), max_size=4)


@given(st.lists(FIELDS, max_size=12), st.booleans())
def test_blocks_that_are_kept_mean_what_they_say(requests: list[dict[str, str]], is_plain: bool) -> None:
    """Uses a dynamic table that fills and overflows, like the encoder's."""
    headers, encoder = reader(1 << 16), hpack.Encoder()
    for fields in requests:
        if is_plain and "f" in fields:
            encoder.header_table_size = len(fields["f"])
        for _ in range(2):
            head = headers.read(encoder.encode(list((USUAL | fields).items())))
            assert dict(head.metadata) == fields


def test_there_are_bounds_on_what_is_kept() -> None:
    headers = reader()
    for n in range(500):
        block = b"\x83\x86" + literal(b":path", b"/a/B") + literal(b"content-type", b"application/grpc")
        block += literal(b"n", b"%d" % n)
        assert headers.read(block).metadata["n"] == str(n)
    assert len(headers.known) <= 64


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\x80", ErrorCode.COMPRESSION_ERROR),
        (b"\xbf", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x05ab", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x82\xff\xff\x01a", ErrorCode.COMPRESSION_ERROR),
        (b"\x00", ErrorCode.COMPRESSION_ERROR),
        (b"\x7f" * 100, ErrorCode.COMPRESSION_ERROR),
        (b"\x82" * 300, ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_blocks_that_cannot_be_decoded(block: bytes, code: ErrorCode) -> None:
    with pytest.raises(ConnectionFault) as caught:
        reader().read(block)
    assert caught.value.code is code


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_fault(block: bytes) -> None:
    headers = reader()
    with suppress(ConnectionFault):
        assert headers.read(block) == headers.read(block)


@given(st.binary(min_size=1, max_size=20), st.binary(max_size=5000))
def test_literals(name: bytes, value: bytes) -> None:
    assert [tuple(each) for each in hpack.Decoder().decode(literal(name, value), raw=True)] == [(name, value)]


def test_answers() -> None:
    assert decode(RESPONSE) == [(":status", "200"), ("content-type", "application/grpc")]
    assert decode(OK_TRAILERS) == decode(trailers(None)) == [("grpc-status", "0")]
    assert decode(trailers(NotFound("näh", "look"))) == [("grpc-status", "5"), ("grpc-message", "n%C3%A4h (look)")]
    assert decode(trailers(Unavailable("later", retry_after_s=1.5)))[2] == ("grpc-retry-pushback-ms", "1500")
