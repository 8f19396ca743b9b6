"""Start-up times: medians over new processes, with all files in the page cache. `serve` is timed from the start of its process to
the line `ready`, which it prints once the digits bundle is verified, loaded and warmed up.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from scipy import stats

from benchmarks.results import Row, claim
from benchmarks.scenarios.digits import build_digits
from benchmarks.servers import penstock, split_cores
from penstock.measurement import Interval

_IMPORT = "import time; start = time.perf_counter(); import penstock; print(time.perf_counter() - start)"


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    times = 5 if quick else 15
    with tempfile.TemporaryDirectory() as folder:
        bundle = build_digits(Path(folder), "20s")
        return [
            _row("import penstock", import_seconds, times, 0.3),
            _row("penstock --help", help_seconds, times, 0.5),
            _row("penstock serve digits.bundle ready", lambda: ready_seconds(bundle), times, 2.0),
        ]


def import_seconds() -> float:
    """Seconds of the import, without the start of the interpreter."""
    return float(subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True).stdout)


def help_seconds() -> float:
    """Seconds of the whole process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "penstock", "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def ready_seconds(bundle: Path) -> float:
    """Seconds until the server is ready. It runs on one core, as in the other scenarios."""
    with penstock(bundle, split_cores()[0]) as server:
        return server.ready_s


def _row(name: str, seconds: Callable[[], float], times: int, goal: float) -> Row:
    seconds()  # fills the page cache and writes the bytecode
    found = [seconds() for _ in range(times)]
    note = f"{times} processes: {min(found):.2f} … {max(found):.2f} s"
    # The interval of a median is two of the ordered values.
    rank = max(1, int(stats.binom.ppf(0.025, times, 0.5)))
    median = Interval(statistics.median(found), sorted(found)[rank - 1], sorted(found)[-rank])
    return claim(name, median, "s", "<=", goal, note=note)
