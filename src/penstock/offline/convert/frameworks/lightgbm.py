"""LightGBM: boosters from text files, ``Booster`` or an estimator of its scikit-learn API.

The trees come from the model's text, as arrays. LightGBM compares and adds in float64; see ``forest.py`` for inputs of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from penstock.errors import Unsupported
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.tables.booster import Booster, BoosterConverter, loaded
from penstock.offline.convert.tables.forest import Forest, Tree
from penstock.offline.convert.tables.lightgbm_text import check, parts
from penstock.tensor import Array

_ZERO = float(np.float32(1e-35))
"""Values up to this size are zero for LightGBM."""
_CATEGORICAL, _DEFAULT_LEFT = 1, 2
"""Bits of a node's ``decision_type``; the two bits above them are the type of missing values."""
_NONE_MISSING, _ZERO_MISSING = 0, 1
_LINKS = {
    "binary": "sigmoid",
    "cross_entropy": "sigmoid",
    "multiclassova": "sigmoid",
    "multiclass": "softmax",
    "cross_entropy_lambda": "softplus",
    **dict.fromkeys(("poisson", "gamma", "tweedie"), "exponent"),
    **dict.fromkeys(("regression", "regression_l1", "huber", "fair", "quantile", "mape"), "identity"),
    **dict.fromkeys(("lambdarank", "rank_xendcg", "custom", ""), "identity"),
}
_FAILURES = (lightgbm.basic.LightGBMError, ValueError)


def _from_file(file: str) -> lightgbm.Booster:
    """The booster in ``file``. Raises ValueError if the file is damaged, because LightGBM would end the process."""
    text = Path(file).read_bytes().decode("latin-1").replace("\r\n", "\n")
    check(text)
    header, *trees = parts(text)
    if not any(tree.get("is_linear") == "1" for tree in trees):
        _forest(header, trees, int(header["num_tree_per_iteration"]), 1).check()
    return lightgbm.Booster(model_file=file)


def read(source: Any) -> Booster:
    """The booster in ``source``: a path, a ``Booster`` or an estimator."""
    estimator = source if isinstance(source, lightgbm.LGBMModel) else None
    booster = source.booster_ if estimator else source
    if not isinstance(booster, lightgbm.Booster):
        booster = loaded("LightGBM", source, _from_file, _FAILURES)
    header, *trees = parts(booster.model_to_string())
    targets = int(header["num_tree_per_iteration"])
    averaged = len(trees) // targets if "average_output" in header else 1
    forest = _forest(header, trees, targets, averaged)
    objective, *parameters = header.get("objective", "").split(" ")
    if objective not in _LINKS:
        raise Unsupported(
            f"LightGBM's objective '{objective}' is not supported", "use a built-in objective of LightGBM"
        )

    def raw(x: Array) -> Array:
        return np.asarray(booster.predict(x, raw_score=True)) / averaged

    def predict(x: Array) -> Array:
        return np.asarray(booster.predict(x))

    labelled = isinstance(estimator, lightgbm.LGBMClassifier) and objective in ("binary", "multiclass", "multiclassova")
    return Booster(
        f"lightgbm {lightgbm.__version__}",
        forest,
        "signed_square" if "sqrt" in parameters else _LINKS[objective],
        raw,
        predict,
        np.asarray(estimator.classes_) if estimator is not None and labelled else None,
        scale=next((float(one.removeprefix("sigmoid:")) for one in parameters if one.startswith("sigmoid:")), 1.0),
        double=True,
        failures=_FAILURES,
    )


def _forest(header: Mapping[str, str], trees: list[dict[str, str]], targets: int, averaged: int) -> Forest:
    linear = [f"tree {number}" for number, tree in enumerate(trees) if tree.get("is_linear") == "1"]
    if linear:
        way_out = "train with linear_tree=false"
        raise UnsupportedOperators.of([UnsupportedOperator("linear_tree", f"{linear[0]} to {linear[-1]}", way_out)])
    zero_missing: set[int] = set()
    categorical: set[int] = set()
    made = [_tree(tree, number % targets, averaged, categorical, zero_missing) for number, tree in enumerate(trees)]
    features = int(header["max_feature_idx"]) + 1
    return Forest(
        made, "<=", np.zeros(targets), features, sorted(categorical), True, (-_ZERO, _ZERO), sorted(zero_missing)
    )


def _tree(tree: dict[str, str], target: int, averaged: int, categorical: set[int], zero_missing: set[int]) -> Tree:
    """The tree with its inner nodes first, then its leaves. Adds to the features with categories and with zeros as missing values."""

    def numbers(key: str, dtype: type = np.int64) -> Array:
        return np.array(tree.get(key, "").split(), np.float64).astype(dtype)

    leaves = int(tree["num_leaves"])
    inner = leaves - 1
    values = np.concatenate([np.zeros(inner), numbers("leaf_value", np.float64)])[:, None] / averaged
    if not inner:
        none = np.full(1, -1)
        return Tree(none, np.zeros(1), none, none, np.zeros(1, np.bool_), values, target)
    feature, threshold, decision = numbers("split_feature"), numbers("threshold", np.float64), numbers("decision_type")
    by_set, default_left, missing = decision & _CATEGORICAL > 0, decision & _DEFAULT_LEFT > 0, decision >> 2 & 3
    categorical.update(feature[by_set].tolist())
    zero_missing.update(feature[~by_set & (missing == _ZERO_MISSING)].tolist())
    # Inputs up to _ZERO count as zero, so a threshold among them is moved to the end of this interval.
    moved = np.where(threshold >= 0, _ZERO, np.nextafter(-_ZERO, -np.inf))
    threshold = np.where((np.abs(threshold) <= _ZERO) & ~by_set, moved, threshold)
    # Without missing values in training, NaN counts as zero. NaN is in no set.
    missing_yes = np.where(missing == _NONE_MISSING, threshold >= 0, default_left) & ~by_set
    bounds, bits = numbers("cat_boundaries"), numbers("cat_threshold")
    sets = {}
    for node in np.nonzero(by_set)[0].tolist():
        index = int(threshold[node])
        words = bits[bounds[index] : bounds[index + 1]].astype("<u4")
        sets[node] = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0].tolist()
    left, right = (
        np.where(child < 0, inner + ~child, child) for child in (numbers("left_child"), numbers("right_child"))
    )
    feature, threshold, left, right, missing_yes = (
        np.concatenate([array, np.full(leaves, fill)])
        for array, fill in ((feature, -1), (threshold, 0.0), (left, -1), (right, -1), (missing_yes, False))
    )
    return Tree(feature, threshold, left, right, missing_yes, values, target, sets)


CONVERTER = BoosterConverter("lightgbm", lightgbm.__version__, "LightGBM", read)
