"""Outcome: the result of a method compared with the original model, and the aims that it missed."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.artifact import Artifact
from penstock.measurement import Interval
from penstock.offline.compress.method import Aim, Made
from penstock.offline.judge.contract import unproven_speed
from penstock.offline.judge.judge import Comparison


class Outcome(msgspec.Struct, frozen=True):
    """The result of one method: ``model``, compared with ``original``."""

    original: Artifact
    made: Made
    comparison: Comparison | None
    """Accuracy and speed of both models; None without evaluation data."""
    coded: tuple[int, int] | None = None
    """Sizes of the original and the result as coded models, if the method should reduce the coded size."""

    @property
    def model(self) -> Artifact:
        """The resulting model; the original if the method only measures."""
        return self.made.model or self.original

    @property
    def shortfalls(self) -> dict[Aim, str]:
        """The aims that the model missed, each with the reason."""
        found, aims = dict(self.made.short), self.made.aims
        before, after = self.original.size_bytes, self.model.size_bytes
        if "size" in aims and after >= before:
            found["size"] = f"the file is not smaller than the original: {before} → {after} bytes"
        if "coded_size" in aims and self.coded and self.coded[1] >= self.coded[0]:
            found["coded_size"] = "the coded model is not smaller than the original as a coded model"
        speed = self.comparison.speedup if self.comparison else None
        if "speed" in aims and speed and speed.low <= 1:
            busy = self.comparison.busy if self.comparison else ""
            verdict = unproven_speed("the original here", speed, busy)
            found["speed"] = f"{verdict}: {times(speed)}"
        return found

    @property
    def pays(self) -> bool | None:
        """True if the model meets every aim of the method; None if some aims were not measured."""
        if self.shortfalls:
            return False
        aims = self.made.aims
        is_unknown = ("speed" in aims and self.comparison is None) or ("coded_size" in aims and self.coded is None)
        return None if is_unknown else True

    @property
    def notes(self) -> list[str]:
        """Notes for the user, including shortfalls."""
        return [*self.made.notes, *self.shortfalls.values()]

    def summary(self) -> dict[str, Any]:
        """The outcome as plain data for JSON, with stable keys."""
        if self.made.model is None:
            return self.made.facts
        found, coded_bytes = self.comparison, self.coded or (None, None)
        accuracy = found.accuracy if found else None
        return {
            **self.made.facts,
            "original": {
                "size_bytes": self.original.size_bytes,
                "coded_bytes": coded_bytes[0],
                "accuracy": found.original_accuracy if found else None,
                "latency_ms": found.original_ms if found else None,
            },
            "made": {
                "size_bytes": self.model.size_bytes,
                "coded_bytes": coded_bytes[1],
                "accuracy": accuracy.value if accuracy else None,
                "latency_ms": found.compressed_ms if found else None,
                "digest": self.model.digest,
            },
            "size_ratio": self.original.size_bytes / self.model.size_bytes,
            "speedup": found.speedup.value if found else None,
            "speedup_interval": msgspec.to_builtins(found.speedup) if found else None,
            "accuracy_loss": accuracy.loss.value if accuracy else None,
            "accuracy_loss_interval": msgspec.to_builtins(accuracy.loss) if accuracy else None,
            "metric": accuracy.metric if accuracy else None,
            "samples": accuracy.samples if accuracy else None,
            "threads": found.threads if found else None,
            "rows": found.rows if found else None,
            "by_size": msgspec.to_builtins(found.by_size) if found else [],
            "pays": self.pays,
            "short_of": list(self.shortfalls),
            "steps": msgspec.to_builtins(self.model.provenance[len(self.original.provenance) :]),
            "notes": self.notes,
        }


def times(speedup: Interval) -> str:
    """A speed-up with its interval, as text."""
    return f"{speedup.value:.2f}x the speed (95 %: {speedup.low:.2f} … {speedup.high:.2f})"
