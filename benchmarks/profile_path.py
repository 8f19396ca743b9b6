"""Profiles the hot path of a request. ``python -m benchmarks.profile_path [--quick]`` prints, as Markdown, the microseconds per
stage, and the memory that a request allocates and copies.

The server runs in this process without sockets (``in_process.py``), on one core, with the 32 → 64 → 8 MLP and one row per request.
The functions of each stage are timed (``stopwatch.py``). Bursts of each request form alternate, and a figure is the median over
bursts. The remaining time of a burst is spent in the event loop, in switches between threads, and in the load itself. Reading from
and writing to a socket is measured separately, as system calls only.
"""

from __future__ import annotations

import argparse
import gc
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from benchmarks import in_process, models
from benchmarks.in_process import InProcess
from benchmarks.requests import grpc_request
from benchmarks.servers import pinned, split_cores
from benchmarks.stopwatch import Probe, Stopwatch
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.online.instances.instance import Instance
from penstock.online.repository.handle import Handle
from penstock.online.scheduler import layout
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.online.server.dataplane import DataPlane
from penstock.online.server.grpc.decoder import GrpcRequestDecoder
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder
from penstock.online.server.grpc.inference import Inference
from penstock.online.server.h2 import connection as h2_connection
from penstock.online.server.h2.outbox import Outbox
from penstock.online.server.h2.stream import H2Stream
from penstock.online.server.http import connection as http_connection
from penstock.online.server.http.codec.decoder import HttpRequestDecoder
from penstock.online.server.http.codec.encoder import HttpAnswerEncoder
from penstock.online.server.http.inference import HttpInference
from penstock.online.server.http.responder import Responder
from penstock.online.server.shared_memory.registry import SharedMemory
from penstock.perf.grpc_client import GrpcConnection
from penstock.perf.http_client import Address
from penstock.perf.oip_client import infer_request
from penstock.request import InferResponse
from penstock.telemetry.batch_log import BatchLog
from penstock.tensor import Array, Buffer

Burst = Callable[[int, int], Awaitable[None]]
"""Sends a number of requests, with a number of requests in flight."""

STAGES = (
    "read", "parse", "decode", "data plane", "queue", "merge", "engine", "split", "hand-over", "complete", "statistics", "encode",
    "answer", "write", "event loop and threads",
)  # fmt: skip
_WAITING, _CLIENT = "waiting", "client"
_IN_FLIGHT = (64, 1)


def main() -> int:
    """Measure the profile and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_path", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure rough figures, within seconds")
    bursts = 20 if parser.parse_args().quick else 200
    with tempfile.TemporaryDirectory() as folder, pinned(split_cores()[0]):
        path = models.mlp(Path(folder) / "mlp.onnx")
        model = get_engine("onnxruntime").load(Artifact.from_file(path), {"threads": 1})
        inputs = {"input": np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)}
        found, held = in_process.run(profile(model, inputs, bursts))
    print(render(found, held, count_copies()))
    return 0


async def profile(
    model: LoadedModel, inputs: Mapping[str, Array], bursts: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The microseconds per request by stage, for each request form, and the number of memory blocks that a waiting request holds."""
    watch = Stopwatch()
    server = InProcess(model)
    requests = whole_requests(inputs)
    ways: dict[str, Burst] = {
        "HTTP JSON": lambda count, at_once: server.http(count, at_once, requests["HTTP JSON"]),
        "HTTP binary": lambda count, at_once: server.http(count, at_once, requests["HTTP binary"]),
        "gRPC": lambda count, at_once: server.grpc(count, at_once, requests["gRPC"]),
    }
    found: dict[str, list[dict[str, float]]] = {}
    gc.disable()
    try:
        held = {name: await blocks_held(burst) for name, burst in ways.items()}
        with watch.watching(probes(model)):
            for _ in range(bursts + 2):
                for name, burst in ways.items():
                    for at_once in _IN_FLIGHT:
                        stages = await one_burst(watch, burst, at_once)
                        found.setdefault(f"{name}, {at_once}", []).append(stages)
                gc.collect()
    finally:
        gc.enable()
    await server.close()
    sockets = {name: socket_microseconds(len(whole[0])) for name, whole in requests.items()}
    figures = {}
    for name, results in found.items():
        stages = {stage: float(np.median([one.get(stage, 0.0) for one in results[2:]])) for stage in STAGES}
        stages["read"], stages["write"] = sockets[name.rpartition(",")[0]]
        figures[name] = stages
    return figures, held


