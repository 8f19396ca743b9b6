"""Three hundred small ONNX models without configuration, in one server on one core. Measures the start time, the queries about all
models, and the CPU time and memory of the idle server.
"""

from __future__ import annotations

import socket
import tempfile
import time
from pathlib import Path

from benchmarks import models
from benchmarks.repository.control import add, repository_server
from benchmarks.requests import post
from benchmarks.results import Row, claim, fact
from benchmarks.servers import Server, pinned, split_cores
from penstock.perf.http_client import Address
from penstock.perf.load import closed_loop, run
from penstock.perf.loops import LoadWindow

_COUNT = 300
_SETTLE_S = 2.0


def many(quick: bool) -> list[Row]:
    """Return the rows of this part."""
    count, idle_s = (30, 3.0) if quick else (_COUNT, 20.0)
    with tempfile.TemporaryDirectory() as folder:
        model = models.mlp(Path(folder) / "model.onnx")
        sizes = []
        for some in (1, count):
            root = Path(folder) / f"{some}"
            for number in range(some):
                add(root, f"model-{number:03}", model)
            metrics = _free_port()
            with repository_server(root, split_cores()[0], "--metrics-port", str(metrics.port)) as server:
                sizes.append(server.rss_bytes())
                found = rows(server, metrics, count, idle_s) if some == count else []
    each = (sizes[1] - sizes[0]) / (count - 1) / 1024
    return [*found, fact("memory for each model more", each, "KiB", note=f"{sizes[1] / 2**20:.0f} MiB with all")]


def rows(server: Server, metrics: Address, count: int, idle_s: float) -> list[Row]:
    """Measure a running server with ``count`` models."""
    time.sleep(_SETTLE_S)
    used = server.cpu_seconds()
    time.sleep(idle_s)
    used = (server.cpu_seconds() - used) / idle_s
    asked = {
        "index": (server.address, post(server.address, "/v2/repository/index", b"{}")),
        "metrics": (metrics, f"GET /metrics HTTP/1.1\r\nHost: {metrics.authority}\r\n\r\n".encode()),
    }
    with pinned(split_cores()[1]):
        answers = {
            name: run(closed_loop(address, [request], 1, LoadWindow(None, max_requests=200)))
            for name, (address, request) in asked.items()
        }
    if failed := [answer.first_errors for answer in answers.values() if answer.errors]:
        raise RuntimeError(f"index or metrics failed: {failed}")
    return [
        claim(f"start of {count} models", server.ready_s, "s", "<=", 30, note="of the process, to its line 'ready'"),
        *(
            claim(f"{name} of {count} models, p99", found.p99_ms, "ms", "<=", 100, note=f"p50 {found.p50_ms:.3g} ms")
            for name, found in answers.items()
        ),
        claim(f"idle with {count} models, of a core", 100 * used, "%", "<=", 1, note=f"over {idle_s:g} s"),
    ]


def _free_port() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return Address("127.0.0.1", found.getsockname()[1])
