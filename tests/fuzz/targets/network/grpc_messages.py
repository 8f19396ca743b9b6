"""Fuzzes gRPC's framing: the messages are the same, however the network cuts the bytes. The first byte chooses the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from penstock.errors import ResourceExhausted
from penstock.online.server.h2.grpc_messages import PREFIX, MessageReader
from tests.fuzz.connection import pieces
from tests.fuzz.target import DecoderTarget

_LIMIT = 40_000
_SIZES = (0, 1, 5, 300, 17_000, _LIMIT, _LIMIT + 1)


def _frame(flag: int, size: int) -> bytes:
    return PREFIX.pack(flag, size) + bytes(number % 251 for number in range(size))


class GrpcMessagesTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (bytes(5), b"\1" + bytes(4), b"\0\xff\xff\xff\xff", b"\0\0\0\x40\x01", b"\0\0\0\x40\0")

    def __init__(self) -> None:
        frames = [_frame(number % 2, size) for number, size in enumerate(_SIZES)]
        super().__init__([(bytes((cut,)), *frames[:count]) for cut in range(3) for count in range(1, len(frames) + 1)])

    def decode(self, data: bytes) -> object:
        whole = self._read([data[1:]], use_place=False)
        random = Random(data[0] if data else 0)
        cut = self._read(list(pieces(data[1:], random)), use_place=random.random() < 0.7)
        assert cut == whole, "the messages depend on how they arrive"
        return whole

    def _read(self, received: Sequence[bytes], use_place: bool) -> object:
        reader, found, size = MessageReader(_LIMIT), [], 0
        try:
            for piece in received:
                size += len(piece)
                for part in self._placed(reader, piece) if use_place else (piece,):
                    if part:
                        reader.feed(part)
                while (message := reader.next()) is not None:
                    found.append((message[0], bytes(message[1])))
                assert reader.held <= 4 * (_LIMIT + size), "it holds much more than has arrived"
        except ResourceExhausted:
            return found, "too large"
        assert reader.is_between == (sum(PREFIX.size + len(content) for _, content in found) == size)
        return found, ""

    @staticmethod
    def _placed(reader: MessageReader, piece: bytes) -> Sequence[bytes]:
        """Write ``piece`` to the reader's memory, as far as that reaches; the rest is to be fed."""
        place = reader.place()
        if place is None:
            return (piece,)
        count = min(len(place), len(piece))
        place[:count] = piece[:count]
        reader.written(count)
        return (piece[count:],)
