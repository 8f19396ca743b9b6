"""What a compressed model is against its original: bytes, answers and speed, each measured on this machine."""

from __future__ import annotations

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy, Interval
from penstock.offline.dataset import Dataset
from penstock.offline.judge.accuracy import answers, make_judge
from penstock.offline.judge.sessions import call_rows, loaded
from penstock.perf.measure import feed, interleave, repeat_rows, speedup


class Comparison(msgspec.Struct, frozen=True):
    """A compressed model held against its original on the same samples, calls interleaved."""

    original_bytes: int
    compressed_bytes: int
    original_accuracy: float
    accuracy: Accuracy
    """Of the compressed model, with its loss against the original."""
    original_ms: float
    """Median latency of one call of ``rows`` samples."""
    compressed_ms: float
    speedup: Interval
    threads: int
    rows: int

    @property
    def size_ratio(self) -> float:
        """How many times smaller the file became."""
        return self.original_bytes / self.compressed_bytes


def compare(
    original: Artifact,
    compressed: Artifact,
    data: Dataset,
    *,
    threads: int = 1,
    rows: int = 1,
    budget_s: float = 3.0,
    engine: str = "onnxruntime",
) -> Comparison:
    """Measure both on ``data``, which neither was fitted on; ``rows`` samples in a timed call, or what the model takes.

    Raises InvalidData if the labels fit no output, InvalidModel or EngineUnavailable if one of them does not load.
    """
    with loaded(original, threads, engine=engine) as before, loaded(compressed, threads, engine=engine) as after:
        judge = make_judge(answers(before, data), data.labels)
        accuracy = judge.compare(answers(after, data))
        rows = call_rows(before.signature, rows)
        sample = repeat_rows(data.inputs, rows)
        timings = interleave({"before": feed(before, sample), "after": feed(after, sample)}, budget_s)
    return Comparison(
        original_bytes=original.size_bytes,
        compressed_bytes=compressed.size_bytes,
        original_accuracy=judge.original().value,
        accuracy=accuracy,
        original_ms=timings["before"].p50_ms,
        compressed_ms=timings["after"].p50_ms,
        speedup=speedup(timings["before"], timings["after"]),
        threads=threads,
        rows=rows,
    )
