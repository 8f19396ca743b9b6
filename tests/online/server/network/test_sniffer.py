"""Protocol detection, for first bytes that arrive in pieces of any size."""

from typing import Any

import pytest

from penstock.online.server.network.connections import Connections, ServerConnection
from penstock.online.server.network.sniffer import PREFACE, Sniffer


class Spoken(ServerConnection):
    """Records the received data."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.data = b""

    def connection_made(self, transport: Any) -> None:
        self.is_within = self.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self.data += data

    def check_time(self, now: float) -> None: ...
    def begin_drain(self) -> None: ...
    def close_if_idle(self) -> None: ...

    requests = 0

    def make_room(self) -> bool:
        return False

    def abort(self) -> None: ...


class Wire:
    def __init__(self) -> None:
        self.protocol: Any = None
        self.ended = ""

    def get_extra_info(self, name: str) -> None:
        return None

    def set_protocol(self, protocol: ServerConnection) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Scene:
    def __init__(self, limit: int = 10) -> None:
        self.connections = Connections(limit)
        self.http, self.http2 = Spoken(self.connections), Spoken(self.connections)
        self.wire = Wire()
        self.sniffer = Sniffer(self.connections, lambda: self.http, lambda: self.http2, timeout_s=10)
        transport: Any = self.wire
        self.sniffer.connection_made(transport)

    def receive(self, *pieces: bytes) -> None:
        """Deliver ``pieces`` as the event loop would."""
        for piece in pieces:
            (self.wire.protocol or self.sniffer).data_received(piece)


def single(data: bytes) -> list[bytes]:
    return [bytes((byte,)) for byte in data]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"P", b"POST /", b"PRI * HTTP/1.1", PREFACE[:-1] + b"x", b"\x16\x03"]
)
def test_http(data: bytes) -> None:
    for pieces in ([data], single(data)):
        scene = Scene()
        scene.receive(*pieces, b"!")
        assert scene.wire.protocol is scene.http
        assert scene.http.data == data + b"!"
        assert len(scene.connections) == 1


def test_http2() -> None:
    for pieces in ([PREFACE + b"more"], [*single(PREFACE), b"more"], [PREFACE[:23], PREFACE[23:] + b"more"]):
        scene = Scene()
        scene.receive(*pieces)
        assert scene.wire.protocol is scene.http2
        assert scene.http2.data == PREFACE + b"more"
        assert len(scene.connections) == 1


def test_one_too_many_is_refused_by_http() -> None:
    scene = Scene(limit=0)
    assert scene.wire.protocol is scene.http
    assert not scene.http.is_within


def test_who_says_too_little_is_cut_off() -> None:
    scene = Scene()
    scene.sniffer.check_time(100)
    scene.receive(PREFACE[:5])
    scene.sniffer.check_time(109)
    assert not scene.wire.ended
    scene.sniffer.check_time(110)
    assert scene.wire.ended == "aborted"


def test_who_says_nothing_is_closed_at_the_end() -> None:
    scene = Scene()
    scene.sniffer.begin_drain()
    scene.sniffer.close_if_idle()
    assert scene.wire.ended == "closed"
    scene.sniffer.connection_lost(None)
    assert len(scene.connections) == 0
    scene.receive(b"late")
    assert scene.wire.protocol is None
