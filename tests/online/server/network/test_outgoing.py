"""Large responses are written in turns, in order and without copies, and never more of them than the clients leave memory for."""

import asyncio
import re
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from garbage import uncollected
from http_servers import LOOPS, PATIENCE_S, Client, GatedServer, infer, post
from penstock.online.server.access.gate import LIMIT_BYTES, Passage
from penstock.online.server.config import ServerConfig
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.network.outgoing import SMALL_BYTES, Outgoing
from penstock.online.server.network.tls import make_context
from penstock.online.server.network.turns import BYTES_A_UNIT, TURN_UNITS, Turns
from penstock.online.server.network.unread import STALE_S, Unread
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel, FakeStreamingModel

MIB = 1 << 20


class Transport(asyncio.Transport):
    """A socket that accepts ``room`` bytes; the rest stays in the transport's buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: Any = None
        self.room = 0
        self.sent = bytearray()
        self.pieces: list[Any] = []
        self.buffer: list[memoryview] = []
        self.high, self.low = 64 << 10, 16 << 10
        self.is_paused = False
        self.fresh = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = 64 << 10 if high is None else high
        self.low = 16 << 10 if low is None else low
        self._steer()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.buffer))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        assert not (self.is_paused and self.high == 1), "written although paused"
        self.fresh += len(data)
        self.pieces.append(data)
        self.buffer.append(memoryview(data))
        self.accept(0)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.fresh += len(part)
            self.pieces.append(part)
            self.buffer.append(memoryview(part))
        self.accept(0)

    def accept(self, more: int) -> None:
        """The client reads ``more`` bytes."""
        self.room += more
        while self.buffer and self.room:
            first = self.buffer[0][: self.room]
            self.sent += first
            self.room -= len(first)
            self.buffer[0] = self.buffer[0][len(first) :]
            if not self.buffer[0]:
                del self.buffer[0]
        self._steer()

    def _steer(self) -> None:
        size = self.get_write_buffer_size()
        if size > self.high and not self.is_paused:
            self.is_paused = True
            self.owner.pause()
        elif self.is_paused and size <= self.low:
            self.is_paused = False
            self.owner.resume()


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


SIZES = st.one_of(st.integers(0, 300), st.integers(60_000, 70_000), st.integers(200_000, 2_000_000))
STEPS = st.lists(st.one_of(st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 3_000_000), st.none()), max_size=20)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_what_is_written_arrives_in_order(steps: list[list[int] | int | None]) -> None:
    async def main() -> None:
        ends = 0

        def on_end() -> None:
            nonlocal ends
            ends += 1
            assert outgoing.kept <= SMALL_BYTES

        outgoing, transport = Outgoing(Turns(), on_end), Transport()
        transport.owner = outgoing
        outgoing.open(transport)
        expected, content = bytearray(), iter(range(10**6))
        for step in [*steps, 10**9]:
            if isinstance(step, list):
                parts = [np.full(size, next(content) % 251, np.uint8).tobytes() for size in step]
                expected += b"".join(parts)
                outgoing.write(parts)
            elif step is None:
                before = transport.fresh
                await asyncio.sleep(0)
                assert transport.fresh - before <= TURN_UNITS * BYTES_A_UNIT
            else:
                transport.accept(step)
            assert outgoing.unsent == len(expected) - len(transport.sent)
            assert outgoing.kept >= outgoing.unsent
        while outgoing.is_busy:
            await asyncio.sleep(0)
        assert transport.sent == expected
        assert (outgoing.unsent, outgoing.kept) == (0, 0)
        assert outgoing.read() == len(expected)
        assert transport.high == 64 << 10

    run(main())


def test_a_part_counts_until_nothing_refers_to_it_and_is_not_copied() -> None:
    async def main() -> None:
        outgoing, transport = Outgoing(Turns(), lambda: None), Transport()
        transport.owner = outgoing
        outgoing.open(transport)
        tensor = bytearray(4 * MIB)
        outgoing.write([b"head", memoryview(tensor)])
        while transport.get_write_buffer_size() + transport.room < len(tensor) and outgoing.is_busy:
            assert outgoing.kept >= len(tensor)
            transport.accept(MIB // 4)
            await asyncio.sleep(0)
        assert all(piece.obj is tensor for piece in transport.pieces if len(piece) > 4)
        transport.accept(8 * MIB)
        await asyncio.sleep(0)
        assert outgoing.kept == 0

    run(main())


def test_many_connections_share_each_iteration() -> None:
    async def main() -> None:
        turns = Turns()
        transports = []
        for _ in range(64):
            outgoing, transport = Outgoing(turns, lambda: None), Transport()
            transport.owner, transport.room = outgoing, 10**9
            outgoing.open(transport)
            outgoing.write([bytes(2 * MIB)])
            transports.append(transport)
        # One first slice each, as long as units are left for new data.
        assert sum(len(transport.sent) for transport in transports) <= TURN_UNITS * BYTES_A_UNIT
        while sum(len(transport.sent) for transport in transports) < 64 * 2 * MIB:
            before = sum(len(transport.sent) for transport in transports)
            await asyncio.sleep(0)
            assert sum(len(transport.sent) for transport in transports) - before <= TURN_UNITS * BYTES_A_UNIT

    run(main())


def test_nothing_is_written_after_the_end() -> None:
    async def main() -> None:
        outgoing, transport = Outgoing(Turns(), lambda: None), Transport()
        transport.owner = outgoing
        outgoing.open(transport)
        outgoing.write([bytes(MIB)])
        outgoing.close()
        transport.accept(MIB)
        outgoing.write([b"more"])
        await asyncio.sleep(0)
        assert (outgoing.kept, outgoing.unsent, outgoing.read(), outgoing.is_busy) == (0, 0, 0, False)
        assert b"more" not in transport.sent

    run(main())


# On real sockets


def wide(size: int) -> FakeModel:
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, 1)),), (TensorSpec("y", DataType.FP32, (-1, size)),))
    return FakeModel(signature, lambda inputs: {"y": np.repeat(inputs["x"], size, axis=1)})


SIZE = 16 * MIB
ASK = post(
    b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1.5]}],"parameters":{"binary_data_output":true}}',
    path="/v2/models/wide/infer",
)
CONTENT = np.full(SIZE // 4, 1.5, np.float32).tobytes()


def deaf(server: GatedServer) -> Client:
    """A client that asks and never reads."""
    client = server.connect()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.send(ASK)
    return client


def wait(server: GatedServer, connections: int, unread: int) -> None:
    while server.call(lambda: (len(server.connections), len(server.unread.waiting))) != (connections, unread):
        pass


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_clients_that_never_read_give_way_and_hurt_nobody(loop: str) -> None:
    model = wide(SIZE // 4)
    with GatedServer(loop, {"wide": model}, max_unread_bytes=3 * SIZE + SIZE // 2) as server:
        innocent = server.connect()
        for _ in range(3):
            calls = len(model.calls) + 3
            for _ in range(3):
                deaf(server)
            # Those of the last round have given way to these.
            while len(model.calls) < calls:
                pass
            wait(server, 4, 3)
            assert server.call(lambda: server.unread.count) <= server.unread.limit
            server.clock.advance(STALE_S)
            for _ in range(3):
                assert innocent.ask(ASK).body.endswith(CONTENT)
        assert server.call(lambda: server.unread.count) <= server.unread.limit


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_too_much_that_nobody_reads_is_dropped_without_further_requests(loop: str) -> None:
    with GatedServer(loop, {"wide": wide(SIZE // 4)}, max_unread_bytes=2 * SIZE + SIZE // 2) as server:
        for _ in range(5):
            deaf(server)
        wait(server, 5, 5)
        server.pass_time(STALE_S)
        wait(server, 2, 2)


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_client_that_reads_slowly_is_never_cut(loop: str) -> None:
    model = wide(SIZE // 4)
    with GatedServer(loop, {"wide": model}, max_unread_bytes=SIZE) as server:
        slow = server.connect()
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB // 4)
        slow.send(ASK)
        head = slow.read_head()
        text = slow._reader.read(int(re.findall(rb"Inference-Header-Content-Length: (\d+)", head)[0]))
        assert b"200 OK" in head
        assert text.startswith(b"{")
        wait(server, 1, 1)
        read = bytearray()
        while len(read) < 5 * MIB:
            read += slow._reader.read(MIB)
            server.clock.advance(STALE_S)
            calls = len(model.calls) + 1
            deaf(server)
            # The other one has given way to this one.
            while len(model.calls) < calls:
                pass
            wait(server, 2, 2)
        read += slow._reader.read(SIZE - len(read))
        assert read == CONTENT


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_response_without_memory_is_refused_not_cut(loop: str) -> None:
    with GatedServer(loop, {"wide": wide(SIZE // 4)}, max_bytes=SIZE + SIZE // 2) as server:
        attacker = deaf(server)
        wait(server, 1, 1)
        innocent = server.connect()
        refused = innocent.ask(ASK)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert innocent.ask(infer(1)).data == [2, 0]
        attacker.close()
        while server.call(lambda: server.budget.used):
            pass
        assert innocent.ask(ASK).body.endswith(CONTENT)


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("ends", ["Connection: close\r\n", ""])
def test_pipelined_large_responses_are_complete(loop: str, ends: str) -> None:
    with GatedServer(loop, {"wide": wide(MIB)}) as server:
        client, part = server.connect(), CONTENT[: 4 * MIB]
        client.send(ASK + infer(1) + ASK * 2 + infer(2, ends))
        assert client.read().body.endswith(part)
        assert client.read().data == [2, 0]
        assert client.read().body.endswith(part)
        assert client.read().body.endswith(part)
        assert client.read().data == [4, 0]
        assert not ends or client.is_closed
        assert server.call(lambda: (server.unread.count, server.budget.used)) == (0, 0)


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("is_draining", [False, True])
def test_a_response_is_complete_although_no_other_one_follows(loop: str, is_draining: bool) -> None:
    """The client has closed its sending side, or the server stops."""
    with GatedServer(loop, {"wide": wide(SIZE // 4)}) as server:
        client = server.connect()
        client.send(ASK)
        wait(server, 1, 1)
        if is_draining:
            server.call(server.listener.announce_end)
            server.call(lambda: [each.close_if_idle() for each in list(server.connections._open)])
        else:
            client.socket.shutdown(socket.SHUT_WR)
        assert client.read_final().body.endswith(CONTENT)
        assert client.is_closed


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_large_responses_over_tls(loop: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    tls = make_context(ServerConfig(tls_certificate=str(certificate)))
    trusting = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with GatedServer(loop, {"wide": wide(SIZE // 4)}, tls=tls) as server, Client(server.address, trusting) as client:
        client.send(ASK * 2 + infer(1))
        assert client.read().body.endswith(CONTENT)
        assert client.read().body.endswith(CONTENT)
        assert client.read().data == [2, 0]
        assert client.ask(infer(2)).data == [4, 0]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_closed_connection_leaves_nothing(loop: str) -> None:
    with (
        GatedServer(loop, {"wide": wide(SIZE // 4)}) as server,
        uncollected(Http1Connection, Outgoing, Unread) as alive,
    ):
        client = deaf(server)
        wait(server, 1, 1)
        client.close()
        wait(server, 0, 0)
        with server.connect() as other:  # the model's thread keeps its last batch until the next one
            other.ask(ASK.replace(b"1.5", b"2.5"))
        wait(server, 0, 0)
        end = time.monotonic() + PATIENCE_S
        while max(alive().values(), default=0) > 1:
            assert time.monotonic() < end, alive()
            server.call(lambda: None)
        assert server.call(lambda: (server.unread.count, server.budget.used)) == (0, 0)


@pytest.mark.parametrize("path", ["/v2/models/wide/infer", "/v2/models/wide/generate", "/v1/models/wide:predict"])
def test_large_outputs_are_computed_once_there_is_memory(path: str) -> None:
    model = wide(MIB)
    body = {"infer": ASK.split(b"\r\n\r\n")[1], "generate": b'{"x":1.5}'}.get(path.rpartition("/")[2])
    with GatedServer(also={"wide": model}) as server:
        first = Passage(server.budget.gate)
        server.call(lambda: first.note(LIMIT_BYTES))
        client = server.connect()
        client.send(post(body or b'{"instances":[[1.5]]}', path=path))
        while not server.call(lambda: server.budget.gate.waiting):
            pass
        assert not model.calls
        server.call(first.leave)
        assert client.read().status == 200
        assert server.call(lambda: (server.budget.gate.used, server.budget.used)) == (0, 0)


def test_a_stream_does_not_wait_for_memory() -> None:
    """Its responses are small, and it may last for hours."""
    many = FakeStreamingModel(wide(MIB).signature, lambda inputs: iter([{"y": inputs["x"]}] * 2))
    with GatedServer(also={"many": many}) as server:
        first = Passage(server.budget.gate)
        server.call(lambda: first.note(LIMIT_BYTES))
        answer = server.connect().ask(post(b'{"x":1.5}', path="/v2/models/many/generate_stream"))
        assert answer.body.count(b"1.5") == 2
