"""Closed connections leave no garbage: reference counting frees each with its requests, bodies and leases."""

import asyncio
import gzip
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from garbage import uncollected
from http_servers import LOOPS, PATIENCE_S, Client, GatedServer, get, infer, post
from penstock.online.server.access.gate import LIMIT_BYTES, Passage
from penstock.online.server.body_buffer import BodyBuffer
from penstock.online.server.http.body import BodyReceiver
from penstock.online.server.http.connection import Http1Connection
from penstock.online.server.http.exchange import Exchange
from penstock.online.server.network.outgoing import Outgoing
from penstock.online.server.network.unread import Unread
from penstock.online.server.shared_memory.lease import Lease

KINDS = (Http1Connection, Outgoing, Unread, Exchange, BodyReceiver, BodyBuffer, Passage, Lease, asyncio.Task)
CHUNKED = "Transfer-Encoding: chunked\r\n"


def until(server: GatedServer, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not server.call(condition):
        assert time.monotonic() < end


def answered(server: GatedServer, client: Client) -> None:
    assert client.ask(infer(1)).data == [2, 0]
    assert client.ask(get("/v2")).status == 200


def failed(server: GatedServer, client: Client) -> None:
    assert client.ask(b"nonsense\r\n\r\n").status == 400


def unread(server: GatedServer, client: Client) -> None:
    client.send(get("/v2") * 2000)
    client.read()


def headless(server: GatedServer, client: Client) -> None:
    answered(server, client)
    client.send(infer(1)[:60])


def unfinished(server: GatedServer, client: Client) -> None:
    """Half a body, which is received directly."""
    client.send(post(bytes(2_000_000), "Inference-Header-Content-Length: 100\r\n")[:1_000_000])
    until(server, lambda: server.budget.used > 0)


def chunked(server: GatedServer, client: Client) -> None:
    client.send(post(b"", CHUNKED).replace(b"Content-Length: 0\r\n", b"") + b"40000\r\n" + bytes(1 << 18))
    until(server, lambda: server.budget.used > 0)


def gated(server: GatedServer, client: Client) -> None:
    """A large body that is not received before the gate admits it."""
    client.send(post(bytes(3_000_000))[:1000])
    until(server, lambda: server.budget.gate.waiting == 1)


def inflating(server: GatedServer, client: Client) -> None:
    """A compressed body that waits at the gate, which the test has closed."""
    client.send(post(gzip.compress(bytes(16 << 20)), "Content-Encoding: gzip\r\n"))
    until(server, lambda: server.budget.gate.waiting == 1)


def pending(server: GatedServer, client: Client) -> None:
    server.gate.clear()
    client.send(infer(1) * 4)
    assert server.entered.acquire(timeout=PATIENCE_S)


def leased(server: GatedServer, client: Client) -> None:
    """Inference from shared memory."""
    server.gate.clear()
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": parameters}
    client.send(post(json.dumps({"inputs": [tensor]}).encode()))
    assert server.entered.acquire(timeout=PATIENCE_S)


ENDINGS = [answered, failed, unread, headless, unfinished, chunked, gated, inflating, pending, leased]


@pytest.fixture(params=sorted(LOOPS), scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[GatedServer]:
    region = Path(f"/dev/shm/penstock-release-{os.getpid()}")
    region.write_bytes(bytes(8))
    with GatedServer(request.param) as server:
        body = json.dumps({"key": f"/{region.name}", "byte_size": 8}).encode()
        with server.connect() as client:
            assert client.ask(post(body, path="/v2/systemsharedmemory/region/r/register")).status == 200
        yield server
    region.unlink()


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda each: each.__name__)
def test_a_closed_connection_is_freed(server: GatedServer, ending: Callable[[GatedServer, Client], None]) -> None:
    until(server, lambda: not len(server.connections))
    closer = Passage(server.budget.gate)
    server.call(lambda: closer.note(LIMIT_BYTES))
    with uncollected(*KINDS) as alive:
        for _ in range(2):
            while server.entered.acquire(blocking=False):
                pass
            client = server.connect()
            ending(server, client)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            while server.call(lambda: len(server.connections)):
                server.pass_time(0.1)
            server.gate.set()
        with server.connect() as other:  # the model's thread keeps its last batch until the next one
            answered(server, other)
        end = time.monotonic() + PATIENCE_S
        while found := alive():
            assert time.monotonic() < end, found
            server.call(lambda: None)
    server.call(closer.leave)
    assert (server.budget.used, server.budget.gate.used, server.budget.gate.waiting) == (0, 0, 0)
