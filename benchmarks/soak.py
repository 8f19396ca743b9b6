"""Hours under mixed load: ``python -m benchmarks.soak [--minutes 60]`` prints what the server holds over time, and PASS or FAIL.

The load: inference over HTTP (JSON, binary, shared memory) and gRPC, answers checked; clients that go away in the middle of a request,
of an answer, of a call; requests that are wrong in every way; control requests, metrics and statistics. Memory, descriptors and
threads of the server are sampled; after a warm-up a line is fitted through each, with a 95 % interval by a moving-block
bootstrap of the residuals, since neighbouring samples are alike (Künsch 1989). FAIL if one has surely grown by more than
its limit, if an answer was wrong, or if one was missing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import orjson

from benchmarks import models
from benchmarks.requests import Region, grpc_answer, grpc_request, post, shared_region
from benchmarks.servers import Server, penstock, pinned, split_cores
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import Unavailable
from penstock.measurement import Interval
from penstock.perf import load
from penstock.perf.grpc_client import GrpcConnector, Lane
from penstock.perf.http_client import AnswerHead, HttpSession
from penstock.perf.oip_client import decode_answer, infer_request
from penstock.tensor import Array

LIMITS = {"memory, MiB": 4.0, "descriptors": 3.0, "threads": 1.0}
"""How much each may grow in the measured time before it counts as growth."""
_WARM_UP = 0.2  # of the time, or
_MOST_WARM_UP_S = 300.0
_SAMPLES = 600
_RESAMPLES = 2000
_PAUSE_S = 0.002
_PATIENCE_S = 10.0
_ROWS = 32


class Soak:
    """The clients. ``done`` counts what they did, ``wrong`` what should not have happened."""

    def __init__(self, server: Server, region: Region, inputs: Array, expected: Array) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self._server = server
        self._inputs, self._expected = inputs, expected
        self._region = region
        self._random = random.Random(0)
        address = server.address
        rows = [{"input": inputs[row : row + 1]} for row in range(len(inputs))]
        self._http = {
            form: [infer_request(address, "mlp", one, binary=form == "binary") for one in rows]
            for form in ("JSON", "binary")
        }
        self._grpc = [grpc_request("mlp", one) for one in rows]
        self._shared = region.requests(server, "identity")
        self._bad = _bad_requests(server, self._http["JSON"][0])

    async def run(self, seconds: float) -> None:
        """Have all clients work side by side for so long."""
        clients = [
            *(self._infer(form) for form in ("JSON", "binary") for _ in range(4)),
            self._call(), self._call(), self._use_shared_memory(), self._leave(), self._leave_calls(), self._misbehave(),
            self._control(),
        ]  # fmt: skip
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(self._until(end, client) for client in clients))

    async def _until(self, end: float, client: Callable[[], Awaitable[None]]) -> None:
        while asyncio.get_running_loop().time() < end:
            await client()
            await asyncio.sleep(_PAUSE_S * self._random.random())

    def _infer(self, form: str) -> Callable[[], Awaitable[None]]:
        session = HttpSession(self._server.address)

        async def work() -> None:
            row = self._random.randrange(_ROWS)
            answer = await session.ask(self._http[form][row])
            if answer.status != 200:
                self.wrong[f"{form}: HTTP {answer.status}"] += 1
            else:
                self._judge(form, row, decode_answer(answer.body, answer.json_size)["output"])

        return work

    def _judge(self, what: str, row: int, output: Array) -> None:
        self.done[what] += 1
        if not np.allclose(output, self._expected[row : row + 1], rtol=1e-4, atol=1e-5):
            self.wrong[f"{what}: another answer"] += 1

    def _call(self) -> Callable[[], Awaitable[None]]:
        lanes: list[Lane] = []
        waiting: list[asyncio.Future[bytes]] = []

        def on_answer(lane: Lane, head: AnswerHead) -> None:
            future = waiting.pop()
            if future.done():
                return  # it was given up
            if head.status == 200:
                future.set_result(lane.body())
            else:
                future.set_exception(Unavailable(f"{head.status} {lane.body().decode(errors='replace')}"))

        async def work() -> None:
            assert self._server.grpc is not None
            if not lanes:
                lanes.append(await GrpcConnector()(self._server.grpc, on_answer, lambda *_: lanes.clear()))
            row = self._random.randrange(_ROWS)
            waiting[:] = [asyncio.get_running_loop().create_future()]
            lanes[0].send(self._grpc[row], 0, 0.0, 0.0)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self._judge("gRPC", row, grpc_answer(await waiting[0])["output"])
            except (TimeoutError, Unavailable) as error:
                self.wrong[f"gRPC: {str(error) or 'no answer'}"] += 1
                if lanes:
                    lanes[0].drop("given up")
                    lanes.clear()

        return work

    def _use_shared_memory(self) -> Callable[[], Awaitable[None]]:
        session = HttpSession(self._server.address)

        async def work() -> None:
            self._region.clear()
            for request in self._shared:
                answer = await session.ask(request)
                if answer.status != 200:
                    self.wrong[f"shared memory: HTTP {answer.status} {answer.body[:200]!r}"] += 1
            self.done["shared memory"] += len(self._shared)
            if not self._region.answered:
                self.wrong["shared memory: another answer"] += 1

        return work

    def _leave(self) -> Callable[[], Awaitable[None]]:
        """Go away somewhere within a request, or before its answer."""

        async def work() -> None:
            request = self._random.choice(self._http["binary"])
            cut = self._random.choice((len(request), self._random.randrange(1, len(request))))
            _, writer = await asyncio.open_connection(self._server.address.host, self._server.address.port)
            writer.write(request[:cut])
            if self._random.random() < 0.5:
                await asyncio.sleep(_PAUSE_S)
            writer.transport.abort()
            self.done["clients that left"] += 1

        return work

    def _leave_calls(self) -> Callable[[], Awaitable[None]]:
        """Cancel calls, which ends their connection too."""

        async def work() -> None:
            assert self._server.grpc is not None
            gone = asyncio.Event()
            connector = GrpcConnector()
            lanes = [await connector(self._server.grpc, lambda *_: None, lambda *_: gone.set()) for _ in range(3)]
            for lane in lanes:
                lane.send(self._grpc[0], 0, 0.0, 0.0)
            if self._random.random() < 0.5:
                await asyncio.sleep(_PAUSE_S)
            for lane in lanes:
                lane.drop("cancelled")
            await gone.wait()
            self.done["calls cancelled"] += len(lanes)

        return work

    def _misbehave(self) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            request, statuses = self._random.choice(self._bad)
            session = HttpSession(self._server.address)
            try:
                answer = await session.ask(request)
            except Unavailable:
                self.wrong[f"no answer to {request[:60]!r}"] += 1
                return
            finally:
                session.close()
            self.done["bad requests"] += 1
            if answer.status not in statuses:
                self.wrong[f"HTTP {answer.status} to {request[:60]!r}"] += 1

        return work

    def _control(self) -> Callable[[], Awaitable[None]]:
        session = HttpSession(self._server.address)
        host = self._server.address.authority
        paths = ("/v2", "/v2/health/ready", "/v2/models/mlp", "/v2/models/mlp/config", "/v2/models/mlp/stats")
        gets = [f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() for path in paths]
        gets.append(post(self._server.address, "/v2/repository/index", b"{}"))

        async def work() -> None:
            answer = await session.ask(self._random.choice(gets))
            self.done["control"] += 1
            if answer.status != 200:
                self.wrong[f"control: HTTP {answer.status}"] += 1

        return work


def _bad_requests(server: Server, good: bytes) -> list[tuple[bytes, Sequence[int]]]:
    """Requests, and the statuses that are right for them."""
    path = "/v2/models/mlp/infer"
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, 32], "data": [0.0] * 32}

    def infer(**changed: object) -> bytes:
        return post(server.address, path, orjson.dumps({"inputs": [tensor | changed]}))

    return [
        (post(server.address, path, b"{"), (400,)),
        (post(server.address, path, b"[" * 10_000), (400,)),
        (infer(shape=[1, 31]), (400,)),
        (infer(shape=[1, 2**40]), (400,)),
        (infer(name="other"), (400,)),
        (infer(datatype="FP33"), (400,)),
        (infer(data=["a"] * 32), (400,)),
        (post(server.address, "/v2/models/nobody/infer", b'{"inputs":[]}'), (404,)),
        (post(server.address, "/nowhere", b""), (404,)),
        (post(server.address, "/v2/repository/models/mlp/load", b"{}"), (503,)),
        (post(server.address, "/v2/repository/models/mlp/unload", b"{}"), (503,)),
        (good.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nContent-Encoding: lzma\r\n", 1), (501,)),
        (b"nonsense\r\n\r\n", (400,)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", (431,)),
    ]


class Sample(msgspec.Struct, frozen=True):
    """What the server holds at one moment, in seconds after the start."""

    at: float
    held: dict[str, float]


def sample(server: Server, at: float) -> Sample:
    """By the names of ``LIMITS``."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    threads = int(status.partition("Threads:")[2].split()[0])
    descriptors = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    return Sample(
        at, {"memory, MiB": server.rss_bytes() / 2**20, "descriptors": float(descriptors), "threads": float(threads)}
    )


