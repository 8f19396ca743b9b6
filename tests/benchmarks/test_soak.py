"""Growth is told from noise, and a short soak of a real server ends with a verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import failed
from benchmarks.soak import LIMITS, Sample, exact_mlp, growth, verdict
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine

ROOT = Path(__file__).parents[2]
TIMES = np.arange(600.0)


def noise(seed: int = 0) -> np.ndarray:
    """Neighbours are alike, as samples of memory are."""
    steps = np.random.default_rng(seed).standard_normal(len(TIMES))
    found = np.zeros(len(TIMES))
    for number in range(1, len(TIMES)):
        found[number] = 0.8 * found[number - 1] + steps[number]
    return found


@pytest.mark.parametrize("rise", [0.0, 10.0, -10.0])
def test_growth_finds_the_line_in_the_noise(rise: float) -> None:
    found = growth(TIMES, 100 + rise * TIMES / TIMES[-1] + noise())
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(rise, abs=2.5)
    assert (found.low > 0) == (rise > 0)
    assert (found.high < 0) == (rise < 0)


def test_intervals_hold_what_they_promise() -> None:
    """About 95 in 100; a bootstrap of single samples would hold about 50 here."""
    held = sum(found.low <= 0 <= found.high for found in (growth(TIMES, noise(seed)) for seed in range(40)))
    assert held >= 33


def test_what_stands_still_does_not_grow() -> None:
    found = growth(TIMES, np.full(len(TIMES), 7.0))
    assert (found.value, found.low, found.high) == pytest.approx((0, 0, 0), abs=1e-9)


def samples(memory: np.ndarray) -> list[Sample]:
    return [
        Sample(at, {"memory, MiB": held, "descriptors": 10.0, "threads": 5.0})
        for at, held in zip(TIMES.tolist(), memory.tolist(), strict=True)
    ]


@pytest.mark.parametrize(("rise", "passes"), [(0.0, True), (0.5 * LIMITS["memory, MiB"], True), (40.0, False)])
def test_the_verdict_keeps_to_the_limits(rise: float, passes: bool) -> None:
    memory, *others = verdict(samples(100 + rise * TIMES / TIMES[-1] + 0.1 * noise()), 60)
    assert memory.holds is passes
    assert all(row.holds for row in others)


def test_what_grows_while_warming_up_does_not_count() -> None:
    memory = np.minimum(TIMES, 100.0)
    assert failed(verdict(samples(memory), 0))
    assert not failed(verdict(samples(memory), 100))


def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = get_engine("onnxruntime").load(Artifact.from_file(exact_mlp(tmp_path / "mlp.onnx")), {"threads": 1})
    inputs = np.random.default_rng(1).integers(-8, 9, (32, 32)).astype(np.float32)
    whole = model.forward({"input": inputs})["output"]
    for rows in (1, 3, 32):
        for start in range(0, 32, rows):
            part = model.forward({"input": inputs[start : start + rows]})["output"]
            assert part.tobytes() == whole[start : start + rows].tobytes()
    assert len(np.unique(whole)) > 32


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("arguments", [("0.1",), ("1", "--hostile")], ids=" ".join)
def test_a_short_soak_of_a_real_server(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout.rstrip().endswith(("PASS", "FAIL")), done.stderr
    assert "'gRPC'" in done.stdout
    assert "wrong: {}" in done.stdout, done.stdout[-2000:]
