from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conversions import OPSET
from penstock.errors import InvalidInput, InvalidModel
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.tables.booster import Booster, BoosterConverter, BoosterModel, as_tensor
from penstock.offline.convert.tables.forest import Forest, Tree
from penstock.tensor import DataType

LEAF = Tree(np.array([-1]), np.zeros(1), np.array([-1]), np.array([-1]), np.zeros(1, bool), np.array([[1.0]]))
FOREST = Forest([LEAF], "<=", np.zeros(1), 2)


def test_errors_of_the_framework_lose_their_place_in_cpp() -> None:
    def fail(x: object) -> np.ndarray:
        raise ValueError("[17:00:00] /workspace/src/data.cc:12: Input data contains `inf`\nStack trace:\n…")

    model = BoosterModel(Booster("xgboost 3", FOREST, "identity", fail, fail), ConvertOptions())
    with pytest.raises(InvalidInput, match=r"^xgboost 3 rejects the input: Input data contains `inf`$"):
        model.forward({"features": np.zeros((1, 2), np.float32)})


def test_the_scores_are_linked_although_they_are_the_output(tmp_path: Path) -> None:
    model = BoosterModel(Booster("x", FOREST, "exponent", np.asarray, np.asarray), ConvertOptions())
    (link,) = model.export(tmp_path / "model.onnx", OPSET).links
    assert link.source == "scores"


def test_a_model_without_an_expected_part_is_damaged() -> None:
    with pytest.raises(InvalidModel, match="the model of X is damaged: 'trees'"):
        BoosterConverter("X", "1", "X", lambda source: {}["trees"]).open(None, ConvertOptions())


def test_texts_become_utf8() -> None:
    assert as_tensor(np.array(["é", "b"]), DataType.BYTES).tolist() == ["é".encode(), b"b"]
