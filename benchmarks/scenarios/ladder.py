"""The whole way of a model at batch 1: eager torch on a torch module, the same model after the passes in ONNX Runtime, in INT8, and
with fewer channels, at one thread and at all. What is accurate enough is chosen on validation samples, the fastest by brief timings;
then the winner is timed anew, and judged on test samples that nothing has seen. At most 1 % may be lost."""

from __future__ import annotations

from benchmarks.compression.ladder import ladder, prepared

PARTS = {"prepare": prepared, "measure": ladder}
run = ladder
