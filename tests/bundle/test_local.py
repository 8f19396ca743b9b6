from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import models
from bundles import packed
from penstock.bundle import local
from penstock.bundle.local import DeviceLimits, load_variant
from penstock.bundle.manifest import Variant
from penstock.bundle.open import open_bundle
from penstock.engines.registry import get_engine
from penstock.errors import ResourceExhausted

LINEAR = models.linear(3, 2)


def test_the_first_variant_that_runs_here_is_loaded(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}))
    found = load_variant(bundle, DeviceLimits(threads=1, power_saving=True))
    assert found.variant.name == "fp32"
    assert found.loaded.signature.input_names == ["x"]
    assert found.memory_bytes >= LINEAR.size_bytes
    found.loaded.unload()


@pytest.mark.parametrize(
    ("options", "given", "threads"),
    [
        ({}, 0, 3),
        ({}, 1, 1),
        ({"inter_op_threads": 1}, 0, 3),
        ({"threads": 2}, 0, 2),
        ({"threads": 8}, 0, 3),
        ({"threads": 2}, 5, 5),
    ],
)
def test_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], given: int, threads: int
) -> None:
    seen: list[dict[str, Any]] = []
    engine = get_engine("onnxruntime")
    monkeypatch.setattr(local, "usable_cores", lambda: 3)
    monkeypatch.setattr(
        local,
        "get_engine",
        lambda name: SimpleNamespace(estimate=engine.estimate, load=lambda artifact, chosen: seen.append(chosen)),
    )
    variants = (Variant("fp32", "model.onnx", "onnxruntime", "fp32", options=options),)
    bundle = open_bundle(packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}, variants=variants))
    load_variant(bundle, DeviceLimits(threads=given))
    assert seen[0]["threads"] == threads
    assert ("spinning" in seen[0]) == ("threads" not in options), "a measurement chose the options"


def test_the_limit_counts_all_models(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}))
    need = load_variant(bundle).memory_bytes
    load_variant(bundle, DeviceLimits(max_memory=need)).loaded.unload()
    with pytest.raises(ResourceExhausted, match="raise max_memory"):
        load_variant(bundle, DeviceLimits(max_memory=need), used_bytes=1)
