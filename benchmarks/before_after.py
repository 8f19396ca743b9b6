"""Compares this checkout with an earlier commit: ``python -m benchmarks.before_after COMMIT [--quick] [--no-build]``.

Both versions serve the 32 → 64 → 8 MLP on one core, and the load generator, on another core, loads them in turn. Then both
versions build the digits bundle in turn. Both use the packages and the load generator of this checkout. Ratios above 1 are in
favour of this checkout. Prints Markdown, and saves nothing.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.rounds import Side, grpc_side, interleave, measure, ratio, side
from benchmarks.servers import Server, pinned, serving, split_cores

_ROOT = Path(__file__).parents[1]
_DIGITS = _ROOT / "examples" / "digits"


def main() -> None:
    """Run the comparison that the command line selects."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__)
    parser.add_argument("commit", help="the commit, tag or branch to compare with")
    parser.add_argument("--quick", action="store_true", help="measure rough figures, within two minutes")
    parser.add_argument("--no-build", action="store_true", help="compare the servers only")
    arguments = parser.parse_args()
    print("| figure | this checkout : before | ratio | 95 % interval |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder, checkout(arguments.commit, Path(folder)) as before:
        sources = {"after": _ROOT / "src", "before": before / "src"}
        compare_servers(
            sources, Path(folder), rounds=3 if arguments.quick else 11, seconds=1.0 if arguments.quick else 1.5
        )
        if not arguments.no_build:
            compare_builds(sources, Path(folder), rounds=1 if arguments.quick else 4)


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Check out ``commit`` as a git work tree in ``folder``."""
    tree = folder / "before"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=_ROOT, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=_ROOT, check=True)


def compare_servers(sources: dict[str, Path], folder: Path, rounds: int, seconds: float) -> None:
    """Compare the requests per second and the p50 latency of both servers, by protocol."""
    model = models.mlp(folder / "mlp.onnx")
    rng = np.random.default_rng(0)
    inputs = [{"input": rng.standard_normal((1, 32)).astype(np.float32)} for _ in range(64)]
    with served(sources["after"], model) as after, served(sources["before"], model) as before:
        servers = {"after": after, "before": before}
        ways = {
            "JSON": {name: side(one, "mlp", inputs) for name, one in servers.items()},
            "binary": {name: side(one, "mlp", inputs, binary=True) for name, one in servers.items()},
            "gRPC": {name: grpc_side(one, "mlp", inputs) for name, one in servers.items()},
        }
        for way, sides in ways.items():
            for connections in (64, 1):
                report_load(f"{way}, {connections} in flight", sides, connections, rounds, seconds)
        report("seconds until ready", [before.ready_s], [after.ready_s])


def report_load(name: str, sides: dict[str, Side], connections: int, rounds: int, seconds: float) -> None:
    found = measure(sides, connections, rounds, seconds)
    after, before = found["after"], found["before"]
    report(f"requests/s, {name}", [one.throughput for one in after], [one.throughput for one in before])
    report(f"p50 ms, {name}, before : this", [one.p50_ms for one in before], [one.p50_ms for one in after])
    report(
        f"requests per CPU second, {name}",
        [one.per_cpu_second for one in after],
        [one.per_cpu_second for one in before],
    )


@contextmanager
def served(source: Path, model: Path) -> Iterator[Server]:
    """Run ``penstock serve`` of the package in ``source``."""
    arguments = ["-m", "penstock", "serve", str(model), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with serving(arguments, split_cores()[0], environment={"PYTHONPATH": str(source)}) as server:
        yield server


def compare_builds(sources: dict[str, Path], folder: Path, rounds: int) -> None:
    """Compare the wall-clock and CPU seconds of a default build of the digits example, on one core."""
    found = interleave({name: lambda at=at: build(at, folder) for name, at in sources.items()}, rounds)  # type: ignore[misc]
    for number, clock in enumerate(("wall", "CPU")):
        before, after = ([pair[number] for pair in found[name]] for name in ("before", "after"))
        report(f"{clock} seconds of a digits build, before : this", before, after)


def build(source: Path, folder: Path) -> tuple[float, float]:
    """Build the bundle, and return the wall-clock and CPU seconds. Raises CalledProcessError if the build fails."""
    data = ["--calibrate", str(_DIGITS / "calibrate.npz"), "--evaluate", str(_DIGITS / "evaluate.npz")]
    command = [
        sys.executable,
        "-m",
        "penstock",
        "build",
        str(_DIGITS / "model.onnx"),
        *data,
        "-o",
        str(folder / "digits.bundle"),
    ]
    start, used = time.perf_counter(), _children_cpu_seconds()
    with pinned(split_cores()[0]):
        environment = {**os.environ, "PYTHONPATH": str(source)}
        subprocess.run(command, env=environment, capture_output=True, check=True)
    return time.perf_counter() - start, _children_cpu_seconds() - used


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(name: str, over: list[float], under: list[float]) -> None:
    """Print one row: the medians of both versions, their ratio, and the ratio's confidence interval."""
    found = ratio(over, under)
    pair = f"{np.median(over):,.4g} : {np.median(under):,.4g}"
    print(f"| {name} | {pair} | {found.value:.3f}× | [{found.low:.3f}, {found.high:.3f}] |", flush=True)


if __name__ == "__main__":
    main()
