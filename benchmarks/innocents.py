"""Innocent clients: they send a steady rate of valid requests over HTTP and gRPC, and compare each answer bit for bit.

``python -m benchmarks.innocents --http HOST:PORT --grpc HOST:PORT`` runs as a separate process. Each line on stdin is a number of
seconds. The process sends requests for this time, and then prints a ``Round`` as a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from benchmarks.requests import grpc_answer, grpc_request
from benchmarks.servers import Server
from penstock.perf import load
from penstock.perf.grpc_client import GrpcConnector
from penstock.perf.http_client import Address, connect
from penstock.perf.loops import Check, LoadWindow, OpenLoop, Target
from penstock.perf.oip_client import decode_answer, infer_request
from penstock.perf.pacing import poisson_arrivals
from penstock.perf.tally import LoadResult
from penstock.tensor import Array

MODEL = "identity"
COLUMNS = 32
RATE = 500.0
"""Requests per second over each of the two protocols."""
_REQUESTS = 64
_CONNECTIONS = 16
_WINDOW_S = 0.2
_STOP_TIMEOUT_S = 30


class Round(msgspec.Struct, frozen=True):
    """The results of one round."""

    p50_ms: float
    """Quantiles of the slower protocol. Latency counts from the time at which a request was due."""
    p99_ms: float
    max_ms: float
    requests: int
    failed: dict[str, int]
    """Number of requests without a correct answer, by protocol and kind of error."""
    cpu_s: float
    """CPU seconds of the clients."""


class Innocents:
    """Loads one server over both protocols."""

    def __init__(self, http: Address, grpc: Address, key: str = "") -> None:
        self._http, self._grpc = http, grpc
        metadata = [("authorization", f"Bearer {key}")] if key else []
        self._inputs = np.random.default_rng(0).standard_normal((_REQUESTS, 1, COLUMNS)).astype(np.float32)
        self._metadata = metadata
        line = b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in metadata)
        self._over_http = [
            infer_request(http, MODEL, {"input": row}, binary=False).replace(b"\r\n", b"\r\n" + line, 1)
            for row in self._inputs
        ]
        self._over_grpc = [grpc_request(MODEL, {"input": row}) for row in self._inputs]

    async def round(self, seconds: float, rate: float = RATE) -> Round:
        """Send requests for ``seconds`` seconds, as a Poisson process over each protocol."""
        targets = (
            (Target(self._http, self._over_http, connect), self._check_http),
            (Target(self._grpc, self._over_grpc, GrpcConnector(metadata=self._metadata)), self._check_grpc),
        )
        loops = [self._loop(target, check, seconds, rate, seed) for seed, (target, check) in enumerate(targets)]
        await asyncio.gather(*(loop.run() for loop in loops))
        results = [LoadResult(**loop.tally.figures()) for loop in loops]
        failed: Counter[str] = Counter()
        for protocol, result in zip(("HTTP", "gRPC"), results, strict=True):
            failed.update({f"{protocol}: {kind}": number for kind, number in result.errors_by_kind.items()})
        return Round(
            p50_ms=_worse(result.p50_ms for result in results),
            p99_ms=_worse(result.p99_ms for result in results),
            max_ms=_worse(result.max_ms for result in results),
            requests=sum(result.requests for result in results),
            failed=dict(failed),
            cpu_s=results[0].client_cpu * results[0].duration_s,
        )

    def _loop(self, target: Target, check: Check, seconds: float, rate: float, seed: int) -> OpenLoop:
        return OpenLoop(target, _CONNECTIONS, LoadWindow(seconds, _WINDOW_S), check, poisson_arrivals(rate, seed))

    def _check_http(self, index: int, body: bytes, json_size: int | None) -> bool:
        return self._is_right(index, decode_answer(body, json_size))

    def _check_grpc(self, index: int, body: bytes, json_size: int | None) -> bool:
        return self._is_right(index, grpc_answer(body))

    def _is_right(self, index: int, outputs: dict[str, Array]) -> bool:
        return outputs["output"].tobytes() == self._inputs[index].tobytes()


def _worse(latencies_ms: Iterable[float]) -> float:
    """The largest of ``latencies_ms``. For a protocol without a correct answer, the timeout is used."""
    return max(1e3 * LoadWindow().timeout_s if math.isnan(one) else one for one in latencies_ms)


class InnocentsProcess:
    """The process of the innocent clients, controlled by the measuring process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self, seconds: float) -> None:
        """Start a round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def finish(self) -> Round:
        """Wait for the end of the round. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of the innocent clients has ended")
        return msgspec.json.decode(line, type=Round)

    def round(self, seconds: float) -> Round:
        """Run a complete round."""
        self.begin(seconds)
        return self.finish()


@contextmanager
def innocents(server: Server, key: str = "") -> Iterator[InnocentsProcess]:
    """Run the process of the innocent clients until the body ends."""
    assert server.grpc is not None
    arguments = ["--http", server.address.authority, "--grpc", server.grpc.authority, "--key", key]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.innocents", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # on Linux, sessions share the processor equally
    )
    try:
        yield InnocentsProcess(process)
    finally:
        process.kill()
        process.communicate(timeout=_STOP_TIMEOUT_S)


def main() -> int:
    """Run one round per line on stdin."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.innocents", description="Send steady, valid load.")
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--key", default="")
    arguments = parser.parse_args()
    clients = Innocents(Address.parse(arguments.http), Address.parse(arguments.grpc), arguments.key)
    for line in sys.stdin:
        found = load.run(clients.round(float(line)))
        print(msgspec.json.encode(found).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
