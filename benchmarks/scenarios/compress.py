"""Compression: INT8, sensitivity, pruning, low rank, weight sharing with Huffman coding, and the whole ladder. Speed is measured
on networks with random weights. Accuracy is measured on small networks that `benchmarks/compression/train.py` trains on
scikit-learn's digits (8×8, or scaled up to 28×28) and on texts of the standard library. The test samples are never used for
training or calibration. Times are of calls of single samples, interleaved. `PENSTOCK_MNIST=folder` adds the LeNet rows on MNIST.
"""

from __future__ import annotations

from benchmarks.compression import calibration, int8, ladder, smaller
from benchmarks.results import Row

PARTS = {
    "int8": int8.speed,
    "accuracy": int8.six_nets,
    "contaminated": int8.contaminated,
    "calibration": calibration.cost,
    "sensitivity": int8.sensitivity,
    "pruning": smaller.pruning,
    "structured": smaller.structured,
    "low_rank": smaller.low_rank,
    "deep_compression": smaller.deep_compression,
    "ladder": ladder.ladder,
}


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    return [row for part in PARTS.values() for row in part(quick)]
