"""The cost of never mapping shared-memory regions. For 1 MiB inputs in shared memory, compares the requests per second of
Penstock's server and of a server that maps the regions. Mapping is safe only if clients never truncate a region. Both servers run
in turn, on a separate core.

python -m benchmarks.shared_memory_price [--seconds N] [--rounds N]

The identity model shows the highest cost, because it only copies and its outputs also have 1 MiB. The other model is a linear
layer with 1 MiB inputs and few outputs. The figures by CPU time are also valid on a busy machine.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models
from benchmarks.requests import shared_region
from benchmarks.rounds import Pick, http_side, measure, median, ratio
from benchmarks.servers import penstock, serving, split_cores
from penstock.cli.main import run
from penstock.online.server.shared_memory import lease, registry
from penstock.online.server.shared_memory.region import Region
from penstock.tensor import Array, Buffer, DataType, from_wire

_WIDTH = 1 << 18
_SLOTS = 8
_CONNECTIONS = 4
_PICKS: dict[str, Pick] = {
    "by CPU time": lambda one: one.per_cpu_second,
    "by the clock": lambda one: one.throughput,
}


class MappedRegion(Region):
    """A region that trusts its client. Inputs are views of a mapping, and outputs are copied into the mapping."""

    def __init__(self, name: str, key: str, offset: int, byte_size: int) -> None:
        super().__init__(name, key, offset, byte_size)
        self.view = memoryview(mmap.mmap(self._file, byte_size))

    def write(self, offset: int, data: Buffer) -> None:
        self.view[offset : offset + len(data)] = memoryview(data)


class MappedLease(lease.Lease):
    """A lease that returns views of a ``MappedRegion``."""

    __slots__ = ()

    def array(self, region: str, offset: int, byte_size: int, datatype: DataType, shape: Sequence[int]) -> Array:
        found: Any = self._use(region)
        return from_wire(found.view[offset : offset + byte_size].toreadonly(), datatype, shape)


def linear(path: Path) -> Path:
    """A linear layer with 1 MiB inputs and 8 outputs."""
    graph = models.GraphBuilder(0)
    return graph.save(path, graph.linear("input", _WIDTH, 8), [_WIDTH], [8])


def price(model: Path, seconds: float, rounds: int) -> None:
    """Measure and print the figures of one model."""
    row = np.random.default_rng(0).standard_normal((1, _WIDTH)).astype(np.float32)
    cores = split_cores()[0]
    mapped = ["-m", "benchmarks.shared_memory_price", "serve", str(model), "--http-port", "0"]
    with shared_region(row, _SLOTS) as region, penstock(model, cores) as ours, serving(mapped, cores) as other:
        sides = {
            name: http_side(server, region.requests(server, model.stem))
            for name, server in {"copied": ours, "mapped": other}.items()
        }
        found = measure(sides, _CONNECTIONS, rounds, seconds)
    for name, pick in _PICKS.items():
        share = ratio([pick(one) for one in found["copied"]], [pick(one) for one in found["mapped"]])
        copied, trusting = (median(found[side], pick) for side in ("copied", "mapped"))
        low, high = 100 * (1 - share.high), 100 * (1 - share.low)
        print(
            f"{model.stem:10} {name:13} price {100 * (1 - share.value):5.1f} % [{low:.1f}, {high:.1f}], "
            f"{1e6 / copied - 1e6 / trusting:.0f} µs a request: {copied:,.0f} instead of {trusting:,.0f} requests/s"
        )


def main() -> int:
    """Print the cost. As the subprocess, serve with mapped regions."""
    if sys.argv[1:2] == ["serve"]:
        registry.Region, registry.Lease = MappedRegion, MappedLease  # type: ignore[misc, attr-defined]
        run()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_memory_price")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for model in (models.identity(Path(folder) / "identity.onnx", _WIDTH), linear(Path(folder) / "linear.onnx")):
            price(model, arguments.seconds, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
