"""What may come of a client's frames, for the cases of ``tests/online/server/h2/test_conformance*.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hpack

from h2_servers import message
from h2_wire import Client, Lab, on_loop
from penstock.protocol import h2_frames as h2

ECHOED = message(b"hello")
MAX_STREAMS = 8
_PROOF = 1001
"""The stream of the request that proves that a connection still works."""

Expect = Callable[[Client], None]


def run(frames: Callable[[Client], Iterable[bytes]], expect: Expect) -> None:
    """Send ``frames`` in one piece and, to another server, each in three; ``expect`` must hold for both.

    An empty frame stands for a pause, in which the server answers what it has.
    """

    async def main() -> None:
        for piecemeal in (False, True):
            lab = Lab(max_streams=MAX_STREAMS)
            client = lab.connect()
            for each in frames(client):
                if not each:
                    await lab.settle()
                elif piecemeal:
                    for part in (each[:4], each[4:12], each[12:]):
                        client.connection.data_received(part)
                else:
                    client.send(each)
            await lab.settle()
            if client.goaway is None:
                client.send(h2.ping(b"the end."), client.request(_PROOF))
                await lab.settle()
            expect(client)

    on_loop(main)


def alive(client: Client) -> None:
    """The connection works."""
    assert client.goaway is None
    assert client.of(h2.PING)[-1].payload == b"the end."
    answered(_PROOF)(client)


def ignored(client: Client) -> None:
    """Nothing is said to any stream, and the connection works."""
    alive(client)
    assert {frame.stream_id for frame in client.frames()} == {0, _PROOF}


def answered(*stream_ids: int, content: bytes = ECHOED) -> Expect:
    """Each of the streams has a whole answer."""

    def expect(client: Client) -> None:
        assert client.goaway is None
        decoder = hpack.Decoder()
        blocks: dict[int, list[dict[str, str]]] = {}
        for frame in client.of(h2.HEADERS):
            blocks.setdefault(frame.stream_id, []).append(dict(decoder.decode(frame.payload)))
        for stream_id in stream_ids:
            first, last = blocks[stream_id]
            assert (first[":status"], last["grpc-status"]) == ("200", "0")
            assert b"".join(each.payload for each in client.of(h2.DATA) if each.stream_id == stream_id) == content
            frames = [each for each in client.frames() if each.stream_id == stream_id and each.kind != h2.WINDOW_UPDATE]
            assert frames[-1].flags & h2.END_STREAM

    return expect


def ended(*codes: int, last: int | None = None) -> Expect:
    """The connection ends with one of ``codes``, and is closed after it."""

    def expect(client: Client) -> None:
        (goaway,) = client.of(h2.GOAWAY)
        stream_id, code = h2.GOAWAY_HEAD.unpack_from(goaway.payload)
        assert code in codes
        assert last is None or stream_id == last
        assert client.frames()[-1] == goaway
        assert client.wire.ended

    return expect


def reset(stream_id: int, *codes: int, is_full: bool = False) -> Expect:
    """The stream is reset with one of ``codes``, once, and the connection works, unless it has too many streams for a proof."""

    def expect(client: Client) -> None:
        found = [h2.UINT32.unpack(each.payload)[0] for each in client.of(h2.RST_STREAM) if each.stream_id == stream_id]
        assert len(found) == 1
        assert found[0] in codes
        assert client.goaway is None
        if not is_full:
            alive(client)

    return expect


def silent(stream_id: int) -> Expect:
    """Nothing is said to the stream, and the connection works."""

    def expect(client: Client) -> None:
        alive(client)
        assert not [frame for frame in client.frames() if frame.stream_id == stream_id]

    return expect
