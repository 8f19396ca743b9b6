"""The effect of loading, unloading and changing models on requests to other models. An open loop sends requests at a fraction of
the server's capacity, because in a saturated closed loop, p99 depends only on the queue. Quiet and busy windows alternate. In a
busy window, a client runs control operations without a pause: it reloads models with changed files, unloads and loads models, and
changes the number of instances. An MLP of 4 MB stays loaded. Another MLP of 4 MB and a ResNet-18 of 45 MB change. They also
receive requests while they are loaded.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.repository.control import Control, add, replace, repository_server
from benchmarks.results import Row, claim, fact
from benchmarks.rounds import ratio
from benchmarks.servers import Server, pinned, split_cores
from penstock.perf.load import closed_loop, open_loop, run
from penstock.perf.loops import LoadWindow
from penstock.perf.oip_client import infer_request
from penstock.perf.tally import LoadResult

_CONNECTIONS = 16
_SHARE = 0.5
"""The request rate as a fraction of the capacity, which is the rate of a single connection in a closed loop, without merging."""
_OTHERS = {"mlp_changes": 10, "mlp_grows": 10, "cnn_changes": 1}
"""Requests per second to each kind of model that changes. One request to the CNN keeps the core busy for milliseconds."""
_OPERATIONS = 200
_FEWEST = 5
"""Number of quiet and of busy windows."""
_MOST_S = 200.0
_WIDTHS = (512, 1024, 512)
_IMAGE = 64

Operation = Callable[[], Awaitable[None]]


class Operations:
    """Runs control operations on the models, in turn. ``seconds`` has the durations of the operations, by kind."""

    def __init__(self, root: Path, variants: dict[str, list[Path]], control: Control) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._root = root
        self._control = control
        self._files = {name: itertools.cycle(files) for name, files in variants.items()}
        self._turns = itertools.cycle(self._kinds())

    @property
    def count(self) -> int:
        return sum(map(len, self.seconds.values()))

    async def work(self, seconds: float) -> None:
        """Run one operation after the other for ``seconds`` seconds. The last operation may take longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            kind, operation = next(self._turns)
            start = time.monotonic()
            await operation()
            self.seconds[kind].append(time.monotonic() - start)

    def _kinds(self) -> Iterator[tuple[str, Operation]]:
        for kind, count in (("mlp", 2), ("cnn", 1), ("mlp", 1)):
            yield f"{kind}: reload", lambda kind=kind: self._reload(f"{kind}_changes")  # type: ignore[misc]
            yield f"{kind}: unload", lambda kind=kind: self._control.unload(f"{kind}_leaves")  # type: ignore[misc]
            yield f"{kind}: load", lambda kind=kind: self._control.load(f"{kind}_leaves")  # type: ignore[misc]
            config = {"instance_group": [{"count": count}]}
            yield "instances", lambda config=config: self._control.load("mlp_grows", config)  # type: ignore[misc]

    async def _reload(self, name: str) -> None:
        replace(self._root, name, next(self._files[name]))
        await self._control.load(name)


def reload(quick: bool) -> list[Row]:
    """Return the rows of this part. The server runs on one core, on which loading and answering alternate, and then on all cores,
    of which it shares one with the load generator.
    """
    found = []
    for where, cores in (("one core", split_cores()[0]), ("all cores", os.sched_getaffinity(0))):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "models"
            variants = make(Path(folder), root)
            flags = ("--model-control-mode", "explicit", "--load-model", "*")
            with repository_server(root, cores, *flags) as server, pinned(split_cores()[1]):
                plan = (4, 1.5) if quick else (_OPERATIONS, 2.0)
                found += run(measure(server, root, variants, *plan, where=where))
    return found


