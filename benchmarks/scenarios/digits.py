"""Penstock's main task: the digits bundle from `penstock build`, served by `penstock serve`, compared with the original model,
served by FastAPI, uvicorn and ONNX Runtime with default settings (one thread per core of the process). Requests are single images
in JSON. Both servers run on the same core, and the load on another. Ratios above 1 are in favour of Penstock.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.results import Row, claim, fact
from benchmarks.rounds import latency_facts, measure, side, throughput_claim
from benchmarks.servers import Server, fastapi, penstock, pinned, split_cores
from penstock.bundle.manifest import Manifest
from penstock.bundle.open import open_bundle
from penstock.dataset import Dataset, load_dataset
from penstock.perf import load
from penstock.perf.oip_client import infer_all

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
_REQUESTS = 256


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    cores, _ = split_cores()
    rounds, seconds = (3, 0.7) if quick else (11, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        bundle = build_digits(Path(folder), "5s" if quick else "20s")
        opened = open_bundle(bundle)
        data = load_dataset(DIGITS / "evaluate.npz", opened.manifest.signature)
        with penstock(bundle, cores) as ours, fastapi(DIGITS / "model.onnx", cores) as theirs:
            images = [data.rows(row, row + 1) for row in range(_REQUESTS)]
            sides = {"ours": side(ours, "digits", images), "theirs": side(theirs, "digits", images)}
            many = measure(sides, 64, rounds, seconds)
            one = measure(sides, 1, rounds, seconds)
            accuracies = accuracy(theirs, data), accuracy(ours, data)
    note = f"{accuracies[0]:.2%} → {accuracies[1]:.2%} top-1 of {data.count} test images, asked over HTTP"
    return [
        throughput_claim("requests/s ratio at 64 connections", many["ours"], many["theirs"], 4),
        claim("accuracy loss", accuracies[0] - accuracies[1], "", "<=", 0.01, note=note),
        *latency_facts("64 connections", many["ours"], many["theirs"]),
        *latency_facts("1 connection", one["ours"], one["theirs"]),
        model_speedup(opened.manifest),
    ]


def build_digits(folder: Path, budget: str) -> Path:
    """Build the digits bundle with `penstock build`, on the cores on which it will be served."""
    bundle = folder / "digits.bundle"
    data = ["--calibrate", str(DIGITS / "calibrate.npz"), "--evaluate", str(DIGITS / "evaluate.npz")]
    options = [*data, "--name", "digits", "--budget", budget, "-o", str(bundle)]
    with pinned(split_cores()[0]):
        command = [sys.executable, "-m", "penstock", "build", str(DIGITS / "model.onnx"), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"penstock build failed:\n{done.stderr}")
    return bundle


def model_speedup(manifest: Manifest) -> Row:
    """The part of the speed-up that is due to the model, from the evidence of the build. It is the time of one call, without a
    server.
    """
    assert manifest.evidence is not None
    chosen = manifest.evidence.candidate(manifest.evidence.chosen)
    value = chosen.speedup.value if chosen.speedup else 1.0
    return fact(
        "of which the model alone, one call", value, "×", interval=chosen.speedup, note=f"chosen: {chosen.name}"
    )


def accuracy(server: Server, data: Dataset) -> float:
    """The fraction of images that are classified correctly, with one request per image."""
    assert data.labels is not None
    answers = load.run(infer_all(server.address, "digits", [data.rows(row, row + 1) for row in range(data.count)]))
    digits = np.array([answer["logits"].argmax() for answer in answers])
    return float((digits == data.labels).mean())
