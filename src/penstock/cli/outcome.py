"""What a method made of a model, against the original: where it falls short, as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from rich.table import Table

from penstock.artifact import Artifact
from penstock.bundle.evidence import Interval
from penstock.offline.judge.judge import Comparison

Aim = Literal["size", "coded_size", "speed", "accuracy"]
"""What a method is for, each against the original."""


class Outcome(msgspec.Struct, frozen=True):
    """What a method made of a model."""

    original: Artifact
    made: Artifact
    comparison: Comparison | None
    coded: tuple[int, int] | None
    """Bytes of both as coded models."""
    short: dict[Aim, str] = {}
    """Shortfalls that are known already."""

    def shortfalls(self, aims: Sequence[Aim]) -> dict[Aim, str]:
        """Where it is no better than the original in what it is for, and how that is told."""
        found = dict(self.short)
        before, after = self.original.size_bytes, self.made.size_bytes
        if "size" in aims and after >= before:
            found["size"] = f"the file is not smaller than the original: {before} → {after} bytes"
        if "coded_size" in aims and self.coded and self.coded[1] >= self.coded[0]:
            found["coded_size"] = "coded, the model is not smaller than the original coded"
        speed = self.comparison.speedup if self.comparison else None
        if "speed" in aims and speed and speed.low <= 1:
            provably = speed.high <= 1
            found["speed"] = (
                f"{'slower than' if provably else 'not measurably faster than'} the original here: {times(speed)}"
            )
        return found

    def pays(self, aims: Sequence[Aim]) -> bool | None:
        """Whether it is better in all that it is for; None if part of that was not measured."""
        if self.shortfalls(aims):
            return False
        return None if "speed" in aims and self.comparison is None else True

    def summary(self, aims: Sequence[Aim]) -> dict[str, Any]:
        """The stable JSON form."""
        found, coded_bytes = self.comparison, self.coded or (None, None)
        accuracy = found.accuracy if found else None
        steps = self.made.provenance[len(self.original.provenance) :]
        return {
            "original": {
                "size_bytes": self.original.size_bytes,
                "coded_bytes": coded_bytes[0],
                "accuracy": found.original_accuracy if found else None,
                "latency_ms": found.original_ms if found else None,
            },
            "made": {
                "size_bytes": self.made.size_bytes,
                "coded_bytes": coded_bytes[1],
                "accuracy": accuracy.value if accuracy else None,
                "latency_ms": found.compressed_ms if found else None,
                "digest": self.made.digest,
            },
            "size_ratio": self.original.size_bytes / self.made.size_bytes,
            "speedup": found.speedup.value if found else None,
            "speedup_interval": msgspec.to_builtins(found.speedup) if found else None,
            "accuracy_loss": accuracy.loss.value if accuracy else None,
            "accuracy_loss_interval": msgspec.to_builtins(accuracy.loss) if accuracy else None,
            "metric": accuracy.metric if accuracy else None,
            "samples": accuracy.samples if accuracy else None,
            "threads": found.threads if found else None,
            "rows": found.rows if found else None,
            "pays": self.pays(aims),
            "short_of": list(self.shortfalls(aims)),
            "steps": msgspec.to_builtins(steps),
        }

    def table(self, titles: tuple[str, str]) -> Table:
        """Original and result side by side."""
        table = make_table("", *titles, "")
        before, after = self.original.size_bytes, self.made.size_bytes
        table.add_row("size, KiB", kib(before), kib(after), _smaller(before, after))
        if self.coded:
            table.add_row("coded, KiB", *map(kib, self.coded), f"{_smaller(before, self.coded[1])} than the file")
        if (found := self.comparison) is not None:
            accuracy = found.accuracy
            loss = f"loss {accuracy.loss.value:+.2%} (95 %: {accuracy.loss.low:+.2%} … {accuracy.loss.high:+.2%})"
            values = f"{found.original_accuracy:.2%}", f"{accuracy.value:.2%}"
            table.add_row(f"{accuracy.metric}, {accuracy.samples} samples", *values, loss)
            call = f"p50 of {found.rows} row(s), ms"
            table.add_row(call, f"{found.original_ms:.3f}", f"{found.compressed_ms:.3f}", times(found.speedup))
        return table


def make_table(*titles: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    return table


def times(interval: Interval) -> str:
    """A speed-up with its interval."""
    return f"{interval.value:.2f}x the speed (95 %: {interval.low:.2f} … {interval.high:.2f})"


def kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.1f}"


def _smaller(before: int, after: int) -> str:
    return f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
