"""Soak test with hours of mixed load. ``python -m benchmarks.soak [--minutes 60] [--hostile]`` prints the server's resources over
time, and PASS or FAIL.

The load consists of inference over HTTP (JSON, binary, shared memory) and gRPC with checked answers, clients that disconnect in
the middle of a request, an answer or a call, many kinds of invalid requests, control requests, metrics and statistics. The
server's memory, descriptors and threads are sampled. After a warm-up, a line is fitted to the samples of each resource. Its 95 %
interval comes from a moving-block bootstrap of the residuals, because neighbouring samples are correlated (Künsch 1989). The test
fails if a resource has significantly grown by more than its limit, if an answer was wrong, or if an answer was missing.

With ``--hostile``, a random attack of ``benchmarks.attacks`` runs for a few seconds in every ten. Samples are taken after the
pause that follows an attack, and only the second half of the samples is used. A refusal (429 or 503, or the corresponding gRPC
statuses) is then not an error. A request without any response counts as lost. A run of at least ten minutes writes
``results/soak.json`` and ``RESULTS.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import orjson

from benchmarks import models
from benchmarks.attacks.strikes import Strikes
from benchmarks.attacks.targets import make_models
from benchmarks.machine import MachineWatch
from benchmarks.requests import Region, grpc_answer, grpc_request, post, shared_region
from benchmarks.results import REPORT, Result, Row, claim, failed, goal, render, save, shown
from benchmarks.results import load as load_results
from benchmarks.scenarios import REPORTED
from benchmarks.servers import Server, penstock, pinned, split_cores
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import DeadlineExceeded, Unavailable
from penstock.measurement import Interval
from penstock.perf import load
from penstock.perf.grpc_client import GrpcConnector, Lane
from penstock.perf.http_client import AnswerHead, HttpSession
from penstock.perf.oip_client import decode_answer, infer_request
from penstock.tensor import Array

LIMITS = {"memory, MiB": 4.0, "descriptors": 3.0, "threads": 1.0}
"""Maximum growth of each figure in the measured time. Only a larger increase counts as growth."""
HOSTILE_LIMITS = {"memory, MiB": 16.0, "descriptors": 8.0, "threads": 4.0}
"""Maximum growth of each figure, measured between attacks."""
_PERIOD_S = 10.0  # from one attack to the next, of which
_REST_S = 4.0  # at least without one
_KEPT_S = 600.0
_FULL_S = 3600.0
_MOST_KINDS = 5
_WARM_UP = 0.2  # of the time, or
_MOST_WARM_UP_S = 300.0
_SAMPLES = 600
_RESAMPLES = 2000
_PAUSE_S = 0.002
_SHOWN = 80
_PATIENCE_S = 30.0
_ROWS = 32
_REFUSALS = {("HTTP", 429), ("HTTP", 503), ("gRPC", 8), ("gRPC", 14)}
"""Statuses with which a server refuses a request because a limit is reached."""
_REFUSED = ": refused with "
_MAX_REFUSED = 0.01
"""Maximum fraction of operations that may be refused during attacks."""


class Soak:
    """The clients. ``done`` counts operations, ``wrong`` counts errors, and ``lost`` counts requests without a response."""

    def __init__(
        self, server: Server, region: Region, inputs: Array, expected: Array, *, may_refuse: bool = False
    ) -> None:
        """With ``may_refuse``, the server may refuse inference because a limit is reached."""
        self.done: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._may_refuse = may_refuse
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
        self._shared = region.requests(server, "wide")
        self._bad = _bad_requests(server, self._http["JSON"][0])

    async def run(self, seconds: float) -> None:
        """Run all clients concurrently for ``seconds`` seconds."""
        clients = [
            *(self._infer(form) for form in ("JSON", "binary") for _ in range(4)),
            self._call(), self._call(), self._use_shared_memory(), self._leave(), self._leave_calls(), self._misbehave(),
            self._control(),
        ]  # fmt: skip
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(self._until(end, client) for client in clients))

    async def _until(self, end: float, client: Callable[[], Awaitable[None]]) -> None:
        while asyncio.get_running_loop().time() < end:
            try:
                await client()
            except (Unavailable, DeadlineExceeded, OSError) as error:
                self.lost[str(error)[:_SHOWN]] += 1
            await asyncio.sleep(_PAUSE_S * self._random.random())

    def _infer(self, form: str) -> Callable[[], Awaitable[None]]:
        session = HttpSession(self._server.address)

        async def work() -> None:
            row = self._random.randrange(_ROWS)
            answer = await session.ask(self._http[form][row])
            if answer.status == 200:
                self._judge(form, row, decode_answer(answer.body, answer.json_size)["output"])
            else:
                self._refused(form, "HTTP", answer.status)

        return work

    def _judge(self, what: str, row: int, output: Array) -> None:
        self.done[what] += 1
        if output.tobytes() != self._expected[row : row + 1].tobytes():
            self.wrong[f"{what}: another answer"] += 1

    def _refused(self, what: str, protocol: str, status: int) -> None:
        is_clear = self._may_refuse and (protocol, status) in _REFUSALS
        (self.done if is_clear else self.wrong)[f"{what}{_REFUSED}{protocol} {status}"] += 1

    def _call(self) -> Callable[[], Awaitable[None]]:
        lanes: list[Lane] = []
        waiting: list[asyncio.Future[tuple[int, bytes]]] = []

        def on_answer(lane: Lane, head: AnswerHead) -> None:
            future = waiting.pop()
            if future.done():
                return  # the call was abandoned
            future.set_result((head.status, lane.body()))

        def on_lost(lane: Lane, why: str) -> None:
            lanes.clear()
            if waiting and not waiting[-1].done():
                waiting[-1].set_exception(Unavailable(f"gRPC: {why}"))

        async def work() -> None:
            assert self._server.grpc is not None
            if not lanes:
                lanes.append(await GrpcConnector()(self._server.grpc, on_answer, on_lost))
            row = self._random.randrange(_ROWS)
            waiting[:] = [asyncio.get_running_loop().create_future()]
            lanes[0].send(self._grpc[row], 0, 0.0, 0.0)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    status, body = await waiting[0]
            except TimeoutError:
                self.lost["gRPC: no answer"] += 1
                if lanes:
                    lanes[0].drop("given up")
                    lanes.clear()
                return
            if status == 200:
                self._judge("gRPC", row, grpc_answer(body)["output"])
            else:
                self._refused("gRPC", "gRPC", status)

        return work

    def _use_shared_memory(self) -> Callable[[], Awaitable[None]]:
        session = HttpSession(self._server.address)

        async def work() -> None:
            self._region.clear()
            for request in self._shared:
                answer = await session.ask(request)
                if answer.status != 200:
                    self._refused("shared memory", "HTTP", answer.status)
                    return
            self.done["shared memory"] += len(self._shared)
            if not self._region.answered:
                self.wrong["shared memory: another answer"] += 1

        return work

    def _leave(self) -> Callable[[], Awaitable[None]]:
        """Disconnect in the middle of a request, or before its answer."""

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
        """Cancel calls, which also ends their connection."""

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
    """Invalid requests, each with the statuses that are correct for it."""
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
    """The server's resources at one moment, in seconds after the start."""

    at: float
    held: dict[str, float]


