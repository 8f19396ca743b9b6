from __future__ import annotations

from pathlib import Path

import pytest

import models
import penstock
from penstock.errors import NotFound
from pipelines import scores_bundle


def test_the_kind_of_bundle_decides(tmp_path: Path) -> None:
    with penstock.open(scores_bundle(tmp_path)) as pipeline, penstock.open(tmp_path / "linear.onnx") as model:
        assert isinstance(pipeline, penstock.Pipeline)
        assert isinstance(model, penstock.Model)
        x = models.linear_weight(3, 2).T
        assert (model(x)["y"] == model.infer({"x": x})["y"]).all()
        assert (model(x=x)["y"] == model(x)["y"]).all()


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no bundle or model"):
        penstock.open(tmp_path / "none.bundle")
