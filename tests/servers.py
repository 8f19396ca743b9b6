"""Small real HTTP servers for tests of clients; how they answer is up to the test."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from penstock.perf.http_client import Address


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Handle = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request by writing to the connection, or closes it."""


def answer(body: bytes = b"{}", status: str = "200 OK", headers: str = "") -> bytes:
    """A whole HTTP answer; ``headers`` is further header lines, each with its line end."""
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def answering(text: bytes) -> Handle:
    """The same answer to everyone."""

    async def handle(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(text)

    return handle


async def double(request: Request, writer: asyncio.StreamWriter) -> None:
    """A model called ``double`` of one FP32 input x (-1, 3); y = 2 x, in JSON, or binary where asked for."""
    if request.method == "GET":
        x, y = ({"name": name, "datatype": "FP32", "shape": [-1, 3]} for name in "xy")
        found = {"name": "double", "versions": ["1"], "platform": "test", "inputs": [x], "outputs": [y]}
        missing = answer(b'{"error":"Request for unknown model"}', "404 Not Found")
        writer.write(answer(json.dumps(found).encode()) if request.path == "/v2/models/double" else missing)
        return
    size = int(request.headers.get("inference-header-content-length", len(request.body)))
    question = json.loads(request.body[:size])
    (tensor,) = question["inputs"]
    raw = np.frombuffer(request.body[size:], np.float32) if "data" not in tensor else np.float32(tensor["data"])
    output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": tensor["shape"]}
    if question.get("parameters", {}).get("binary_data_output"):
        tail = (raw * 2).tobytes()
        output["parameters"] = {"binary_data_size": len(tail)}
        head = json.dumps({"model_name": "double", "outputs": [output]}).encode()
        writer.write(answer(head + tail, headers=f"Inference-Header-Content-Length: {len(head)}\r\n"))
    else:
        output["data"] = (raw * 2).tolist()
        writer.write(answer(json.dumps({"model_name": "double", "outputs": [output]}).encode()))


@asynccontextmanager
async def serving(handle: Handle) -> AsyncIterator[Address]:
    """A server on a free port."""
    connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections[task] = writer
        try:
            while not writer.is_closing():
                await handle(await _read(reader), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, asyncio.CancelledError):  # it is closed in a later turn of the loop
                await writer.wait_closed()
            del connections[task]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task, writer in connections.items():
            writer.transport.abort()  # the client need not read what is still to be sent
            task.cancel()
        await asyncio.gather(*connections)


@contextmanager
def serving_in_thread(handle: Handle) -> Iterator[Address]:
    """The same for tests that are not async themselves."""
    ready, found = threading.Event(), []

    async def main() -> None:
        stop = asyncio.Event()
        async with serving(handle) as address:
            found.append((address, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    ready.wait()
    address, loop, stop = found[0]
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _read(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    method, path, _ = first.split(" ")
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))
