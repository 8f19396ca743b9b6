"""Tests of penstock.perf.grpc_client against grpcio's server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import hpack
import pytest

from penstock.errors import Unavailable
from penstock.perf.grpc_client import GrpcConnector, framed
from penstock.perf.http_client import Address
from penstock.perf.load import closed_loop, run
from penstock.perf.loops import LoadWindow
from penstock.perf.tally import ClosedLoopResult
from penstock.protocol import h2_frames as h2
from servers import answer, answering, serving

METHOD = "/test.Echo/Call"
Behave = Callable[[bytes, grpc.ServicerContext], bytes]


@contextmanager
def grpc_server(behave: Behave, threads: int = 8, options: tuple[tuple[str, Any], ...] = ()) -> Iterator[Address]:
    """grpcio's server with one method that receives and returns raw messages."""
    handler = grpc.method_handlers_generic_handler("test.Echo", {"Call": grpc.unary_unary_rpc_method_handler(behave)})
    unlimited = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))
    server = grpc.server(ThreadPoolExecutor(threads), handlers=(handler,), options=unlimited + options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Address("127.0.0.1", port)
    finally:
        server.stop(None).wait()


def echo(message: bytes, context: grpc.ServicerContext) -> bytes:
    return message


def few(count: int, timeout_s: float = 20.0) -> LoadWindow:
    return LoadWindow(duration_s=None, warmup_s=0.0, timeout_s=timeout_s, max_requests=count)


def load(
    address: Address,
    messages: list[bytes],
    lanes: int,
    window: LoadWindow,
    connector: GrpcConnector | None = None,
    **more: Any,
) -> ClosedLoopResult:
    connector = connector or GrpcConnector(METHOD)
    return run(closed_loop(address, [framed(one) for one in messages], lanes, window, connect=connector, **more))


def test_every_call_is_answered_with_its_own_message() -> None:
    messages = [b"message %d" % number for number in range(7)]
    seen: list[int] = []

    def check(index: int, body: bytes, json_size: int | None) -> bool:
        seen.append(index)
        return body == messages[index] and json_size is None

    with grpc_server(echo) as address:
        result = load(address, messages, 5, few(200), check=check)
    assert (result.requests, result.errors, len(seen)) == (200, 0, 200)
    assert set(seen) == set(range(7))
    assert 0 < result.p50_ms <= result.p99_ms


def test_large_messages_pass_the_flow_control_of_both_sides() -> None:
    messages = [bytes([number]) * size for number, size in enumerate((0, 1, 16_379, 16_380, 65_530, 70_000, 3 << 20))]

    def check(index: int, body: bytes, json_size: int | None) -> bool:
        return body == messages[index]

    with grpc_server(echo, options=(("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0))) as address:
        result = load(address, messages, 4, few(42), check=check)
    assert (result.requests, result.errors_by_kind) == (42, {})


def test_lanes_have_calls_in_flight_at_the_same_time() -> None:
    everyone = threading.Barrier(6)

    def together(message: bytes, context: grpc.ServicerContext) -> bytes:
        everyone.wait(20)
        return message

    with grpc_server(together, threads=6) as address:
        assert load(address, [b"x"], 6, few(60), GrpcConnector(METHOD, streams=3)).errors == 0


@pytest.mark.parametrize(("streams", "allowed", "connections"), [(2, 100, 3), (8, 3, 2), (8, 100, 1)])
def test_lanes_share_connections_as_far_as_both_sides_allow(streams: int, allowed: int, connections: int) -> None:
    peers: set[str] = set()

    def note(message: bytes, context: grpc.ServicerContext) -> bytes:
        peers.add(context.peer())
        return message

    with grpc_server(note, options=(("grpc.max_concurrent_streams", allowed),)) as address:
        result = load(address, [b"x"], 6, few(600), GrpcConnector(METHOD, streams))
    assert result.errors == 0
    assert len(peers) == connections


def test_a_status_is_an_error_by_its_number_with_what_it_said() -> None:
    def refuse(message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "tout complet, 100 %: d\u00e9sol\u00e9")
        raise AssertionError

    with grpc_server(refuse) as address:
        result = load(address, [b"x"], 2, few(10))
    assert result.errors_by_kind == {"gRPC 14": 10}
    assert result.first_errors == {"gRPC 14": "tout complet, 100 %: d\u00e9sol\u00e9"}


def test_metadata_reaches_the_server() -> None:
    def tell(message: bytes, context: grpc.ServicerContext) -> bytes:
        return dict(context.invocation_metadata())["who"].encode()

    with grpc_server(tell) as address:
        connector = GrpcConnector(METHOD, metadata=[("who", "me")])
        assert load(address, [b""], 1, few(5), connector, check=lambda _, body, __: body == b"me").errors == 0


def test_a_call_without_end_times_out_and_its_lane_comes_back() -> None:
    first = threading.Event()
    release = threading.Event()

    def stall_once(message: bytes, context: grpc.ServicerContext) -> bytes:
        if not first.is_set():
            first.set()
            release.wait(20)
        return message

    with grpc_server(stall_once) as address:
        try:
            result = load(address, [b"x"], 2, few(50, timeout_s=0.5))
        finally:
            release.set()
    assert result.errors_by_kind == {"time-out": 1}
    assert result.requests == 50


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot connect"):
        load(Address("127.0.0.1", port), [b"x"], 1, few(1))


def test_a_server_of_another_protocol_is_told_apart() -> None:
    async def main() -> ClosedLoopResult:
        async with serving(answering(answer())) as address:
            return await closed_loop(address, [framed(b"")], 1, few(1), connect=GrpcConnector(METHOD))

    with pytest.raises(Unavailable, match=r"does not speak HTTP/2"):
        run(main())


def http2_server(*head: tuple[str, str]) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    """Answers each HTTP/2 request with these headers and no body, as a proxy does that knows no gRPC."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encoder = hpack.Encoder()
        await reader.readexactly(24)  # the preface
        writer.write(b"\0\0\0\x04\0\0\0\0\0")  # SETTINGS
        try:
            while True:
                frame = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(frame[:3], "big"))
                kind, flags, stream = frame[3], frame[4], frame[5:]
                if kind == h2.SETTINGS and not flags & h2.ACK:
                    writer.write(b"\0\0\0\x04\x01\0\0\0\0")
                if kind in (h2.HEADERS, h2.DATA) and flags & h2.END_STREAM:
                    block = encoder.encode(list(head))
                    size, ends = len(block).to_bytes(3, "big"), bytes([h2.HEADERS, h2.END_STREAM | h2.END_HEADERS])
                    writer.write(size + ends + stream + block)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return serve


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (((":status", "502"),), "HTTP 502"),
        (((":status", "200"),), "gRPC 2"),
        (((":status", "200"), ("grpc-status", "0")), "gRPC 13"),
        (((":status", "200"), ("grpc-status", "3")), "gRPC 3"),
        (((":status", "404"), ("grpc-status", "12")), "gRPC 12"),
    ],
)
def test_a_call_without_a_message_is_an_error_by_its_status(head: tuple[tuple[str, str], ...], kind: str) -> None:
    async def main() -> ClosedLoopResult:
        server = await asyncio.start_server(http2_server(*head), "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            return await closed_loop(address, [framed(b"x")], 1, few(5), connect=GrpcConnector(METHOD))
        finally:
            server.close()

    assert run(main()).errors_by_kind == {kind: 5}
