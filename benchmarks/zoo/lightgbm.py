"""Boosters of LightGBM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

_DOUBLE = ConvertOptions(inputs=(InputSpec("features", DataType.FP64, ("N", 5)),))


def _data(zeros: bool = False) -> tuple[Any, Any]:
    """Four numbers with missing values and a category 0..49 for each row, and a class 0..2."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5))
    x[rng.random(x.shape) < 0.1] = 0.0 if zeros else np.nan
    x[:, 4] = rng.integers(0, 50, 300)
    return x, (np.nan_to_num(x[:, 0]) > 0).astype(np.int64) + (x[:, 4] % 3 == 0)


def _trained(
    target: Callable[[Any], Any] = lambda y: y, category: bool = False, **params: Any
) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        import lightgbm

        x, y = _data(zeros=params.get("zero_as_missing", False))
        options = {"num_leaves": 7, "min_data_in_leaf": 5, "verbosity": -1, "seed": 0, "num_threads": 1, **params}
        data = lightgbm.Dataset(x, target(y), categorical_feature=[4] if category else [], free_raw_data=False)
        lightgbm.train(options, data, 6).save_model(folder / "model.txt")
        return folder / "model.txt"

    return make


def _classifier(folder: Path) -> Any:
    import lightgbm

    x, y = _data()
    model = lightgbm.LGBMClassifier(n_estimators=6, num_leaves=7, verbosity=-1, random_state=0, n_jobs=1)
    return model.fit(x, np.array(list("abc"))[y])


_CATEGORIES = {"max_cat_to_onehot": 1, "cat_smooth": 0, "min_data_per_group": 1}
MODELS = {
    "regression": ZooModel("lightgbm", _trained(objective="regression")),
    "regression_double": ZooModel("lightgbm", _trained(objective="regression"), _DOUBLE),
    "binary": ZooModel("lightgbm", _trained(lambda y: y > 0, objective="binary", sigmoid=1.5)),
    "classes": ZooModel("lightgbm", _trained(objective="multiclass", num_class=3)),
    "gamma": ZooModel("lightgbm", _trained(lambda y: y + 1, objective="gamma")),
    "categories": ZooModel("lightgbm", _trained(category=True, **_CATEGORIES)),
    "zeros": ZooModel("lightgbm", _trained(zero_as_missing=True)),
    "forest": ZooModel("lightgbm", _trained(boosting="rf", bagging_freq=1, bagging_fraction=0.5)),
    "classifier": ZooModel("lightgbm", _classifier),
    "linear_trees": ZooModel("lightgbm", _trained(linear_tree=True), diagnosis="linear_tree at tree"),
}
