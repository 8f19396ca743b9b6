"""What `penstock build` chooses for one thread, against ONNX Runtime and OpenVINO as they come, models by
`onnxruntime.quantization` (static by default, static U8S8 per channel as its guide advises for x86, dynamic; each in both engines)
and NNCF's in OpenVINO. The baseline of each row is the fastest rival that loses at most 1 % on the validation samples, the contract
of the build too, and not provably more on the test samples; it is found by brief timings, then both are timed anew, in fresh loads,
one sample a call. Losses are of test samples that nothing has seen: of the share of labels hit, or for random weights of the cosine
to FP32's outputs. Both sides are called through the same code, so that the figures compare models and engines, not calls."""

from __future__ import annotations

from functools import partial

from benchmarks.compression.rivals import NAMES, RANDOM, prepared, rivals
from benchmarks.compression.train import TASKS
from benchmarks.results import Row

PARTS = {
    "prepare": prepared,
    "trained": partial(rivals, tuple(TASKS)),
    "random": partial(rivals, tuple(RANDOM)),
    **{name: partial(rivals, (name,)) for name in NAMES},
}


def run(quick: bool) -> list[Row]:
    """The rows of this scenario."""
    return rivals(("plain", "MLP", "CNN at 64") if quick else NAMES, quick)
