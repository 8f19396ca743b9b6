"""The requirements of RFC 7541 for decoders, by section, tested on a connection. They include h2spec's cases for HPACK."""

from collections.abc import Callable

import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from h2_conformance import Expect, answered, ended, reset, run
from h2_servers import ECHO, data_frame, message
from h2_wire import Client
from penstock.online.server.h2.headers import literal
from penstock.protocol import h2_frames as h2
from penstock.protocol.h2_frames import ErrorCode

COMPRESSION, PROTOCOL = ErrorCode.COMPRESSION_ERROR, ErrorCode.PROTOCOL_ERROR
START = b"\x83\x86"  # :method POST, :scheme http
PATH, KIND = literal(b":path", ECHO.encode()), literal(b"content-type", b"application/grpc")
BLOCK = START + PATH + KIND
LAST_STATIC = 61

Blocks = Callable[[Client], list[bytes]]


def huffman(text: bytes) -> bytes:
    return bytes(HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(text))


def text(value: bytes, is_coded: bool) -> bytes:
    """A string literal of less than 127 bytes."""
    return bytes((0x80 | len(huffman(value)),)) + huffman(value) if is_coded else bytes((len(value),)) + value


def number(prefix: int, first: int, value: int) -> bytes:
    """An integer with a prefix of ``prefix`` bits (section 5.1); ``first`` has the bits before it."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((first | value,))
    value -= most
    rest = []
    while value >= 128:
        rest.append(value & 127 | 128)
        value >>= 7
    return bytes((first | most, *rest, value))


def one(block: bytes) -> Blocks:
    return lambda c: [block]


FORMS = {
    "6.2.1 with incremental indexing": (6, 0x40),
    "6.2.2 without indexing": (4, 0x00),
    "6.2.3 never indexed": (4, 0x10),
}
LITERALS: dict[str, tuple[Blocks, Expect]] = {
    f"{name}, {'indexed' if index else 'new'} name, {'Huffman' if is_coded else 'plain'}": (
        one(
            START
            + number(prefix, first, index)
            + (b"" if index else text(b":path", is_coded))
            + text(ECHO.encode(), is_coded)
            + KIND
        ),
        answered(1),
    )
    for name, (prefix, first) in FORMS.items()
    for index in (0, 4)
    for is_coded in (False, True)
}
FIRST = START + b"\x44" + text(ECHO.encode(), False) + b"\x5f" + text(b"application/grpc", False)
"""Puts path and type into the dynamic table, at 63 and 62."""
AGAIN = START + b"\xbf\xbe"
CASES: dict[str, tuple[Blocks, Expect]] = {
    **LITERALS,
    "2.3.2 entries of the dynamic table": (lambda c: [FIRST, AGAIN, AGAIN], answered(1, 3, 5)),
    "2.3.3 an indexed field beyond the tables": (one(BLOCK + number(7, 0x80, LAST_STATIC + 9)), ended(COMPRESSION)),
    "2.3.3 a name beyond the tables": (one(BLOCK + number(6, 0x40, LAST_STATIC + 9) + b"\x01a"), ended(COMPRESSION)),
    "2.3.3 the first entry of an empty table": (one(BLOCK + b"\xbe"), ended(COMPRESSION)),
    "3.2 a field that is cut off": (one(BLOCK + b"\x40\x05ab"), ended(COMPRESSION)),
    "4.2 a size at the start": (one(b"\x20" + BLOCK), answered(1)),
    "4.2 two sizes at the start": (one(b"\x20\x3f\xe1\x1f" + BLOCK), answered(1)),
    "4.2 a size at the end": (one(BLOCK + b"\x20"), ended(COMPRESSION)),
    "4.2 a size between two fields": (one(START + b"\x20" + PATH + KIND), ended(COMPRESSION)),
    "4.3 entries are evicted by a smaller size": (lambda c: [FIRST, b"\x20" + BLOCK, AGAIN], ended(COMPRESSION)),
    "4.3 entries that fit in a smaller size stay": (lambda c: [FIRST, b"\x3f\xe1\x01" + AGAIN], answered(1, 3)),
    "4.4 an entry larger than the table empties it": (
        lambda c: [FIRST, BLOCK + b"\x40\x01x" + number(7, 0, 5000) + b"y" * 5000, AGAIN],
        ended(COMPRESSION),
    ),
    "4.4 entries are evicted by new ones": (
        lambda c: [FIRST, BLOCK + b"".join(b"\x40\x01x\x64" + b"%0100d" % n for n in range(40)), AGAIN],
        reset(5, PROTOCOL),
    ),
    "5.1 an integer of several bytes": (one(BLOCK + b"\0\x01x" + number(7, 0, 1337) + b"y" * 1337), answered(1)),
    "5.1 an integer with zeros that follow": (one(BLOCK + b"\0\x01x\x7f\x80\x80\x80\x00" + b"y" * 127), answered(1)),
    "5.1 an integer without an end": (one(BLOCK + b"\xff\xff\xff\xff"), ended(COMPRESSION)),
    "5.1 an integer beyond all bounds": (one(BLOCK + b"\xff" * 40 + b"\x01"), ended(COMPRESSION)),
    "5.2 a string beyond the block": (one(BLOCK + b"\0\x01x\x05abc"), ended(COMPRESSION)),
    "5.2 Huffman padding of more than 7 bits": (
        one(BLOCK + b"\0\x01x\x82" + huffman(b"0")[:1] + b"\xff"),
        ended(COMPRESSION),
    ),
    "5.2 Huffman padding of zeros": (one(BLOCK + b"\0\x01x\x81\x00"), ended(COMPRESSION)),
    "5.2 Huffman with EOS": (one(BLOCK + b"\0\x01x\x84\xff\xff\xff\xff"), ended(COMPRESSION)),
    "6.1 index 0": (one(BLOCK + b"\x80"), ended(COMPRESSION)),
    "6.1 all of the static table": (
        one(BLOCK + bytes(0x80 | index for index in range(15, LAST_STATIC) if index not in (28, 31, 57, 58))),
        answered(1),
    ),
    "6.1 the status of an answer": (one(START + b"\x88" + PATH + KIND), reset(1, PROTOCOL)),
    "6.3 the size of SETTINGS": (one(b"\x3f\xe1\x1f" + BLOCK), answered(1)),
    "6.3 a size beyond that of SETTINGS": (one(b"\x3f\xe2\x1f" + BLOCK), ended(COMPRESSION)),
    "6.3 two sizes, the last of which is beyond": (one(b"\x20\x3f\xe2\x1f" + BLOCK), ended(COMPRESSION)),
}


@pytest.mark.parametrize(("blocks", "expect"), CASES.values(), ids=CASES.keys())
def test_rfc_7541(blocks: Blocks, expect: Expect) -> None:
    """Each block begins a request."""

    def frames(client: Client) -> list[bytes]:
        return [
            frame
            for n, block in enumerate(blocks(client))
            for frame in (
                h2.frame(h2.HEADERS, h2.END_HEADERS, 2 * n + 1, block),
                data_frame(2 * n + 1, message(b"hello"), h2.END_STREAM),
            )
        ]

    run(frames, expect)


@pytest.mark.parametrize(
    "blocks",
    [
        (
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ),
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ),
    ],
    ids=["C.3 without Huffman coding", "C.4 with Huffman coding"],
)
def test_the_examples_of_the_appendix(blocks: tuple[str, ...]) -> None:
    """The appendix's requests are not gRPC. The server refuses each of them, and its dynamic table stays correct."""

    def frames(client: Client) -> list[bytes]:
        heads = [
            h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 2 * n + 1, bytes.fromhex(block))
            for n, block in enumerate(blocks)
        ]
        return [
            *heads,
            h2.frame(h2.HEADERS, h2.END_HEADERS, 7, BLOCK + b"\xbe\xbf"),
            data_frame(7, message(b"hello"), h2.END_STREAM),
        ]

    def expect(client: Client) -> None:
        answered(7)(client)
        for stream_id in (1, 3, 5):
            first = next(frame for frame in client.frames() if frame.stream_id == stream_id)
            assert b":status\x03415" in first.payload

    run(frames, expect)
