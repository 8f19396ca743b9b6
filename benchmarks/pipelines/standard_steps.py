"""The standard steps against their reference libraries: ratios of CPU times in one thread, see ``benchmarks.steps``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import steps, steps_media
from benchmarks.results import Row, claim
from benchmarks.steps import measure, one_thread

_GOAL = 0.9


def run(quick: bool) -> list[Row]:
    """The rows of this part."""
    rows = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for case in [*steps.cases(), *steps_media.cases(Path(folder))]:
            found = measure(case, 3 if quick else 15)
            note = f"CPU time {found.theirs_s * 1e6:,.0f} : {found.ours_s * 1e6:,.0f} µs"
            rows.append(claim(f"{case.name}: speed-up over {case.reference}", found.ratio, "×", ">=", _GOAL, note=note))
    return rows