def whole_requests(inputs: Mapping[str, Array]) -> dict[str, list[bytes]]:
    """The same request in each form."""
    address = Address("localhost", 8000)
    return {
        "HTTP JSON": [infer_request(address, "m", inputs, binary=False)],
        "HTTP binary": [infer_request(address, "m", inputs, binary=True)],
        "gRPC": [grpc_request("m", inputs)],
    }


def probes(model: LoadedModel) -> list[Probe]:
    """The functions of each stage. A stage's time excludes the functions of other stages that its functions call."""
    return [
        ("parse", http_connection.Http1Connection, "data_received"),
        ("parse", h2_connection.H2Connection, "data_received"),
        ("decode", HttpRequestDecoder, "__call__"),
        ("decode", GrpcRequestDecoder, "__call__"),
        ("data plane", DataPlane, "infer"),
        ("queue", DynamicBatcher, "submit"),
        ("queue", DynamicBatcher, "_flush"),
        ("queue", DynamicBatcher, "take"),
        (_WAITING, DynamicBatcher, "_rest"),
        ("merge", layout, "merge"),
        ("engine", type(model), "forward"),
        ("split", layout, "split"),
        ("hand-over", Instance, "_forward"),
        ("complete", DynamicBatcher, "_complete"),
        ("statistics", BatchLog, "executed"),
        ("encode", HttpAnswerEncoder, "__call__"),
        ("encode", GrpcAnswerEncoder, "__call__"),
        ("answer", Inference, "encode"),
        ("answer", H2Stream, "send"),
        ("answer", H2Stream, "finish"),
        ("answer", HttpInference, "answer"),
        ("answer", Responder, "answered"),
        ("answer", Outbox, "flush"),
        (_CLIENT, in_process.Pipe, "write"),
        (_CLIENT, in_process.Pipe, "writelines"),
        (_CLIENT, GrpcConnection, "data_received"),
        (_CLIENT, GrpcConnection, "_flush"),
    ]


async def one_burst(watch: Stopwatch, burst: Burst, at_once: int) -> dict[str, float]:
    """Microseconds per request by stage."""
    requests = 640 if at_once > 1 else 100
    watch.clear()
    start = time.perf_counter_ns()
    await burst(requests, at_once)
    whole = time.perf_counter_ns() - start
    stages = {stage: ns / requests / 1e3 for stage, ns in watch.total_ns.items()}
    known = sum(us for stage, us in stages.items() if stage != _WAITING)
    stages["event loop and threads"] = max(0.0, whole / requests / 1e3 - known)
    return stages


async def blocks_held(burst: Burst) -> float:
    """Average number of memory blocks that a request in flight holds: the increase from no waiting request to 64, divided by 64."""
    counted: list[int] = []
    original = DynamicBatcher._flush  # noqa: SLF001 - then, all arrived requests wait

    def flush(batcher: DynamicBatcher) -> None:
        counted.append(sys.getallocatedblocks())
        original(batcher)

    await burst(640, 64)
    DynamicBatcher._flush = flush  # type: ignore[method-assign] # noqa: SLF001
    try:
        await burst(64, 64)
        await burst(1, 1)
    finally:
        DynamicBatcher._flush = original  # type: ignore[method-assign] # noqa: SLF001
    # On a busy machine, the first flush may run before all requests have arrived.
    return (max(counted[:-1]) - counted[-1]) / 63


