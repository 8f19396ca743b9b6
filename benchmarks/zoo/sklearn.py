"""Estimators of scikit-learn, alone and in pipelines with boosters of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

_DOUBLE = ConvertOptions(inputs=(InputSpec("features", DataType.FP64, ("N", 5)),))
_TEXTS = [
    "the cat sat on the mat",
    "a dog! barked at the cat",
    "The quick brown fox",
    "fox jumped over: dog",
    "it's raining, cats & dogs",
    "",
    "naïve café, Über straße",
    "the quick cat cat cat",
]


def rows(missing: bool = False) -> tuple[Any, Any]:
    """Features [200, 5] of float32, and a class of each row; a tenth of the features is missing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    y = (x[:, 0] + 0.3 * rng.normal(size=200) > 0).astype(np.int64) + (x[:, 1] > 1)
    if missing:
        x[rng.random(x.shape) < 0.1] = np.nan
    return x, y


def _fitted(
    make: Callable[[], Any], missing: bool = False, kind: str = "classes", save: str = ""
) -> Callable[[Path], Any]:
    """Fits the estimator of ``make`` to ``kind``: classes, two, numbers or letters. ``save``: skops or joblib; empty: an object."""

    def make_model(folder: Path) -> Any:
        x, y = rows(missing)
        targets = {
            "classes": y,
            "two": y > 0,
            "numbers": 3 * np.nan_to_num(x[:, 0]) + y,
            "letters": np.array(list("abc"))[y],
        }
        return _saved(make().fit(x, targets[kind]), folder, save)

    return make_model


def _saved(model: Any, folder: Path, save: str) -> Any:
    if save == "skops":
        import skops.io

        skops.io.dump(model, folder / "model.skops")
    elif save == "joblib":
        import joblib

        joblib.dump(model, folder / "model.joblib", compress=3)
    return folder / f"model.{save}" if save else model


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression())


def _scaled_forest() -> Any:
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler

    return make_pipeline(MinMaxScaler(), RandomForestRegressor(8, random_state=0))


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(8, max_depth=5, random_state=0)


def _large_forest(folder: Path) -> Any:
    """A forest of 100 trees with 50,000 nodes."""
    from sklearn.ensemble import RandomForestClassifier

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 20)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64) + (x[:, 2] > 0.5)
    return _saved(RandomForestClassifier(100, random_state=0).fit(x, y), folder, "joblib")


def _extra_trees() -> Any:
    from sklearn.ensemble import ExtraTreesClassifier

    return ExtraTreesClassifier(8, max_depth=5, random_state=0)


def _tree() -> Any:
    from sklearn.tree import DecisionTreeRegressor

    return DecisionTreeRegressor(max_depth=6, random_state=0)


def _gradient() -> Any:
    from sklearn.ensemble import GradientBoostingClassifier

    return GradientBoostingClassifier(n_estimators=8, random_state=0)


def _histogram() -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(max_iter=8, random_state=0)


def _svm() -> Any:
    from sklearn.svm import SVC

    return SVC()


def _neighbours() -> Any:
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(3)


def _network() -> Any:
    from sklearn.neural_network import MLPRegressor

    return MLPRegressor(hidden_layer_sizes=(8,), max_iter=2000, tol=1e-2, random_state=0)


def _clusters() -> Any:
    from sklearn.cluster import KMeans

    return KMeans(3, n_init=1, random_state=0)


def _outliers() -> Any:
    from sklearn.ensemble import IsolationForest

    return IsolationForest(n_estimators=8, random_state=0)


def _stack() -> Any:
    from sklearn.ensemble import StackingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    return StackingClassifier([("a", LogisticRegression()), ("b", DecisionTreeClassifier(max_depth=3, random_state=0))])


def _bins() -> Any:
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import KBinsDiscretizer

    return make_pipeline(KBinsDiscretizer(4, quantile_method="averaged_inverted_cdf"), Ridge())


def _boosted() -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from xgboost import XGBClassifier

    return make_pipeline(StandardScaler(), XGBClassifier(n_estimators=5, random_state=0))


def _splines() -> Any:
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import SplineTransformer

    return make_pipeline(SplineTransformer(), Ridge())


def _table(folder: Path) -> Any:
    """Columns of numbers, some missing, of categories and of text."""
    import pandas as pd
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x, y = rows(missing=True)
    rng = np.random.default_rng(1)
    table = pd.DataFrame(x[:, :2], columns=["age", "net income"])
    table["city"], table["rooms"] = rng.choice(["Rome", "Oslo", "Paris"], 200), rng.integers(0, 4, 200)
    table["note"] = rng.choice(_TEXTS, 200)
    columns = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), ["age", "net income"]),
            ("categories", OneHotEncoder(handle_unknown="ignore"), ["city", "rooms"]),
            ("words", CountVectorizer(), "note"),
        ]
    )
    return make_pipeline(columns, RandomForestClassifier(5, random_state=0)).fit(table, y)


def _text(folder: Path, **options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    texts = _TEXTS * 4
    return make_pipeline(TfidfVectorizer(**options), LogisticRegression(C=100)).fit(texts, np.arange(len(texts)) % 3)


_TRUST = ConvertOptions(trust_pickle=True)
MODELS = {
    "logistic": ZooModel("sklearn", _fitted(_logistic, save="skops")),
    "logistic_letters": ZooModel("sklearn", _fitted(_logistic, kind="letters")),
    "logistic_double": ZooModel("sklearn", _fitted(_logistic, kind="two"), _DOUBLE),
    "forest_missing": ZooModel("sklearn", _fitted(_forest, missing=True, save="skops")),
    "forest_joblib": ZooModel("sklearn", _fitted(_forest, save="joblib"), _TRUST),
    "forest_large": ZooModel("sklearn", _large_forest, _TRUST),
    "scaled_forest": ZooModel("sklearn", _fitted(_scaled_forest, kind="numbers")),
    "extra_trees": ZooModel("sklearn", _fitted(_extra_trees, kind="letters")),
    "tree_missing": ZooModel("sklearn", _fitted(_tree, missing=True, kind="numbers")),
    "tree_double": ZooModel("sklearn", _fitted(_tree, kind="numbers"), _DOUBLE),
    "gradient_boosting": ZooModel("sklearn", _fitted(_gradient, kind="two")),
    "histogram_boosting": ZooModel("sklearn", _fitted(_histogram, missing=True)),
    "svm": ZooModel("sklearn", _fitted(_svm)),
    "neighbours": ZooModel("sklearn", _fitted(_neighbours)),
    "network": ZooModel("sklearn", _fitted(_network, kind="numbers")),
    "clusters": ZooModel("sklearn", _fitted(_clusters)),
    "outliers": ZooModel("sklearn", _fitted(_outliers)),
    "stack": ZooModel("sklearn", _fitted(_stack)),
    "bins": ZooModel("sklearn", _fitted(_bins, kind="numbers")),
    "pipeline_xgboost": ZooModel("sklearn", _fitted(_boosted)),
    "table": ZooModel("sklearn", _table),
    "text": ZooModel("sklearn", _text),
    "text_pairs": ZooModel("sklearn", lambda folder: _text(folder, ngram_range=(1, 2), sublinear_tf=True)),
    "text_accents": ZooModel(
        "sklearn", lambda folder: _text(folder, strip_accents="unicode"), diagnosis="strip_accents"
    ),
    "splines": ZooModel("sklearn", _fitted(_splines, kind="numbers"), diagnosis="SplineTransformer"),
}
