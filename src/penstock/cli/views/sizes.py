"""The gain at each size of the samples, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from penstock.bundle.evidence import SizeGain
from penstock.cli.views.tables import print_table
from penstock.measurement import times

_TITLES = ("size of a call", "samples", "before, ms", "after, ms", "speed")


def show_sizes(console: Console, gains: Sequence[SizeGain]) -> None:
    """Print one row for each size; nothing if there is only one size."""
    if not gains:
        return
    console.print("by size; every other latency is the mean over these sizes, weighted by their samples")
    rows = [
        (
            gain.title,
            f"{gain.share:.0%}",
            f"{gain.original_ms:.3f}",
            f"{gain.chosen_ms:.3f}",
            times(gain.speedup),
        )
        for gain in gains
    ]
    print_table(console, _TITLES, rows, texts=("size of a call",))
