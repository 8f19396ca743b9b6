"""The memory that loading and unloading leave behind. Compares the resident set of the server and its processes before the first
cycle and after several cycles. A cycle loads and unloads a model of 100 MB. A small model stays loaded, so that the engine is in
memory from the start.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import models
from benchmarks.repository.control import Control, add, repository_server
from benchmarks.results import Row, claim, skipped
from benchmarks.servers import Server, split_cores
from penstock.perf.load import run

_MARKS = (20, 100, 200)
_PROCESS_MARKS = (5, 10, 20)  # starting a process takes a second
_WIDTHS = (5000, 5000, 8)
_MOST_S = 190.0
_SETTLE_S = 2.0  # freed memory is returned to the system once a second
_MIB = 1 << 20


def memory(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        add(root, "large", models.mlp(Path(folder) / "large.onnx", _WIDTHS))
        add(root, "small", models.mlp(Path(folder) / "small.onnx"))
        for isolation, marks in (("thread", _MARKS), ("process", _PROCESS_MARKS)):
            flags = ("--model-control-mode", "explicit", "--load-model", "small", "--isolation", isolation)
            with repository_server(root, split_cores()[0], *flags) as server:
                rows.append(run(grown(server, isolation, (2, 4) if quick else marks)))
    return rows


async def grown(server: Server, isolation: str, marks: Sequence[int]) -> Row:
    """The increase of the server's memory over the cycles. ``marks`` are the numbers of cycles after which memory is read."""
    control = Control(server.address)
    held = [server.rss_bytes()]
    loaded = 0
    start = time.monotonic()
    for cycle in range(1, marks[-1] + 1):
        await control.load("large")
        loaded = max(loaded, server.rss_bytes())
        await control.unload("large")
        await control.is_gone("large")
        if cycle in marks:
            await asyncio.sleep(_SETTLE_S)
            held.append(server.rss_bytes())
        if time.monotonic() - start > _MOST_S:
            return skipped(f"memory after {marks[-1]} cycles, {isolation}", f"{cycle} took {_MOST_S:g} s")
    control.close()
    figures = ", ".join(f"{size / _MIB:.0f}" for size in held)
    note = (
        f"{figures} MiB at the start and after {', '.join(map(str, marks))} cycles; {loaded / _MIB:.0f} while loaded;"
        f" {(time.monotonic() - start) / marks[-1]:.2f} s a cycle"
    )
    title = f"memory after {marks[-1]} cycles of a 100 MB model, {isolation}"
    return claim(title, 100 * (held[-1] / held[0] - 1), "%", "<=", 10, note=note)
