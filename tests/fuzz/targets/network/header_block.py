"""Fuzzes the reader of gRPC header blocks: HPACK and the rules of HTTP/2, with and without remembered blocks.

A message is several blocks of one connection, each behind its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import hpack

from penstock.online.server.access.web import WebAccess
from penstock.online.server.grpc.service import INFERENCE
from penstock.online.server.h2.headers import HeaderReader, literal
from penstock.protocol.h2_frames import ConnectionFault
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import LENGTH
from tests.fuzz.target import DecoderTarget
from tests.fuzz.targets.network.h2 import block

_PATH = f"/{INFERENCE}/ModelInfer"
_MAX_BYTES = 8192
_FIELDS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", _PATH.encode()),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"x-custom", b"some value"),
]


def _seeds() -> list[Seed]:
    encoder = hpack.Encoder()
    series = [
        encoder.encode(_FIELDS, huffman=True),
        encoder.encode(_FIELDS, huffman=False),
        encoder.encode(_FIELDS[:5]),
    ]
    encoder.header_table_size = 0
    series.append(encoder.encode(_FIELDS))
    alone = [
        block(_PATH),
        block("/x", grpc_timeout="1S", content_length="5"),
        block(_PATH, origin="http://evil.example"),
    ]
    return [tuple(series), tuple(series[:1]) * 3, *[(one, one) for one in alone], tuple(alone)]


class HeaderBlockTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"\x20",
        b"\x3f\xe1\x1f",
        b"\x3f\xff\xff\xff\xff\x0f",
        b"\x80",
        b"\xbe",
        b"\x40",
        literal(b"te", b"gzip"),
    )

    def __init__(self) -> None:
        super().__init__([(self.join(seed, Random(0)),) for seed in _seeds()])
        self.seeds = _seeds()

    def join(self, parts: Sequence[bytes], random: Random) -> bytes:
        return b"".join(LENGTH.pack(len(part)) + part for part in parts)

    def split(self, data: bytes) -> Seed:
        return tuple(_blocks(data))

    def decode(self, data: bytes) -> object:
        fresh, known = self._reader(), self._reader()
        found: list[object] = []
        for one in _blocks(data):
            heads = []
            for reader in (fresh, known):
                reader.known.clear() if reader is fresh else None
                try:
                    heads.append(reader.read(one))
                except ConnectionFault as fault:
                    heads.append(fault.code)
            assert _shown(heads[0]) == _shown(heads[1]), "the remembered block means something else"
            found.append(_shown(heads[0]))
            if isinstance(heads[0], int):
                break
        return found

    @staticmethod
    def _reader() -> HeaderReader:
        return HeaderReader({}, _MAX_BYTES, WebAccess(hosts=()))


def _blocks(data: bytes) -> list[bytes]:
    blocks, position = [], 0
    while len(blocks) < 20 and position + LENGTH.size <= len(data):
        (size,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        blocks.append(data[position : position + size])
        position += size
    return blocks


def _shown(head: object) -> str:
    return repr(head) if isinstance(head, int) else repr((head.malformed, head.refusal, head.text, head.metadata))
