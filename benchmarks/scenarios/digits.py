"""The main job: the digits bundle as `penstock build` makes it, served by `penstock serve`, against the untouched model
served by FastAPI + uvicorn + ONNX Runtime with its defaults (one thread per core that the process has). Single images in
JSON; both servers on the same core, the load on another. Ratios above 1 are in favour of Penstock. The build chooses by half of
the images that the network was not trained on; the accuracy is that of the other half."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.results import Row, claim, fact
from benchmarks.rounds import latency_facts, measure, side, throughput_claim
from benchmarks.servers import Server, fastapi, penstock, pinned, split_cores
from penstock.artifact import Artifact
from penstock.bundle.manifest import Manifest
from penstock.bundle.open import open_bundle
from penstock.dataset import Dataset
from penstock.offline.judge.intervals import loss_interval
from penstock.offline.sessions import signature_of
from penstock.perf import load
from penstock.perf.oip_client import infer_all
from penstock.samples.open import load_dataset
from penstock.tensor import Array

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
_REQUESTS = 256


def run(quick: bool) -> list[Row]:
    """Return the rows of this scenario."""
    cores, _ = split_cores()
    rounds, seconds = (3, 0.7) if quick else (11, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        signature = signature_of(Artifact.from_file(DIGITS / "model.onnx"))
        validate, data = load_dataset(DIGITS / "evaluate.npz", signature).split_shuffled(0.5)
        chosen_by = Path(folder) / "validate.npz"
        np.savez(chosen_by, labels=validate.labels, **validate.inputs)
        bundle = build_digits(Path(folder), "20s" if quick else "2m", chosen_by)
        opened = open_bundle(bundle)
        with penstock(bundle, cores) as ours, fastapi(DIGITS / "model.onnx", cores) as theirs:
            images = [data.rows(row, row + 1) for row in range(_REQUESTS)]
            sides = {"ours": side(ours, "digits", images), "theirs": side(theirs, "digits", images)}
            many = measure(sides, 64, rounds, seconds)
            one = measure(sides, 1, rounds, seconds)
            before, after = hits(theirs, data), hits(ours, data)
    lost = loss_interval(data.count, int((before & ~after).sum()), int((after & ~before).sum()))
    note = f"{before.mean():.2%} → {after.mean():.2%} top-1 of {data.count} test images, asked over HTTP"
    return [
        throughput_claim("requests/s ratio at 64 connections", many["ours"], many["theirs"], 4),
        claim("accuracy loss", lost, "", "<=", 0.01, note=note),
        *latency_facts("64 connections", many["ours"], many["theirs"]),
        *latency_facts("1 connection", one["ours"], one["theirs"]),
        model_speedup(opened.manifest),
    ]


def build_digits(folder: Path, budget: str, evaluate: Path = DIGITS / "evaluate.npz") -> Path:
    """Build the digits bundle by the command, on the cores that it will be served on."""
    bundle = folder / "digits.bundle"
    data = ["--calibrate", str(DIGITS / "calibrate.npz"), "--evaluate", str(evaluate)]
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


def hits(server: Server, data: Dataset) -> Array:
    """Which of the images get the right digit, one request each."""
    assert data.labels is not None
    answers = load.run(infer_all(server.address, "digits", [data.rows(row, row + 1) for row in range(data.count)]))
    return np.asarray(np.array([answer["logits"].argmax() for answer in answers]) == data.labels)
