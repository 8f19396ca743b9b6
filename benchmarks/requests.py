"""Complete requests that the load client cannot build itself: gRPC messages, and requests with tensors in shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orjson

from benchmarks.servers import Server
from penstock.perf.grpc_client import framed
from penstock.perf.http_client import Address, HttpAnswer, HttpSession
from penstock.perf.oip_client import infer_message
from penstock.protocol import messages
from penstock.tensor import Array, DataType, from_wire


def post(address: Address, path: str, body: bytes, kind: str = "application/json") -> bytes:
    """A complete POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {address.authority}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def grpc_request(model: str, inputs: Mapping[str, Array]) -> bytes:
    """A framed ``ModelInferRequest`` with raw tensors."""
    return framed(infer_message(model, inputs))


def grpc_answer(body: bytes) -> dict[str, Array]:
    """The outputs of a ``ModelInferResponse``, by name. They may be raw or, from some servers, typed FP32."""
    message = messages.ModelInferResponse.FromString(body)
    outputs = {}
    for number, output in enumerate(message.outputs):
        shape = list(output.shape)
        if message.raw_output_contents:
            outputs[output.name] = from_wire(message.raw_output_contents[number], DataType(output.datatype), shape)
        else:
            outputs[output.name] = np.array(output.contents.fp32_contents, np.float32).reshape(shape)
    return outputs


class Region:
    """A shared-memory region with ``slots`` slots. Each slot contains the same input row, and a place for its output."""

    def __init__(self, path: Path, row: Array, slots: int) -> None:
        self.name = path.name
        self._row = row
        self._slots = slots
        self._memory = np.memmap(path, np.uint8, "w+", shape=(2 * slots * row.nbytes,))
        for slot in range(slots):
            self._part(2 * slot)[:] = row.reshape(-1).view(np.uint8)

    @property
    def answered(self) -> bool:
        """True if the output in every slot equals its input row, as with the identity model."""
        row = self._row.reshape(-1).view(np.uint8)
        return all(np.array_equal(self._part(2 * slot + 1), row) for slot in range(self._slots))

    def clear(self) -> None:
        """Clear all outputs."""
        for slot in range(self._slots):
            self._part(2 * slot + 1)[:] = 0

    def requests(self, server: Server, model: str) -> list[bytes]:
        """Register the region at ``server``, and return one request per slot, which reads from and writes to its slot. Raises
        RuntimeError.
        """
        body = orjson.dumps({"key": f"/{self.name}", "offset": 0, "byte_size": self._memory.nbytes})
        register = post(server.address, f"/v2/systemsharedmemory/region/{self.name}/register", body)
        answer = asyncio.run(_ask(server, register))
        if answer.status != 200:
            raise RuntimeError(f"{server.address.url} refuses shared memory: {answer.body.decode(errors='replace')}")
        return [post(server.address, f"/v2/models/{model}/infer", self._infer(slot)) for slot in range(self._slots)]

    def _part(self, number: int) -> Array:
        size = self._row.nbytes
        return self._memory[number * size : (number + 1) * size]

    def _infer(self, slot: int) -> bytes:
        size = self._row.nbytes
        place, answer = (
            {
                "shared_memory_region": self.name,
                "shared_memory_offset": number * size,
                "shared_memory_byte_size": size,
            }
            for number in (2 * slot, 2 * slot + 1)
        )
        tensor = {"name": "input", "datatype": "FP32", "shape": self._row.shape, "parameters": place}
        return orjson.dumps({"inputs": [tensor], "outputs": [{"name": "output", "parameters": answer}]})


@contextmanager
def shared_region(row: Array, slots: int) -> Iterator[Region]:
    """A ``Region`` for this process, which is removed afterwards."""
    path = Path("/dev/shm") / f"penstock-bench-{os.getpid()}"
    try:
        yield Region(path, row, slots)
    finally:
        path.unlink(missing_ok=True)


async def _ask(server: Server, request: bytes) -> HttpAnswer:
    session = HttpSession(server.address)
    try:
        return await session.ask(request)
    finally:
        session.close()
