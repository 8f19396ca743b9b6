"""Models of CatBoost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel

_OPTIONS = {
    "iterations": 6,
    "depth": 3,
    "verbose": 0,
    "allow_writing_files": False,
    "random_seed": 0,
    "thread_count": 1,
}


def _data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x, (np.nan_to_num(x[:, 0]) > 0).astype(np.int64) + (x[:, 1] > 0)


def _trained(name: str, target: Callable[[Any], Any] = lambda y: y, **params: Any) -> Callable[[Path], Any]:
    """Trains with ``params``, and saves the model as ``name``."""

    def make(folder: Path) -> Any:
        import catboost

        x, y = _data()
        model = catboost.CatBoost({**_OPTIONS, **params})
        model.fit(x, target(y))
        model.save_model(str(folder / name), format=name.partition(".")[2])
        return folder / name

    return make


def _classifier(folder: Path) -> Any:
    import catboost

    x, y = _data()
    return catboost.CatBoostClassifier(**_OPTIONS).fit(x, np.array(["no", "maybe", "yes"])[y])


def _categories(folder: Path) -> Any:
    import catboost

    x, y = _data()
    table = np.concatenate([x[:, :2].astype(np.object_), np.array(list("uvw"), np.object_)[y][:, None]], axis=1)
    return catboost.CatBoostClassifier(**_OPTIONS, cat_features=[2]).fit(table, y)


MODELS = {
    "regression": ZooModel("catboost", _trained("model.cbm", loss_function="RMSE")),
    "regression_json": ZooModel("catboost", _trained("model.json", loss_function="Quantile:alpha=0.3")),
    "binary": ZooModel("catboost", _trained("model.cbm", lambda y: y > 0, loss_function="Logloss")),
    "classes": ZooModel("catboost", _trained("model.cbm", loss_function="MultiClass")),
    "classes_apart": ZooModel("catboost", _trained("model.cbm", loss_function="MultiClassOneVsAll", nan_mode="Max")),
    "counts": ZooModel("catboost", _trained("model.cbm", loss_function="Poisson")),
    "leafwise": ZooModel("catboost", _trained("model.cbm", grow_policy="Lossguide")),
    "many_numbers": ZooModel(
        "catboost", _trained("model.cbm", lambda y: np.stack([y, -y], 1), loss_function="MultiRMSE")
    ),
    "classifier": ZooModel("catboost", _classifier),
    "categories": ZooModel("catboost", _categories, diagnosis="categorical feature at column 2"),
}