def socket_microseconds(size: int, count: int = 2000) -> tuple[float, float]:
    """The microseconds that the system takes to receive a request of ``size`` bytes and to send an answer of 256 bytes, over
    loopback TCP.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, answer, reads, writes = bytes(size), bytes(256), [], []
    with client, server:
        for _ in range(count):
            client.sendall(request)
            start = time.perf_counter_ns()
            server.recv(1 << 16)
            middle = time.perf_counter_ns()
            server.send(answer)
            writes.append(time.perf_counter_ns() - middle)
            reads.append(middle - start)
            client.recv(1 << 16)
    return float(np.median(reads)) / 1e3, float(np.median(writes)) / 1e3


def count_copies() -> list[tuple[str, str, str]]:
    """The number of copies of a tensor at each step from the received buffer to the answer: ``(step, for 32 numbers, for 1 MiB)``."""
    small, large = (_copies(np.ones((1, size), np.float32)) for size in (32, 1 << 18))
    return [(stage, small[stage], large[stage]) for stage in small]


def _copies(array: Array) -> dict[str, str]:
    """The number of copies at each step. A step has copied a tensor if input and output share no memory."""
    shared_memory = SharedMemory(enabled=False)
    whole = whole_requests({"input": array})
    head, _, body = whole["HTTP binary"][0].partition(b"\r\n\r\n")
    length = int(head.partition(b"Inference-Header-Content-Length: ")[2].partition(b"\r\n")[0])
    message = whole["gRPC"][0][5:]
    handle = cast(Handle, SimpleNamespace(name="m", version="1"))  # the only fields that a decoder reads
    request, form = HttpRequestDecoder(shared_memory)(handle, body, length)
    grpc_infer, grpc_form = GrpcRequestDecoder(shared_memory)(message)
    view, grpc_view = request.inputs["input"], grpc_infer.inputs["input"]
    outputs = {"output": np.ones((2, array.shape[1]), np.float32)}
    part = layout.split(outputs, [1, 1])[0]
    answer = InferResponse("m", "1", part)
    _, text, tensors = HttpAnswerEncoder()(answer, form)
    return {
        "decode, HTTP binary": _shared([body], view),
        "decode, gRPC": _shared([message], grpc_view),
        "merge, one request alone": _shared([layout.merge([{"input": view}])["input"]], view),
        "merge, several requests": _shared([layout.merge([{"input": view}] * 2)["input"]], view),
        "split": _shared([part["output"]], outputs["output"]),
        "encode, HTTP binary": _shared([text, *tensors], part["output"]),
        "encode, gRPC": _shared(GrpcAnswerEncoder()(answer, grpc_form), part["output"]),
    }


def _shared(buffers: Sequence[Buffer | Array], array: Array) -> str:
    views = [np.frombuffer(one, np.uint8) if len(one) else np.empty(0, np.uint8) for one in map(memoryview, buffers)]
    return "none" if any(np.shares_memory(view, array) for view in views) else "1"


def render(
    found: Mapping[str, Mapping[str, float]], held: Mapping[str, float], copies: Sequence[tuple[str, str, str]]
) -> str:
    """The profile as Markdown."""
    lines = ["| µs per request | " + " | ".join(found) + " |", "|---|" + "---:|" * len(found)]
    lines += [f"| {stage} | " + " | ".join(f"{one[stage]:.2f}" for one in found.values()) + " |" for stage in STAGES]
    lines.append("| **sum** | " + " | ".join(f"{sum(stages.values()):.2f}" for stages in found.values()) + " |")
    lines += [
        "",
        "Reading and writing: one system call each a request; calls that share a gRPC connection share them too.",
    ]
    lines += ["", "| per request | " + " | ".join(held) + " |", "|---|" + "---:|" * len(held)]
    lines.append(
        "| memory blocks held while it waits | " + " | ".join(f"{blocks:.1f}" for blocks in held.values()) + " |"
    )
    lines += ["", "| copies of a tensor | 32 numbers | 1 MiB |", "|---|---:|---:|"]
    lines += [f"| {stage} | {small} | {large} |" for stage, small, large in copies]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
