"""Compression: INT8, sensitivity, pruning, low rank, and weight sharing with Huffman coding. Speed on networks of random
weights, accuracy on small networks trained by `benchmarks/compression/train.py` on scikit-learn's digits (8×8, or scaled up
to 28×28) and on text of the standard library; what is fitted or chosen never sees the test samples. The baseline of a speed is
the FP32 model in ONNX Runtime at the same number of threads. Times are of single samples, interleaved.
`PENSTOCK_MNIST=folder` adds the LeNet rows on MNIST."""

from __future__ import annotations

from benchmarks.compression import calibration, int8, smaller
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
}


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    return [row for part in PARTS.values() for row in part(quick)]
