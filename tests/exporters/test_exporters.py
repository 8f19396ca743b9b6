"""Architectures in plain torch, exported by TorchScript: quantised as well as by ONNX Runtime's own quantiser, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.exporters import plain
from tests.exporters.architecture import Architecture
from tests.exporters.export import ROWS, export
from tests.exporters.trial import Ending, Trial, distance, in_calls


@pytest.mark.slow
@pytest.mark.parametrize("architecture", plain.architectures(), ids=lambda one: one.name)
def test_an_exported_model_is_quantised_or_refused(architecture: Architecture, tmp_path: Path) -> None:
    plain.torch.manual_seed(0)
    batch = ("free", "fixed")[len(architecture.name) % 2]
    data = export(architecture, architecture.make(), "torchscript", batch)
    ending = Trial(architecture.name, architecture, data, tmp_path).quantize()
    assert not ending.is_finding, ending


def test_the_judgement_sees_other_values_and_infinities() -> None:
    want = {"y": np.ones((4, 2), np.float32), "class": np.arange(4)}
    assert distance(want, want | {"class": np.zeros(4)}) == 0
    assert distance(want, want | {"y": want["y"] * 1.5}) == pytest.approx(0.5)
    assert distance(want, want | {"y": want["y"] * np.inf}) == np.inf
    assert Ending("model", "quantize", "exit code 1").is_finding
    assert not Ending("model", "quantize", "refused").is_finding


def test_rows_run_in_calls_of_the_fixed_batch() -> None:
    sizes = []

    def forward(part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes.append(len(part["x"]))
        return {"y": 2 * part["x"]}

    rows = np.arange(2 * ROWS)
    assert (in_calls(forward, {"x": rows}, ROWS)["y"] == 2 * rows).all()
    assert sizes == [ROWS, ROWS]
