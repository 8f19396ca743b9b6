from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("catboost", reason="the extra penstock[catboost] is not installed")

import catboost

from benchmarks.zoo.catboost import MODELS
from conversions import assert_zoo
from penstock.errors import InvalidArgument, InvalidModel
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.frameworks.catboost import CONVERTER


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    assert_zoo(MODELS[name], tmp_path)


def test_a_model_that_is_not_trained_is_refused() -> None:
    with pytest.raises(InvalidModel, match="not trained"):
        CONVERTER.open(catboost.CatBoost(), ConvertOptions())


@pytest.mark.parametrize("name", ["regression", "regression_json"])
def test_truncated_files_are_refused(name: str, tmp_path: Path) -> None:
    file = Path(str(MODELS[name].make(tmp_path)))
    data = file.read_bytes()
    for size in range(0, len(data), len(data) // 10):
        file.write_bytes(data[:size])
        with pytest.raises(InvalidModel, match="CatBoost"):
            CONVERTER.open(file, ConvertOptions())


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict is not a model of CatBoost"):
        CONVERTER.open({}, ConvertOptions())
