"""CatBoost: models from .cbm and .json files, or objects. Categorical, text and embedding features cannot be converted.

The trees come from the model's JSON. CatBoost compares float32 features with float32 borders, and adds the leaves in float64.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import catboost
import numpy as np

from penstock.errors import InvalidModel
from penstock.offline.convert.base import UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.tables.booster import Booster, BoosterConverter, loaded
from penstock.offline.convert.tables.forest import Forest, Tree
from penstock.tensor import Array

_EXPONENT = ("Poisson", "Tweedie", "LogLinQuantile")
_MANY_LABELS = ("MultiLogloss", "MultiCrossEntropy")
_UNCERTAINTY = (
    "the outputs are the mean and the logarithm of the standard deviation, as with prediction_type='RawFormulaVal'"
)
_WAY_OUT = "encode the column as numbers before training, such as with scikit-learn's OneHotEncoder or OrdinalEncoder"
_KINDS = {
    "categorical_features": "categorical feature",
    "text_features": "text feature",
    "embedding_features": "embedding feature",
}
_FAILURES = (catboost.CatBoostError, ValueError)


def read(source: Any) -> Booster:
    """The booster in ``source``: a path or an object."""
    model = source
    if not isinstance(source, catboost.CatBoost):
        model = loaded("CatBoost", source, _load, _FAILURES)
    elif not source.is_fitted():
        raise InvalidModel("the model of CatBoost is not trained", "call fit first")
    with tempfile.TemporaryDirectory(prefix="penstock-convert-") as folder:
        file = Path(folder, "model.json")
        model.save_model(str(file), format="json")
        content = json.loads(file.read_bytes())
    forest = _forest(content)
    loss = content["model_info"].get("params", {}).get("loss_function", {}).get("type", "")
    classes = np.asarray(model.classes_) if content["model_info"].get("class_params") else None
    kind = "Exponent" if loss in _EXPONENT else "RawFormulaVal"
    link = "exponent" if loss in _EXPONENT else "identity"
    if loss in _MANY_LABELS:
        kind, link, classes = "Probability", "sigmoid", None
    elif classes is not None:
        kind, link = "Probability", "softmax" if loss == "MultiClass" else "sigmoid"

    def predicted(kind: str) -> Callable[[Array], Array]:
        return lambda x: np.asarray(model.predict(x.astype(np.float32), prediction_type=kind))

    label = None if classes is None else predicted("Class")
    exporter = f"catboost {catboost.__version__}"
    made = Booster(
        exporter, forest, link, predicted("RawFormulaVal"), predicted(kind), classes, label, failures=_FAILURES
    )
    return made._replace(warnings=(_UNCERTAINTY,)) if loss == "RMSEWithUncertainty" else made


def _load(file: str) -> catboost.CatBoost:
    with Path(file).open("rb") as stream:
        is_json = stream.read(64).lstrip().startswith(b"{")
    if is_json:
        json.loads(Path(file).read_bytes())  # CatBoost reads truncated files, without their last trees
    return catboost.CatBoost().load_model(file, format="json" if is_json else "cbm")


def _forest(content: Mapping[str, Any]) -> Forest:
    info = content["features_info"]
    foreign = [
        UnsupportedOperator(
            kind, f"'{one['feature_id']}'" if one["feature_id"] else f"column {one['flat_feature_index']}", _WAY_OUT
        )
        for key, kind in _KINDS.items()
        for one in info.get(key, ())
    ]
    if foreign:
        raise UnsupportedOperators.of(foreign)
    floats = info["float_features"]
    features = max((one["flat_feature_index"] for one in floats), default=-1) + 1
    scale, bias = content["scale_and_bias"]
    base = np.array(bias, np.float64).reshape(-1)
    missing = {one["feature_index"]: one["nan_value_treatment"] == "AsTrue" for one in floats}
    columns = {one["feature_index"]: one["flat_feature_index"] for one in floats}
    trees = []
    for one in content.get("oblivious_trees") or content.get("trees", ()):
        splits, yes, no, leaves = _oblivious(one) if "splits" in one else _unfolded(one)
        values = np.array(leaves, np.float64).reshape(len(yes), -1) * scale
        used = [split["float_feature_index"] if split else -1 for split in splits]
        feature = np.array([columns.get(index, -1) for index in used])
        border = np.array([split["border"] if split else 0 for split in splits], np.float32).astype(np.float64)
        missing_yes = np.array([missing.get(index, False) for index in used])
        trees.append(Tree(feature, border, np.array(yes), np.array(no), missing_yes, values))
    return Forest(trees, ">", base, features)


_Nodes = tuple[list[Any], list[int], list[int], list[Any]]
"""The split, the child if it holds, the other child and the values of each node; leaves have no split and the child -1."""


def _oblivious(tree: Mapping[str, Any]) -> _Nodes:
    """A tree whose levels have the same split each: bit ``i`` of a leaf's number is the result of split ``i``."""
    splits = tree["splits"][::-1]
    leaves = 1 << len(splits)
    values = np.array(tree["leaf_values"]).reshape(leaves, -1).tolist()
    inner = range(leaves - 1)
    levels = [splits[(node + 1).bit_length() - 1] for node in inner]
    yes, no = ([2 * node + side for node in inner] + [-1] * leaves for side in (2, 1))
    return [*levels, *[None] * leaves], yes, no, [[0.0] * len(values[0]) for _ in inner] + values


def _unfolded(tree: Mapping[str, Any]) -> _Nodes:
    """A tree of any shape, which is nested in the file."""
    nodes = [tree]
    splits: list[Any] = []
    yes: list[int] = []
    no: list[int] = []
    for node in nodes:  # grows while it is read
        split = node.get("split")
        splits.append(split)
        yes.append(len(nodes) + 1 if split else -1)
        no.append(len(nodes) if split else -1)
        nodes += [node["left"], node["right"]] if split else []
    leaves = [node["value"] for node in nodes if not node.get("split")]
    width = np.size(leaves[0])
    return (
        splits,
        yes,
        no,
        [np.zeros(width) if node.get("split") else np.reshape(node["value"], width) for node in nodes],
    )


CONVERTER = BoosterConverter("catboost", catboost.__version__, "CatBoost", read)
