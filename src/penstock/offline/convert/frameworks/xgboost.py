"""XGBoost: boosters of trees (gbtree, dart) and linear ones, from JSON or UBJSON, ``Booster`` or an estimator of its scikit-learn API.

The trees come from the booster's JSON. A prediction is ``link(base + sum of the leaves)``, where the base is stored after the link function.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from penstock.errors import InvalidArgument, InvalidModel, Unsupported
from penstock.offline.convert.base import ConvertOptions
from penstock.offline.convert.booster import Booster, BoosterModel, LinearScorer
from penstock.offline.convert.forest import Forest, Tree
from penstock.tensor import Array

_LOGISTIC = {"binary:logistic": "sigmoid", "reg:logistic": "sigmoid"}
_EXPONENT = dict.fromkeys(("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft"), "exponent")
_OTHERS = {"multi:softprob": "softmax", "multi:softmax": "argmax", "binary:hinge": "step"}
_BUILT_IN = ("reg:", "rank:", "binary:logitraw")
"""Other objectives that begin like this have no link function."""


class XGBoostConverter:
    name = "xgboost"
    version = xgboost.__version__

    def open(self, source: Any, options: ConvertOptions) -> BoosterModel:
        return BoosterModel(read(source), options)


CONVERTER = XGBoostConverter()


def read(source: Any) -> Booster:
    """The booster in ``source``: a path, a ``Booster`` or an estimator."""
    estimator = source if isinstance(source, xgboost.XGBModel) else None
    booster = _loaded(source) if estimator is None else estimator.get_booster()
    attributes = booster.attributes()
    meta = json.loads(attributes.get("scikit_learn", "{}"))
    # The estimators predict with the best iteration; a booster predicts with all.
    if (estimator is not None or meta) and "best_iteration" in attributes:
        booster = booster[: int(attributes["best_iteration"]) + 1]
    learner = json.loads(booster.save_raw("json"))["learner"]
    objective, scorer = learner["objective"]["name"], _scorer(learner)
    classifier = isinstance(estimator, xgboost.XGBClassifier) or meta.get("_estimator_type") == "classifier"
    link = (_LOGISTIC | _EXPONENT | _OTHERS).get(objective, "identity")
    if link == "identity" and not objective.startswith(_BUILT_IN):
        raise Unsupported(f"XGBoost's objective '{objective}' is not supported", "use a built-in objective of XGBoost")
    if estimator is not None and isinstance(scorer, Forest) and not np.isnan(estimator.missing):
        scorer = scorer._replace(missing=(estimator.missing,) * 2, missing_in=range(scorer.features))
    missing = np.nan if estimator is None else estimator.missing

    def predict(x: Array, margin: bool = False) -> Array:
        names, types = booster.feature_names, booster.feature_types
        data = xgboost.DMatrix(x, missing=missing, feature_names=names, feature_types=types, enable_categorical=True)
        found: Array = booster.predict(data, output_margin=margin)
        return found

    def probabilities(x: Array) -> Array:
        found = predict(x)
        return found if found.ndim == 2 else np.stack([1 - found, found], axis=1)

    def label(x: Array) -> Array:
        return np.argmax(probabilities(x), axis=1)

    failures = (xgboost.core.XGBoostError, ValueError)
    made = Booster(
        f"xgboost {xgboost.__version__}", scorer, link, lambda x: predict(x, margin=True), predict, failures=failures
    )
    count = len(scorer.base)
    if not classifier or (objective, count > 1) not in (("binary:logistic", False), ("multi:softprob", True)):
        return made
    return made._replace(predict=probabilities, classes=np.arange(max(2, count)), label=label)


def _loaded(source: Any) -> xgboost.Booster:
    if isinstance(source, xgboost.Booster):
        return source
    if not isinstance(source, (str, Path)):
        raise InvalidArgument(f"{type(source).__name__} is not a model of XGBoost", "give a Booster or an estimator")
    try:
        return xgboost.Booster(model_file=str(source))
    except (xgboost.core.XGBoostError, ValueError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidModel(
            f"'{Path(source).name}' is not a model of XGBoost: {reason}", "save it again with save_model"
        ) from error


def _scorer(learner: dict[str, Any]) -> Forest | LinearScorer:
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
        weights = np.array(booster["model"]["weights"], np.float64).reshape(features + 1, targets)
        return LinearScorer(weights[:-1], base + weights[-1])
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
