"""Rules for trees, linear models, and feature and text preparation. These operators process rows of [rows, features] separately."""

from __future__ import annotations

from penstock.rows.call import CLASSICAL, Call, Facts, keeps_shape, rule
from penstock.rows.facts import Fact, stop
from penstock.rows.sizes import plus


def _one_row_each(call: Call, fact: Fact) -> None:
    """Raise Dependent unless the input's shape is [rows, features]. Operators of ONNX Runtime interpret other shapes differently."""
    if fact.rank != 2:
        stop(f"has an input of {fact.rank} axes instead of [rows, features]")
    call.mixes(fact, 1)


@rule("TreeEnsembleRegressor", "TreeEnsemble", "LinearRegressor", "SVMRegressor", domain=CLASSICAL)
def regressor(call: Call) -> Fact:
    _one_row_each(call, call[0])
    return Fact([call[0].shape[0], call.attribute("n_targets", call.attribute("targets", 1))])


@rule("TreeEnsembleClassifier", "LinearClassifier", "SVMClassifier", domain=CLASSICAL)
def classifier(call: Call) -> Facts:
    _one_row_each(call, call[0])
    rows = call[0].shape[0]
    names = ("classlabels_int64s", "classlabels_strings", "classlabels_ints")
    classes = next((len(found) for name in names if (found := call.attribute(name))), 0)
    # A model of two classes can return one score or two.
    return [Fact([rows]), Fact([rows, classes if classes > 2 else call.unknown()])]


@rule("Normalizer", "Scaler", "Imputer", domain=CLASSICAL)
def scaler(call: Call) -> Fact:
    _one_row_each(call, call[0])
    return Fact(call[0].shape)


keeps_shape("LabelEncoder", "CategoryMapper", "Binarizer", domain=CLASSICAL)


@rule("OneHotEncoder", domain=CLASSICAL)
def one_hot(call: Call) -> Fact:
    kinds = call.attribute("cats_int64s") or call.attribute("cats_strings") or ()
    return Fact([*call[0].shape, len(kinds)])


@rule("FeatureVectorizer", domain=CLASSICAL)
def features(call: Call) -> Fact:
    total = 0
    for position in range(len(call.inputs)):
        _one_row_each(call, call[position])
        if call[position].shape[0] != call[0].shape[0]:
            stop("joins rows with constants")
        total = plus(total, call[position].shape[1])
    return Fact([call[0].shape[0], total])


@rule("StringNormalizer")
def text(call: Call) -> Fact:
    if call.attribute("stopwords"):
        stop("removes words, and may remove rows")
    return Fact(call[0].shape)


@rule("TfIdfVectorizer")
def vectorizer(call: Call) -> Fact:
    _one_row_each(call, call[0])
    return Fact([*call[0].shape[:-1], max(call.attribute("ngram_indexes", (0,))) + 1])
