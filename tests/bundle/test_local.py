from __future__ import annotations

from pathlib import Path

import pytest

import models
from bundles import packed
from penstock.bundle.local import DeviceLimits, load_variant
from penstock.bundle.open import open_bundle
from penstock.errors import ResourceExhausted

LINEAR = models.linear(3, 2)


def test_the_first_variant_that_runs_here_is_loaded(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}))
    found = load_variant(bundle, DeviceLimits(threads=1, power_saving=True))
    assert found.variant.name == "fp32"
    assert found.loaded.signature.input_names == ["x"]
    assert found.memory_bytes >= LINEAR.size_bytes
    found.loaded.unload()


def test_the_limit_counts_all_models(tmp_path: Path) -> None:
    bundle = open_bundle(packed(tmp_path / "a.bundle", {"model.onnx": LINEAR.data}))
    need = load_variant(bundle).memory_bytes
    load_variant(bundle, DeviceLimits(max_memory=need)).loaded.unload()
    with pytest.raises(ResourceExhausted, match="raise max_memory"):
        load_variant(bundle, DeviceLimits(max_memory=need), used_bytes=1)
