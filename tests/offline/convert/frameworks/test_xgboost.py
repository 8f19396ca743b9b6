from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgboost", reason="the extra penstock[xgboost] is not installed")

import xgboost

from benchmarks.zoo.xgboost import MODELS
from conversions import assert_same, assert_zoo
from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, Unsupported
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.frameworks.xgboost import CONVERTER
from penstock.tensor import DataType

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 5)).astype(np.float32)
Y = RNG.integers(0, 3, 200)


def trained(objective: str, **params: Any) -> xgboost.Booster:
    label = Y if "multi" in objective else Y > 0
    data = xgboost.DMatrix(X, label, label_lower_bound=Y + 1, label_upper_bound=Y + 2)
    return xgboost.train({"objective": objective, "max_depth": 3, **params}, data, 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    assert_zoo(MODELS[name], tmp_path)


@pytest.mark.parametrize(
    "objective",
    [
        *("reg:logistic", "reg:tweedie", "reg:absoluteerror", "reg:squaredlogerror", "reg:pseudohubererror"),
        *("binary:hinge", "binary:logitraw", "survival:cox", "survival:aft", "rank:ndcg"),
    ],
)
def test_every_objective_has_its_link_function(objective: str, tmp_path: Path) -> None:
    assert_same("xgboost", trained(objective), tmp_path)


def test_quantiles_are_the_columns_of_one_output(tmp_path: Path) -> None:
    assert_same("xgboost", trained("reg:quantileerror", quantile_alpha=[0.2, 0.8]), tmp_path)


def test_multi_softmax_predicts_the_class(tmp_path: Path) -> None:
    assert_same("xgboost", trained("multi:softmax", num_class=3), tmp_path)


def test_a_classifier_gives_what_its_methods_give() -> None:
    classifier = xgboost.XGBClassifier(n_estimators=4).fit(X, Y)
    found = CONVERTER.open(classifier, ConvertOptions()).forward({"features": X})
    np.testing.assert_array_equal(found["label"], classifier.predict(X))
    np.testing.assert_array_equal(found["probabilities"], classifier.predict_proba(X))


def test_linear_boosters_are_diagnosed() -> None:
    booster = xgboost.train({"booster": "gblinear"}, xgboost.DMatrix(X, Y), 2)
    with pytest.raises(Unsupported, match="gblinear"):
        CONVERTER.open(booster, ConvertOptions())


def test_categories_are_whole_numbers(tmp_path: Path) -> None:
    values = np.array([-3, -0.5, 0.5, 2.7, 11.9, 12, 4000, np.nan], np.float32)
    features = np.concatenate([np.zeros((8, 4), np.float32), values[:, None]], axis=1)
    zoo = MODELS["categories"]
    assert_same("xgboost", zoo.make(tmp_path), tmp_path, features=features)


@pytest.mark.parametrize(
    "content", [b"{}", b"{L\0\0\0\0\0\0\0\x07learner", b'{"learner": {"gradient_booster": 3}}', b"\xff" * 100, b""]
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(content)
    with pytest.raises(InvalidModel, match=r"'model.json' is not a model of XGBoost"):
        CONVERTER.open(file, ConvertOptions())


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_truncated_files_are_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"model.{suffix}"
    trained("reg:squarederror").save_model(file)
    data = file.read_bytes()
    for size in range(0, len(data), max(1, len(data) // 20)):
        file.write_bytes(data[:size])
        with pytest.raises(InvalidModel):
            CONVERTER.open(file, ConvertOptions())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((InputSpec("x", None, ("N", 4)),), r"shape \['N', 4\]"),
        ((InputSpec("x", DataType.BYTES, None),), "BYTES"),
        ((InputSpec("x", None, None), InputSpec("y", None, None)), "2 are declared: x, y"),
    ],
)
def test_wrong_inputs_are_refused_with_the_right_declaration(declared: tuple[InputSpec, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as raised:
        CONVERTER.open(trained("reg:squarederror"), ConvertOptions(inputs=declared))
    assert '--inputs "x:float32[N,5]"' in raised.value.hint


def test_infinite_values_are_rejected_as_by_xgboost() -> None:
    model = CONVERTER.open(trained("reg:squarederror"), ConvertOptions())
    with pytest.raises(InvalidInput, match="rejects the input"):
        model.forward({"features": np.full((1, 5), np.inf, np.float32)})


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict is not a model of XGBoost"):
        CONVERTER.open({}, ConvertOptions())


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_damaged_files_end_in_an_error(suffix: str, tmp_path: Path) -> None:
    """A damaged number is a model too, but XGBoost must neither hang nor crash."""
    file, rng, refused = tmp_path / f"model.{suffix}", np.random.default_rng(0), 0
    trained("reg:squarederror").save_model(file)
    data = file.read_bytes()
    for _ in range(60):
        at = int(rng.integers(len(data)))
        file.write_bytes(data[:at] + rng.bytes(4) + data[at + int(rng.integers(9)) :])
        try:
            CONVERTER.open(file, ConvertOptions())
        except (InvalidModel, Unsupported):
            refused += 1
    assert refused > 20
