from __future__ import annotations

from pathlib import Path

import pytest

import models
import penstock
from penstock.errors import NotFound, Unsupported
from pipelines import scores_bundle, scores_folder


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


def test_a_declaration_is_packed_first(tmp_path: Path) -> None:
    path = scores_folder(tmp_path)
    for open_it in (penstock.open, penstock.Pipeline.open, penstock.Model.open):
        with pytest.raises(Unsupported, match="'pipeline.yaml' is the declaration of a pipeline") as raised:
            open_it(path)
        assert f"penstock pack {path} -o pipeline.bundle" in raised.value.hint
