"""The demo: build the digits model, serve the bundle and the original side by side, and compare them over HTTP.

It optimises and quantises the model, measures the candidates on this machine and writes the bundle; it then sends test images, by
which nothing was chosen, to both servers, prints accuracy, size, latency and throughput, and writes a report.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.artifact import Artifact
from penstock.cli.build import summary
from penstock.cli.inspect import make_console, show
from penstock.cli.main import fail
from penstock.cli.views.progress import StageProgress
from penstock.dataset import Dataset
from penstock.errors import Cancelled, PenstockError
from penstock.offline.build import BuildResult, Recipe, build
from penstock.offline.judge.contract import Contract
from penstock.offline.sessions import signature_of
from penstock.perf.http_client import Address
from penstock.perf.load import closed_loop, run
from penstock.perf.loops import LoadWindow
from penstock.perf.oip_client import infer_all, infer_request
from penstock.perf.report import ServedRow, check_report_target, write_report
from penstock.perf.tally import ClosedLoopResult
from penstock.samples.open import load_dataset

NAME = "digits"
EXAMPLE = Path(__file__).parent
CONNECTIONS = (1, 64)
_CONTRACT = Contract(max_accuracy_loss=0.01, p99_ms=20.0)
_REQUESTS = 256
_ROUNDS, _QUICK_ROUNDS = 7, 3
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_TIMING_S, _QUICK_TIMING_S = 20.0, 3.0


class Served(msgspec.Struct):
    """One of the two servers, and its measurements."""

    address: Address
    model: str
    size_bytes: int
    accuracy: float = 0.0
    loads: dict[int, list[ClosedLoopResult]] = {}

    def figure(self, connections: int, pick: Callable[[ClosedLoopResult], float]) -> float:
        """Median of a figure over the rounds."""
        return statistics.median(pick(result) for result in self.loads[connections])


class Comparison(msgspec.Struct, frozen=True):
    """One figure of both servers. ``ratio`` is the median of the rounds' ratios; above 1, the built model is better."""

    what: str
    original: float
    built: float
    ratio: float
    ratio_low: float
    ratio_high: float


def main() -> None:
    """Read the command line, run the demo, and report an error as the command ``penstock`` does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", "-o", type=Path, default=Path("demo"), help="folder for the bundle and the report")
    parser.add_argument("--quick", action="store_true", help="measure for seconds only; the figures are rough")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    try:
        run_demo(arguments.output, quick=arguments.quick, as_json=arguments.json)
    except PenstockError as error:
        sys.exit(fail(error, arguments.json))
    except KeyboardInterrupt:
        sys.exit(fail(Cancelled("interrupted"), arguments.json))


def run_demo(output: Path, *, quick: bool, as_json: bool) -> None:
    """Build the bundle, measure it against the original, and print the comparison."""
    console = Console(stderr=True) if as_json else make_console()
    bundle, report = output / f"{NAME}.bundle", output / "report.html"
    check_report_target(report)
    signature = signature_of(Artifact.from_file(EXAMPLE / "model.onnx"))
    judged, data = load_dataset(EXAMPLE / "evaluate.npz", signature).split_shuffled(0.5)
    assert judged.labels is not None
    with interrupted_by_sigterm(), StageProgress() as progress:
        result = build(
            EXAMPLE / "model.onnx",
            bundle,
            EXAMPLE / "calibrate.npz",
            {**judged.inputs, "labels": judged.labels},
            Recipe(_CONTRACT, NAME, timing_s=_QUICK_TIMING_S if quick else _TIMING_S),
            progress,
        )
        show(console, result.manifest, result.bundle_bytes)
        with serving(EXAMPLE / "model.onnx") as first, serving(bundle) as second:
            original = Served(first, "model", result.evidence.baseline.size_bytes)
            built = Served(second, NAME, result.chosen.size_bytes)
            measure(original, built, data, _QUICK_ROUNDS if quick else _ROUNDS, progress)
    rows = compare(original, built)
    write_report(report, result.manifest, [_served_row(row) for row in rows], str(bundle))
    _print(console, rows, data.count)
    console.print(f"bundle  {bundle}\nreport  {report}")
    if as_json:
        print(msgspec.json.encode(_facts(result, rows, report)).decode())


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C within the context, so that the servers are stopped too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def serving(target: Path) -> Iterator[Address]:
    """Serve ``target`` in another process until the context ends."""
    command = [sys.executable, "-m", "penstock", "serve", str(target), "--http-port", "0"]
    # A preexec_fn can deadlock if other threads hold locks; this function only needs the interpreter lock.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_end_with_parent(),  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        facts = dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)
        if not line.startswith("ready ") or "http" not in facts:
            raise PenstockError(f"the server for '{target.name}' did not start", "see its message above")
        yield Address.parse(f"http://{facts['http']}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def measure(original: Served, built: Served, data: Dataset, rounds: int, progress: StageProgress) -> None:
    """Measure the accuracy of both servers over HTTP, then put load on them in turn, in alternating order."""
    for served in (original, built):
        served.accuracy = _accuracy(served, data)
    both = [original, built]
    for connections in CONNECTIONS:
        stage = f"{connections} conn."
        for number in range(rounds):
            progress(stage, number, rounds)
            for served in both if number % 2 else both[::-1]:
                requests = _requests(served, data)
                window = LoadWindow(duration_s=1.0, warmup_s=0.3)
                found = run(closed_loop(served.address, requests, connections, window))
                if found.errors:
                    raise PenstockError(f"{found.errors} requests to '{served.model}' failed: {found.errors_by_kind}")
                served.loads.setdefault(connections, []).append(found)
        progress(stage, rounds, rounds)


def compare(original: Served, built: Served) -> list[Comparison]:
    """The table of figures. The first row is accuracy, and the second row is size."""
    rows = [
        Comparison("accuracy", original.accuracy, built.accuracy, *(built.accuracy / original.accuracy,) * 3),
        Comparison(
            "model bytes", original.size_bytes, built.size_bytes, *(original.size_bytes / built.size_bytes,) * 3
        ),
    ]
    for connections in CONNECTIONS:
        where = f"{connections} connection{'s' if connections > 1 else ''}"
        rows += [
            _compare(f"p50 ms, {where}", original, built, connections, lambda found: found.p50_ms, less=True),
            _compare(f"p99 ms, {where}", original, built, connections, lambda found: found.p99_ms, less=True),
            _compare(f"requests/s, {where}", original, built, connections, lambda found: found.throughput, less=False),
        ]
    return rows


def _end_with_parent() -> Callable[[], None] | None:
    """A function for the child process to call. The kernel then sends SIGTERM to the child when this process ends, even by SIGKILL.
    None if not on Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent has already ended
            os._exit(1)

    return ask