def make(folder: Path, root: Path) -> dict[str, list[Path]]:
    """Fill the repository ``root``. For each model that changes, returns the files with which it is replaced."""
    mlps = [models.mlp(folder / f"mlp{seed}.onnx", _WIDTHS, seed) for seed in range(2)]
    cnns = [models.resnet18(folder / f"cnn{seed}.onnx", _IMAGE, seed) for seed in range(2)]
    for name in ("stays", "mlp_changes", "mlp_leaves", "mlp_grows"):
        add(root, name, mlps[0])
    for name in ("cnn_changes", "cnn_leaves"):
        add(root, name, cnns[0])
    return {"mlp_changes": mlps[::-1], "cnn_changes": cnns[::-1]}


async def measure(
    server: Server, root: Path, variants: dict[str, list[Path]], operations: int, seconds: float, where: str
) -> list[Row]:
    """Alternate quiet and busy windows of ``seconds`` seconds until ``operations`` control operations are done."""
    rng = np.random.default_rng(0)
    row = {"input": rng.standard_normal((1, _WIDTHS[0])).astype(np.float32)}
    image = {"input": rng.standard_normal((1, 3, _IMAGE, _IMAGE)).astype(np.float32)}
    stays = [infer_request(server.address, "stays", row, binary=True)]
    changing = [
        infer_request(server.address, name, image if name.startswith("cnn") else row, binary=True)
        for name, rate in _OTHERS.items()
        for _ in range(rate)
    ]
    capacity = (await closed_loop(server.address, stays, 1, LoadWindow(2.0, 0.5))).throughput
    control = Control(server.address)
    done = Operations(root, variants, control)
    results: dict[str, list[LoadResult]] = {"quiet": [], "busy": []}
    others: list[LoadResult] = []
    numbers = itertools.count()

    async def window(busy: bool) -> None:
        span = LoadWindow(seconds, 0.3)
        number = next(numbers)
        found, other, _ = await asyncio.gather(
            open_loop(server.address, stays, _SHARE * capacity, span, max_connections=_CONNECTIONS, seed=number),
            open_loop(server.address, changing, len(changing), span, seed=number),
            done.work(seconds + 0.3 if busy else 0.0),
        )
        results["busy" if busy else "quiet"].append(found)
        others.append(other)

    end = time.monotonic() + _MOST_S
    await window(busy=True)  # first loads and unloads, of which only the failures count
    while (len(results["quiet"]) < _FEWEST or done.count < operations) and time.monotonic() < end:
        for busy in (False, True) if len(others) % 4 == 1 else (True, False):
            await window(busy)
    control.close()
    return rows(results, others, done, capacity, where)


def rows(
    results: dict[str, list[LoadResult]], others: list[LoadResult], done: Operations, capacity: float, where: str
) -> list[Row]:
    """The rows for the measured windows. ``capacity`` is in requests per second. ``where`` describes the server's cores."""
    windows = [*results["quiet"], *results["busy"]]
    found = []
    for what, some in (("a model that stays", windows), ("models that change", others)):
        kinds = {kind: one.first_errors.get(kind, "") for one in some for kind in one.errors_by_kind}
        note = f"of {sum(one.requests for one in some):,} {kinds or ''}"
        found.append(
            claim(f"failed requests to {what}, {where}", sum(one.errors for one in some), "", "<=", 0, note=note)
        )
    for name in ("p50_ms", "p99_ms", "max_ms"):
        over, under = (
            [getattr(one, name) for one in results[kind][-len(results["quiet"]) :]] for kind in ("busy", "quiet")
        )
        figures = " : ".join(f"{statistics.median(values):.3g}" for values in (over, under))
        note = f"{figures} ms, medians of {len(over)} windows, {_SHARE * capacity:,.0f} requests/s"
        title, value = (
            f"{name.partition('_')[0]} while others change to that of quiet windows, {where}",
            ratio(over, under),
        )
        goal = claim(title, value, "×", "<=", 1.5, note=note)
        found.append(goal if name == "p99_ms" else fact(title, value.value, "×", interval=value, note=note))
    times = "; ".join(f"{kind} {1e3 * statistics.median(some):.0f}" for kind, some in sorted(done.seconds.items()))
    return [*found, fact(f"control operations while asked, {where}", done.count, "", note=f"median ms: {times}")]
