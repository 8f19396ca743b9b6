from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import models
import networks
from http_servers import Client, post
from penstock.bundle.evidence import Attempt
from penstock.bundle.open import open_bundle
from penstock.engines.registry import get_engine
from penstock.offline.compress.planner import gain
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.resources import machine_facts
from processes import ServerProcess


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ``net.onnx`` (x [N, 16] to y [N, 4]), ``train.npz`` and ``test.npz``, labelled by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gain, "_TIMING_S", 0.02)
    model = networks.mlp(48)
    (tmp_path / "net.onnx").write_bytes(model.data)
    running = get_engine("onnxruntime").load(model, {"threads": 1})
    for seed, (name, count) in enumerate({"train": 200, "test": 240}.items()):
        x = np.random.default_rng(seed).standard_normal((count, 16)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=running.forward({"x": x})["y"].argmax(axis=1))
    return tmp_path


QUICK = ("--budget", "1s", "--epochs", "0.5", "--threads", "1", "--max-accuracy-loss", "5%")
DATA = ("--train", "train.npz", "--evaluate", "test.npz")


def test_for_latency(penstock, net: Path) -> None:  # type: ignore[no-untyped-def]
    done = penstock("compress", "net.onnx", *DATA, *QUICK, "-o", "out.bundle", "--report", "report.html", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["accuracy_loss"] <= 0.05
    for one in found["attempts"]:
        assert msgspec.convert(one, Attempt).reason
    assert found["attempts"][0]["name"] == "int8"
    # The plan's own INT8 is the careful one; no second is made beside it.
    assert not any(one["calibration"].startswith("best") for one in found["candidates"])
    assert not (net / "out.bundle.plan").exists()
    assert "Compression steps" in (net / "report.html").read_text()
    notes = open_bundle(net / "out.bundle").manifest.evidence
    assert notes is not None
    assert any("the plan judged models on 50 samples held out" in note for note in notes.notes)


def test_for_size_and_what_is_small_runs_and_is_told_truly(penstock, net: Path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("net.onnx", *DATA, *QUICK, "--target", "size", "-o", "out.bundle", "--report", "report.html")
    done = penstock("compress", *arguments)
    assert done.code == 0, done.err
    assert "shared weights (fine)" in done.out
    assert "Accuracy by size of every model that the plan made" in (net / "report.html").read_text()

    shown = penstock("inspect", "out.bundle", "--json").json["manifest"]
    evidence, (variant,) = shown["evidence"], shown["variants"]
    chosen = next(one for one in evidence["candidates"] if one["name"] == evidence["chosen"])
    stored = {entry["path"]: entry["size_bytes"] for entry in shown["files"]}
    assert chosen["stored_bytes"] == stored[variant["file"]]
    assert chosen["stored_bytes"] < (net / "net.onnx").stat().st_size / 2
    assert sum(stored.values()) == stored[variant["file"]]

    assert penstock("infer", "out.bundle", "--inputs", "test.npz", "--outputs", "answers.npz").code == 0
    with np.load(net / "answers.npz") as answers, np.load(net / "test.npz") as test:
        hits, labels, x = answers["y"].argmax(axis=1) == test["labels"], answers["y"][:2].tolist(), test["x"][:2]
    assert hits.mean() == pytest.approx(chosen["accuracy"]["value"])
    assert hits.mean() >= 0.95

    tensor = {"name": "x", "shape": [2, 16], "datatype": "FP32", "data": x.ravel().tolist()}
    request = post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/out/infer")
    with ServerProcess(net / "out.bundle") as server, Client(server.address) as client:
        answer = client.ask(request)
    assert answer.status == 200
    served = np.reshape(json.loads(answer.body)["outputs"][0]["data"], (2, 4))
    np.testing.assert_allclose(served, labels, rtol=1e-5, atol=1e-5)  # printed in decimal


def test_a_plan_is_kept_where_it_is_asked_for(penstock, net: Path) -> None:  # type: ignore[no-untyped-def]
    arguments = ("net.onnx", *DATA, *QUICK, "--target", "size", "--resume", "plan", "--json")
    first = penstock("compress", *arguments, "-o", "a.bundle").json
    assert (net / "plan" / "plan.ledger").exists()
    second = penstock("compress", *arguments, "-o", "b.bundle").json
    done = [[one for one in found["attempts"] if one["outcome"] != "skipped"] for found in (first, second)]
    assert done[0][0]["outcome"] == "kept"
    assert done[1][: len(done[0])] == done[0]  # to the second: nothing was made again
    assert second["built"]["size_bytes"] <= first["built"]["size_bytes"]
    done = penstock("compress", *arguments, "-o", "c.bundle", "--seed", "1", "--max-accuracy-loss", "4%")
    assert done.code == 2
    assert "max accuracy loss 0.05 in the folder, 0.04 now; seed 0 in the folder, 1 now" in " ".join(done.err.split())
    assert "optimize" not in done.err  # refused before any work


@pytest.mark.parametrize(
    ("options", "code", "cause"),
    [
        (("--budget", "0s"), 2, "a budget of 0 s"),
        (("--epochs", "0"), 2, "epochs"),
        (("--epochs", "nan"), 2, "epochs"),
        (("--seed", "-1"), 2, "seed"),
        (("--max-accuracy-loss", "200%"), 2, "200%"),
        (("--train", "none.npz"), 3, "no data file"),
        (("--train", "nan.npz"), 2, "NaN"),
        (("--train", "named.npz"), 2, "no array for input"),
        (("--train", "one.npz"), 2, "1 sample"),
        (("--train", "labels.npz"), 2, "labels go up to 9"),
        (("-o", "net.onnx"), 2, "is an input of this command"),
        (("-o", "train.npz/x.bundle"), 2, "cannot be written"),
        (("--resume", "net.onnx"), 2, "is not a folder"),
    ],
)
def test_mistakes_are_told_with_their_fix(penstock, net: Path, options: tuple[str, str], code: int, cause: str) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
    np.savez("nan.npz", x=np.where(np.arange(16) == 3, np.nan, x).astype(np.float32))
    np.savez("named.npz", image=x)
    np.savez("one.npz", x=x[:1])
    np.savez("labels.npz", x=x, labels=np.full(40, 9))
    before = sorted(path.name for path in net.iterdir())
    given = {"--train": "train.npz", "--evaluate": "test.npz", "-o": "out.bundle", "--target": "size", "--threads": "1"}
    given[options[0]] = options[1]
    done = penstock("compress", "net.onnx", *(part for pair in given.items() for part in pair), "--json")
    assert done.code == code, done.err
    assert cause in done.err + done.out
    assert "Traceback" not in done.err
    assert sorted(path.name for path in net.iterdir()) == before


def test_a_quantised_model_is_built_and_the_plan_dequantises_it(penstock, net: Path) -> None:  # type: ignore[no-untyped-def]
    scheme, model = integer_scheme(machine_facts()), networks.mlp(48)
    with np.load("train.npz") as train:
        statistics = collect(model, {"x": train["x"]})
    made = quantize(model, ranges(statistics, RangeMethod.MIN_MAX, scheme), scheme)
    (net / "int8.onnx").write_bytes(made.data)
    done = penstock("compress", "int8.onnx", *DATA, *QUICK, "-o", "out.bundle", "--json")
    assert done.code == 0, done.err
    assert not any("already quantised" in one["reason"] for one in done.json["attempts"])


def test_an_interrupt_leaves_a_plan_to_go_on_from(net: Path) -> None:
    """Ctrl-C after the store has its first attempt: exit code 130 and no bundle; the same command continues the plan."""
    source = Path(models.__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    arguments = ["net.onnx", *DATA, "--budget", "60s", "--epochs", "60", "--threads", "1", "--target", "size"]
    command = [
        sys.executable,
        "-c",
        "from penstock.cli.main import run; run()",
        "compress",
        *arguments,
        "-o",
        "o.bundle",
    ]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        store = net / "o.bundle.plan" / "plan.ledger"
        while not store.exists() and running.poll() is None:
            signal.sigtimedwait([], 0.02)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert b"Traceback" not in err
    assert store.exists()
    assert not (net / "o.bundle").exists()
