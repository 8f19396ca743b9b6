"""XGBoost: boosters of trees (gbtree, dart) and linear ones, from JSON or UBJSON, ``Booster`` or an estimator of its scikit-learn API.

The trees come from the booster's JSON. A prediction is ``link(base + sum of the leaves)``; the file contains ``link(base)``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from penstock.errors import Unsupported
from penstock.offline.convert.tables.booster import Booster, BoosterConverter, loaded
from penstock.offline.convert.tables.forest import Forest, Tree
from penstock.offline.convert.tables.ubjson import read_ubjson
from penstock.tensor import Array

_LOGISTIC = ("binary:logistic", "reg:logistic")
_EXPONENT = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft")
_LINKS = {
    **dict.fromkeys(_LOGISTIC, "sigmoid"),
    **dict.fromkeys(_EXPONENT, "exponent"),
    "multi:softprob": "softmax",
    "multi:softmax": "argmax",
    "binary:hinge": "step",
}
_BUILT_IN = ("reg:", "rank:", "binary:logitraw")
"""Other objectives that begin like this have no link function."""
_NODES = ("left_children", "right_children", "split_indices", "split_conditions", "split_type", "default_left")
_FAILURES = (xgboost.core.XGBoostError, ValueError)


def read(source: Any) -> Booster:
    """The booster in ``source``: a path, a ``Booster`` or an estimator."""
    estimator = source if isinstance(source, xgboost.XGBModel) else None
    booster = source.get_booster() if estimator else source
    if not isinstance(booster, xgboost.Booster):
        booster = loaded("XGBoost", source, _load, _FAILURES)
    attributes = booster.attributes()
    meta = json.loads(attributes.get("scikit_learn", "{}"))
    # The estimators predict with the best iteration; a booster predicts with all.
    if (estimator is not None or meta) and "best_iteration" in attributes:
        booster = booster[: int(attributes["best_iteration"]) + 1]
    learner = json.loads(booster.save_raw("json"))["learner"]
    objective, forest = learner["objective"]["name"], _forest(learner)
    link = _LINKS.get(objective, "identity")
    if link == "identity" and not objective.startswith(_BUILT_IN):
        raise Unsupported(f"XGBoost's objective '{objective}' is not supported", "use a built-in objective of XGBoost")
    missing = np.nan if estimator is None else estimator.missing
    if not np.isnan(missing):
        forest = forest._replace(missing=(missing, missing), missing_in=range(forest.features))

    def predict(x: Array, margin: bool = False) -> Array:
        names, types = booster.feature_names, booster.feature_types
        data = xgboost.DMatrix(x, missing=missing, feature_names=names, feature_types=types, enable_categorical=True)
        return np.asarray(booster.predict(data, output_margin=margin))

    count = len(forest.base)
    classifier = isinstance(estimator, xgboost.XGBClassifier) or meta.get("_estimator_type") == "classifier"
    labelled = classifier and (objective, count > 1) in (("binary:logistic", False), ("multi:softprob", True))
    classes = np.arange(max(2, count)) if labelled else None
    exporter = f"xgboost {xgboost.__version__}"
    return Booster(exporter, forest, link, lambda x: predict(x, margin=True), predict, classes, failures=_FAILURES)


def _load(file: str) -> xgboost.Booster:
    """The booster in ``file``. Raises ValueError if the file is damaged, because XGBoost would hang or crash."""
    data = Path(file).read_bytes()
    if not data.startswith(b"{"):
        raise ValueError("it is neither JSON nor UBJSON")
    content = json.loads(data) if data[1:].lstrip().startswith(b'"') else read_ubjson(data)
    try:
        _forest(content["learner"]).check()
        _check_parents(content["learner"]["gradient_booster"])
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return xgboost.Booster(model_file=file)


def _check_parents(booster: dict[str, Any]) -> None:
    """Raise ValueError if XGBoost would read other memory. A forest does not need these arrays."""
    for number, tree in enumerate((booster.get("gbtree") or booster)["model"]["trees"]):
        left, right, parents = (np.array(tree[key]) for key in ("left_children", "right_children", "parents"))
        inner = np.nonzero(left >= 0)[0]
        children = np.concatenate([left[inner], right[inner]])
        lengths = {len(tree[key]) for key in (*_NODES, "parents")}
        if (parents[children] != np.tile(inner, 2)).any() or min(left.min(), right.min()) < -1 or len(lengths) > 1:
            raise ValueError(f"tree {number} is damaged")


def _forest(learner: dict[str, Any]) -> Forest:
    parameters, objective = learner["learner_model_param"], learner["objective"]["name"]
    features = int(parameters["num_feature"])
    targets = max(int(parameters["num_class"]), int(parameters.get("num_target", 1)), 1)
    base = np.array(json.loads(parameters["base_score"]), np.float32).astype(np.float64).reshape(-1)
    base = np.broadcast_to(base, (targets,))
    if objective in _LOGISTIC:
        base = -np.log(1 / base - 1)
    elif objective in _EXPONENT:
        base = np.log(base)
    booster = learner["gradient_booster"]
    if booster["name"] == "gblinear":
        raise Unsupported("XGBoost's linear booster 'gblinear' is not supported", "use the booster gbtree or dart")
    drop = booster.get("weight_drop")
    model = booster["gbtree"]["model"] if drop else booster["model"]
    categorical = {
        index
        for tree in model["trees"]
        for index, kind in zip(tree["split_indices"], tree["split_type"], strict=True)
        if kind
    }
    trees = [
        _tree(tree, target, drop[number] if drop else 1.0)
        for number, (tree, target) in enumerate(zip(model["trees"], model["tree_info"], strict=True))
    ]
    return Forest(trees, "<", base, features, sorted(categorical))


def _tree(tree: dict[str, Any], target: int, weight: float) -> Tree:
    feature, left, right = (np.array(tree[key]) for key in ("split_indices", "left_children", "right_children"))
    threshold = np.array(tree["split_conditions"], np.float32).astype(np.float64)
    size = int(tree["tree_param"]["size_leaf_vector"])
    values = threshold[:, None]
    if size > 1 and "leaf_weights" in tree:
        at = np.where(left < 0, right, 0)
        values = np.array(tree["leaf_weights"], np.float64).reshape(-1, size)[at]
    elif size > 1:
        values = np.array(tree["base_weights"], np.float64).reshape(-1, size)
    starts, sizes = tree["categories_segments"], tree["categories_sizes"]
    sets = {
        node: tree["categories"][start : start + count]
        for node, start, count in zip(tree["categories_nodes"], starts, sizes, strict=True)
    }
    # A numeric value goes left if it is below the threshold. A category goes right if it is in the set.
    yes, no, missing = left.copy(), right.copy(), np.array(tree["default_left"], np.bool_)
    at_sets = np.array(list(sets), np.int64)
    yes[at_sets], no[at_sets], missing[at_sets] = right[at_sets], left[at_sets], ~missing[at_sets]
    return Tree(feature, threshold, yes, no, missing, values * weight, target, sets)


CONVERTER = BoosterConverter("xgboost", xgboost.__version__, "XGBoost", read)