def sample(server: Server, at: float) -> Sample:
    """Read the server's resources. The fields are the names in ``LIMITS``."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    threads = int(status.partition("Threads:")[2].split()[0])
    descriptors = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
    return Sample(
        at, {"memory, MiB": server.rss_bytes() / 2**20, "descriptors": float(descriptors), "threads": float(threads)}
    )


def growth(at: Sequence[float], values: Sequence[float], seed: int = 0) -> Interval:
    """The increase, from the first to the last sample, of a line fitted to the samples, with its 95 % interval."""
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


def verdict(samples: Sequence[Sample], warm_up_s: float, limits: Mapping[str, float] = LIMITS) -> list[Row]:
    """A row for each figure. Its goal holds unless the figure has significantly grown by more than its limit."""
    counted = [one for one in samples if one.at >= warm_up_s]
    minutes = (counted[-1].at - counted[0].at) / 60
    rows = []
    for name, limit in limits.items():
        values = [one.held[name] for one in counted]
        found = growth([one.at for one in counted], values)
        row = claim(
            f"growth of {name}",
            found,
            "",
            "<=",
            limit,
            note=f"{values[0]:.1f} → {values[-1]:.1f} in {minutes:.1f} minutes",
        )
        rows.append(msgspec.structs.replace(row, holds=found.value <= limit or found.low <= 0))
    return rows


async def watch(server: Server, soak: Soak, seconds: float, strikes: Strikes | None = None) -> list[Sample]:
    """Load the server and sample its resources, with ``strikes`` at the end of each period. Raises an error if the server ends."""
    start = time.monotonic()
    samples: list[Sample] = []
    work = asyncio.ensure_future(soak.run(seconds))
    struck, pause = "", seconds / _SAMPLES
    while not work.done():
        samples.append(sample(server, time.monotonic() - start))
        held = ", ".join(f"{name} {value:.0f}" for name, value in samples[-1].held.items())
        failures = f"wrong {soak.wrong.total()}, lost {soak.lost.total()}"
        if strikes is None:
            print(f"\r{samples[-1].at:6.0f} s  {held}  {failures}", end="", flush=True)
        else:
            print(f"{samples[-1].at:6.0f} s  {held}  {failures}  {struck}", flush=True)
            begun = time.monotonic()
            struck = await strikes.strike()
            pause = max(_REST_S, _PERIOD_S - (time.monotonic() - begun))
        await asyncio.wait((work,), timeout=pause)
    print()
    await work
    return samples


def exact_mlp(path: Path) -> Path:
    """The MLP of ``models.mlp`` with small integer weights. For integer inputs, its outputs are exact for every batch size."""
    graph = models.GraphBuilder()

    def layer(x: str, rows: int, columns: int) -> str:
        return graph.op("MatMul", x, graph.weight(graph.rng.integers(-3, 4, (rows, columns)).astype(np.float32)))

    return graph.save(path, layer(graph.op("Relu", layer("input", 32, 64)), 64, 8), [32], [8])


@contextmanager
def soaked_server(folder: Path, *, may_refuse: bool) -> Iterator[tuple[Server, Soak]]:
    """Run a server with the models for the soak test and the attacks, and create the clients."""
    inputs = np.random.default_rng(0).integers(-8, 9, (_ROWS, 32)).astype(np.float32)
    mlp = exact_mlp(folder / "mlp.onnx")
    root = make_models(folder)
    engine = get_engine("onnxruntime").load(Artifact.from_file(mlp), {"threads": 1})
    expected = engine.forward({"input": inputs})["output"]
    with (
        penstock(mlp, split_cores()[0], "--model-repository", str(root)) as server,
        shared_region(inputs[:1].repeat(128, 1), 8) as region,
    ):
        yield server, Soak(server, region, inputs, expected, may_refuse=may_refuse)


def main() -> int:
    """Run the soak test and report the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Long mixed load on one server.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--hostile", action="store_true", help="attack the server at random during the test")
    arguments = parser.parse_args()
    if arguments.hostile and arguments.minutes < 1:
        parser.error(f"--hostile needs --minutes of at least 1, got {arguments.minutes:g}")
    seconds = 60 * arguments.minutes
    machine = MachineWatch()
    with tempfile.TemporaryDirectory() as folder, soaked_server(Path(folder), may_refuse=arguments.hostile) as held:
        server, soak = held
        with pinned(split_cores()[1]):
            strikes = Strikes(server) if arguments.hostile else None
            samples = load.run(watch(server, soak, seconds, strikes))
    if strikes is None:
        rows = verdict(samples, min(_WARM_UP * seconds, _MOST_WARM_UP_S))
    else:
        rows = verdict(samples, seconds / 2, HOSTILE_LIMITS)
        print(f"attacks: {dict(strikes.done)}")
    for name, counts in (("wrong answers", soak.wrong), ("lost requests", soak.lost)):
        note = ", ".join(f"{number} {what}" for what, number in counts.most_common(_MOST_KINDS))
        rows.append(claim(name, counts.total(), "", "<=", 0, note=note or f"of {soak.done.total():,} operations"))
    refused = sum(number for what, number in soak.done.items() if _REFUSED in what)
    rows.append(claim("refused requests", refused, "", "<=", _MAX_REFUSED * soak.done.total()))
    for row in rows:
        print(f"{row.name}: {shown(row)}, goal {goal(row)}: {'holds' if row.holds else 'MISSED'} ({row.note})")
    print(f"done: {dict(soak.done)}\nwrong: {dict(soak.wrong)}\nlost: {dict(soak.lost)}")
    if strikes is not None and seconds >= _KEPT_S:
        about = " ".join((__doc__ or "").split())
        result = Result(
            scenario="soak", about=about, machine=machine.finish(), quick=seconds < _FULL_S, rows=tuple(rows)
        )
        print(f"written to {save(result)}")
        REPORT.write_text(render(load_results(REPORTED)))
    print("FAIL" if failed(rows) else "PASS")
    return 1 if failed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
