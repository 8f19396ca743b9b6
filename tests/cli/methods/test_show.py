from __future__ import annotations

import json
from pathlib import Path

import pytest

import models
from penstock.bundle.evidence import Accuracy
from penstock.cli.methods.show import show
from penstock.measurement import Interval
from penstock.offline.compress.method import Made
from penstock.offline.compress.methods.quantize import QuantizeMethod
from penstock.offline.compress.outcome import Outcome
from penstock.offline.judge.judge import Comparison

LARGE, SMALL = models.linear(64, 32), models.linear(8, 4)
COMPARISON = Comparison(
    original_bytes=LARGE.size_bytes,
    compressed_bytes=SMALL.size_bytes,
    original_accuracy=0.95,
    accuracy=Accuracy("top-1", 0.94, Interval(0.01, 0.002, 0.018), 0.05, 300),
    original_ms=2.0,
    compressed_ms=1.0,
    speedup=Interval(2.0, 1.9, 2.1),
    threads=1,
    rows=1,
)


def printed(
    capsys: pytest.CaptureFixture[str], outcome: Outcome, output: Path | None = Path("out.onnx"), *, json: bool = False
) -> str:
    show("quantize", QuantizeMethod(), outcome, output, json=json)
    return capsys.readouterr().out


def test_sizes_accuracy_and_speed_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, Outcome(LARGE, Made(SMALL, notes=("a [note]",), files={"chart.svg": b""}), COMPARISON))
    assert f"{LARGE.size_bytes / SMALL.size_bytes:.2f}x smaller" in out
    assert "top-1, 300 samples" in out
    assert "loss +1.00% (95 %: +0.20% … +1.80%)" in out
    assert "2.00x the speed (95 %: 1.90 … 2.10)" in out
    assert "a [note]" in out
    assert [line.split() for line in out.splitlines()[-2:]] == [["written", "chart.svg"], ["written", "out.onnx"]]


def test_a_larger_result_and_an_unmeasured_one_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, Outcome(SMALL, Made(LARGE, aims=("size",)), None))
    assert f"{LARGE.size_bytes / SMALL.size_bytes:.2f}x larger" in out
    assert "the file is not smaller than the original" in out
    assert "speed and accuracy are not measured without --evaluate" in out


def test_a_method_that_only_measures_shows_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    long_name = "n" * 60
    made = Made(None, heading="Sensitivity", table=(("layer", "loss"), (long_name, "0.1")))
    out = printed(capsys, Outcome(LARGE, made, None), None)
    assert "Sensitivity" in out
    assert long_name in out
    assert "written" not in out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, Outcome(LARGE, Made(SMALL), COMPARISON), json=True))
    assert (found["command"], found["output"], found["speedup"]) == ("quantize", "out.onnx", 2.0)
    assert found["speedup_interval"] == {"value": 2.0, "low": 1.9, "high": 2.1}
