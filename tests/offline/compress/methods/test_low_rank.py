from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import models


@pytest.fixture
def wide(folder: Path) -> Path:
    """``wide.onnx``, one product of 256 by 128, with ``wide.npz``."""
    (folder / "wide.onnx").write_bytes(models.linear(256, 128).data)
    np.savez(folder / "wide.npz", x=np.random.default_rng(0).standard_normal((160, 256)).astype(np.float32))
    return folder


def test_a_rank_for_all(penstock, wide: Path) -> None:
    done = penstock("low-rank", "wide.onnx", "--calibrate", "wide.npz", "--rank", "32", "-o", "thin.onnx", "--json")
    assert done.code == 0, done.err
    assert len(done.json["layers"]) == 1
    assert 0 < done.json["error"] < 1
    assert done.json["pays"] is None
    shapes = sorted(tuple(one.dims) for one in onnx.load(wide / "thin.onnx").graph.initializer if len(one.dims) == 2)
    assert shapes == [(32, 128), (256, 32)]


def test_trained_afterwards_it_is_nearer(penstock, wide: Path) -> None:
    common = (
        "low-rank",
        "wide.onnx",
        "--train",
        "wide.npz",
        "--rank",
        "32",
        "--evaluate",
        "wide.npz",
        "--budget",
        "50ms",
    )
    before = penstock(*common, "-o", "thin.onnx", "--json")
    after = penstock(*common, "--recover", "--epochs", "5", "-o", "trained.onnx", "--json")
    assert (before.code, after.code) == (0, 0), after.err
    assert [step["name"] for step in after.json["steps"]][-2:] == ["factorize", "recover"]
    assert (wide / "trained.onnx").read_bytes() != (wide / "thin.onnx").read_bytes()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ((), "all layers that can be split take"),
        ((), "give a lower --min-ms"),
        (("--rank", "127"), "makes no matrix product cheaper"),
        (("--rank", "8", "--max-error", "5%"), "--max-error cannot be combined with --rank"),
        (("--rank", "0"), "--rank must be at least 1, got 0"),
        (("--resume", "kept"), "--resume requires --recover"),
    ],
)
def test_what_cannot_be_split(penstock, wide: Path, options: tuple[str, ...], cause: str) -> None:
    done = penstock("low-rank", "wide.onnx", "--calibrate", "wide.npz", "--min-ms", "1000", *options, "-o", "out.onnx")
    assert done.code == 2
    assert cause in " ".join(done.err.replace("│", " ").split())
    assert not (wide / "out.onnx").exists()
