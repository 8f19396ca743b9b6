"""Boosters of XGBoost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

_DOUBLE = ConvertOptions(inputs=(InputSpec("features", DataType.FP64, ("N", 5)),))


def _data() -> tuple[Any, Any]:
    """Four numbers with missing values and a category 0..11 for each row, and a class 0..2."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    x[:, 4] = rng.integers(0, 12, 300)
    return x, (np.nan_to_num(x[:, 0]) > 0).astype(np.int64) + (x[:, 4] % 3 == 0)


def _trained(
    name: str, target: Callable[[Any], Any] = lambda y: y, category: bool = False, **params: Any
) -> Callable[[Path], Any]:
    """Trains with ``params``, and saves the booster as ``name``."""

    def make(folder: Path) -> Any:
        import xgboost

        x, y = _data()
        types = ["q"] * 4 + ["c" if category else "q"]
        data = xgboost.DMatrix(x, target(y), feature_types=types, enable_categorical=True)
        booster = xgboost.train({"max_depth": 4, "seed": 0, **params}, data, 6)
        booster.save_model(folder / name)
        return folder / name

    return make


def _stopped(folder: Path) -> Any:
    """A classifier that stopped early, so that it does not use its last trees."""
    import xgboost

    x, y = _data()
    model = xgboost.XGBClassifier(n_estimators=20, max_depth=4, early_stopping_rounds=2, random_state=0)
    model.fit(x, y, eval_set=[(x[:50], y[::-1][:50])], verbose=False)
    model.save_model(folder / "model.json")
    return folder / "model.json"


def _replaced(folder: Path) -> Any:
    """A regressor to which 0 means missing."""
    import xgboost

    x, y = _data()
    return xgboost.XGBRegressor(n_estimators=6, max_depth=4, missing=0.0, random_state=0).fit(np.nan_to_num(x), y)


MODELS = {
    "regression": ZooModel("xgboost", _trained("model.json", objective="reg:squarederror")),
    "binary": ZooModel("xgboost", _trained("model.ubj", lambda y: y > 0, objective="binary:logistic")),
    "classes": ZooModel("xgboost", _trained("model.ubj", objective="multi:softprob", num_class=3), _DOUBLE),
    "counts": ZooModel("xgboost", _trained("model.json", objective="count:poisson")),
    "categories": ZooModel("xgboost", _trained("model.json", category=True, max_cat_to_onehot=2)),
    "dart": ZooModel("xgboost", _trained("model.json", booster="dart", rate_drop=0.5)),
    "vectors": ZooModel(
        "xgboost", _trained("model.json", lambda y: np.stack([y, y > 1], 1), multi_strategy="multi_output_tree")
    ),
    "early_stopping": ZooModel("xgboost", _stopped),
    "missing_zero": ZooModel("xgboost", _replaced),
}