def _compare(
    what: str,
    original: Served,
    built: Served,
    connections: int,
    pick: Callable[[ClosedLoopResult], float],
    *,
    less: bool,
) -> Comparison:
    pairs = zip(original.loads[connections], built.loads[connections], strict=True)
    ratios = [pick(a) / pick(b) if less else pick(b) / pick(a) for a, b in pairs]
    figures = original.figure(connections, pick), built.figure(connections, pick)
    return Comparison(what, *figures, statistics.median(ratios), min(ratios), max(ratios))


def _requests(served: Served, data: Dataset) -> list[bytes]:
    count = min(_REQUESTS, data.count)
    return [infer_request(served.address, served.model, data.rows(row, row + 1), binary=False) for row in range(count)]


def _accuracy(served: Served, data: Dataset) -> float:
    """Fraction of the test images that are classified correctly, with one request per image."""
    assert data.labels is not None
    answers = run(infer_all(served.address, served.model, [data.rows(row, row + 1) for row in range(data.count)]))
    digits = np.array([next(iter(answer.values())).argmax() for answer in answers])
    return float((digits == data.labels).mean())


def _served_row(row: Comparison) -> ServedRow:
    if row.what == "accuracy":
        return ServedRow(row.what, f"{row.original:.2%}", f"{row.built:.2%}", f"{row.built - row.original:+.2%}")
    text = "{:,.0f}" if row.original >= 100 else "{:.3g}"
    spread = f" ({row.ratio_low:.2f} … {row.ratio_high:.2f})" if row.ratio_low != row.ratio_high else ""
    return ServedRow(row.what, text.format(row.original), text.format(row.built), f"{row.ratio:.2f}x{spread}")


def _print(console: Console, rows: Sequence[Comparison], images: int) -> None:
    table = Table(
        title=f"served over HTTP, {images} test images",
        title_justify="left",
        box=None,
        header_style="dim",
        pad_edge=False,
    )
    for title in ("", "original", "built", "built is better by (min … max of the rounds)"):
        table.add_column(title, justify="right" if title else "left")
    for row in rows:
        table.add_row(*msgspec.structs.astuple(_served_row(row)))
    console.print(table)


def _facts(result: BuildResult, rows: Sequence[Comparison], report: Path) -> dict[str, Any]:
    return {**summary(result), "served": msgspec.to_builtins(list(rows)), "report": str(report)}


if __name__ == "__main__":
    main()
