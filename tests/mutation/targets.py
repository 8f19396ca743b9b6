"""The code that decides, with the tests that must notice its mutations."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"

DECIDING: dict[str, tuple[str, ...]] = {
    "offline/optimize/verify.py": (),
    "offline/optimize/bisect.py": (),
    "offline/judge/accuracy.py": (),
    "offline/judge/contract.py": (),
    "offline/judge/intervals.py": (),
    "offline/judge/sample_size.py": (),
    "offline/judge/chance.py": (),
    "offline/judge/detect.py": (),
    "offline/judge/judge.py": (),
    "offline/judge/overlap.py": (),
    "offline/tune/search.py": (),
    "offline/compress/explained.py": (),
    "offline/compress/restored/restore.py": (),
    "offline/compress/restored/uncorrected.py": (),
    "offline/compress/restored/unrounded.py": (),
    "offline/compress/restored/reweighted.py": (),
    "offline/compress/restored/recomposed.py": (),
    "offline/compress/ptq/calibrate.py": (),
    "offline/compress/ptq/scheme.py": (),
    "offline/compress/ptq/rounding.py": (),
    "offline/compress/ptq/qdq_placement.py": ("tests/offline/compress/ptq/test_rounding.py",),
    "offline/compress/ptq/ranges/histogram.py": (),
    "offline/compress/ptq/ranges/ranges.py": (),
    "offline/compress/ptq/ranges/entropy.py": (),
    "offline/compress/ptq/ranges/choice.py": (),
    "offline/optimize/passes/conv_batch_norm.py": (),
    "online/scheduler/forming.py": (),
    "online/scheduler/latency_model.py": (),
    "online/scheduler/brief_runs.py": (),
    "online/scheduler/queue.py": (),
    "online/scheduler/batching_config.py": (),
}
"""Each file, with the tests that decide about it besides the test of its own name."""


def paths_of_tests(file: str) -> list[str]:
    """The paths of the tests of ``file``."""
    folder, _, name = file.rpartition("/")
    return [f"tests/{folder}/test_{name}", *DECIDING.get(file, ())]