def growth(at: Sequence[float], values: Sequence[float], seed: int = 0) -> Interval:
    """How much a line through the samples rises from the first to the last, with a 95 % interval."""
    times, found = np.array(at), np.array(values)
    span = times[-1] - times[0]
    centred = times - times.mean()

    def slope(y: Array) -> Array:
        return (y @ centred) / (centred @ centred)

    line = found.mean() + slope(found) * centred
    residuals, count = found - line, len(found)
    block = max(1, round(count**0.5))
    generator = np.random.default_rng(seed)
    starts = generator.integers(0, count - block + 1, (_RESAMPLES, -(-count // block)))
    picks = (starts[:, :, None] + np.arange(block)).reshape(_RESAMPLES, -1)[:, :count]
    low, high = np.quantile(slope(line + residuals[picks]), (0.025, 0.975))
    return Interval(float(slope(found) * span), float(low * span), float(high * span))


def verdict(samples: Sequence[Sample], warm_up_s: float) -> tuple[list[str], bool]:
    """A line of text for each figure, and whether none has surely grown by more than its limit."""
    counted = [one for one in samples if one.at >= warm_up_s]
    lines, passed = [], True
    for name, limit in LIMITS.items():
        values = [one.held[name] for one in counted]
        found = growth([one.at for one in counted], values)
        grown = found.low > 0 and found.value > limit
        passed = passed and not grown
        lines.append(
            f"{name}: {values[0]:.1f} → {values[-1]:.1f}, the line rises by {found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}] "
            f"in {(counted[-1].at - counted[0].at) / 60:.1f} minutes, limit {limit:g}: {'GREW' if grown else 'flat'}"
        )
    return lines, passed


async def watch(server: Server, soak: Soak, seconds: float) -> list[Sample]:
    """Load the server and sample it. Raises Unavailable if it goes away."""
    start = time.monotonic()
    samples: list[Sample] = []
    work = asyncio.ensure_future(soak.run(seconds))
    while not work.done():
        samples.append(sample(server, time.monotonic() - start))
        print(f"\r{samples[-1].at:6.0f} s  {samples[-1].held}  wrong: {soak.wrong.total()}", end="", flush=True)
        await asyncio.wait((work,), timeout=seconds / _SAMPLES)
    print()
    await work
    return samples


def main() -> int:
    """Soak, and say how it went."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Long mixed load on one server.")
    parser.add_argument("--minutes", type=float, default=60.0)
    seconds = 60 * parser.parse_args().minutes
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((_ROWS, 32)).astype(np.float32)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        mlp = models.mlp(folder / "mlp.onnx")
        identity = models.identity(folder / "identity.onnx", 4096)
        engine = get_engine("onnxruntime").load(Artifact.from_file(mlp), {"threads": 1})
        expected = engine.forward({"input": inputs})["output"]
        cores, others = split_cores()
        server = held.enter_context(penstock(mlp, cores, str(identity)))
        region = held.enter_context(shared_region(inputs[:1].repeat(128, 1), 8))
        with pinned(others):
            soak = Soak(server, region, inputs, expected)
            samples = load.run(watch(server, soak, seconds))
    lines, passed = verdict(samples, min(_WARM_UP * seconds, _MOST_WARM_UP_S))
    print("\n".join([*lines, f"done: {dict(soak.done)}", f"wrong: {dict(soak.wrong)}"]))
    passed = passed and not soak.wrong
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
