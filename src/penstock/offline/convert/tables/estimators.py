"""Parts of scikit-learn that skl2onnx converts wrongly, as ONNX nodes: trees, scalers, bins and text vectorizers.

skl2onnx 1.20 sends NaN to the wrong child of a tree and writes invalid graphs for trees of float64. Its scalers differ in the last
bit, which can change the branch of a tree behind them. Its bins are invalid for float64. Its text vectorizers need a locale
that most containers lack, split words at letters beyond ASCII, ignore stop words and compute a different sublinear term frequency.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.errors import Unsupported
from penstock.offline.convert.tables.booster import Booster
from penstock.offline.convert.tables.forest import Forest, GraphWriter, Tree
from penstock.tensor import DataType

_TREES = re.compile(
    r"(DecisionTree|ExtraTree|RandomForest|ExtraTrees|GradientBoosting|HistGradientBoosting)(Classifier|Regressor)"
)
_WORD = r"(?u)\b\w\w+\b"
_RE2 = {r"\w": r"[\pL\pN_]", r"\d": r"\p{Nd}", r"\s": r"[\s\p{Z}]"}
_NOT_RE2 = re.compile(r"\\[bBWDSAZ0-9]|\(|\||[*+?}]\?")
"""Parts of a pattern for which Python and RE2, which finds the longest match, can differ."""
_LOCALE = "C.UTF-8"
_ZERO, _ONE = np.zeros((), np.float32), np.ones((), np.float32)
_SCALERS = {
    "StandardScaler": (("Sub", "mean_"), ("Div", "scale_")),
    "RobustScaler": (("Sub", "center_"), ("Div", "scale_")),
    "MaxAbsScaler": (("Div", "scale_"),),
    "MinMaxScaler": (("Mul", "scale_"), ("Add", "min_")),
}
"""The steps of each scaler, with the attribute of its constant."""


def is_tree(estimator: Any) -> bool:
    kind = type(estimator)
    return kind.__module__.startswith("sklearn.") and _TREES.fullmatch(kind.__name__) is not None


def read_trees(estimator: Any) -> Booster:
    """Trees, forests and gradient boosting of scikit-learn. Raises Unsupported."""
    name, classes = type(estimator).__name__, getattr(estimator, "classes_", None)
    if isinstance(classes, list):
        raise Unsupported(f"{name} with more than one output has no converter", "train one classifier for each output")
    if name.startswith("Hist"):
        forest, link, scale = *_histogram(estimator), 1.0
    elif name.startswith("Gradient"):
        forest, link, scale = _boosted(estimator)
    else:
        members = getattr(estimator, "estimators_", [estimator])
        trees = [_tree(member.tree_, classes is not None) for member in members]
        targets = trees[0].values.shape[1]
        forest, link = Forest(trees, "<=", np.zeros(targets), estimator.n_features_in_), "identity"
        scale = 1 / len(members)  # the sums of whole votes stay exact
    return Booster("", forest, link, np.asarray, np.asarray, classes, scale=scale, double=name.startswith("Hist"))


def _tree(tree: Any, normalised: bool, factor: float = 1.0, target: int = 0) -> Tree:
    values = tree.value[:, 0, :] if normalised else tree.value[:, :, 0]
    if normalised:
        values = values / values.sum(axis=1, keepdims=True)
    left, right, missing = tree.children_left, tree.children_right, tree.missing_go_to_left.astype(np.bool_)
    return Tree(tree.feature, tree.threshold, left, right, missing, values * factor, target)


def _boosted(estimator: Any) -> tuple[Forest, str, float]:
    if type(estimator.init_).__name__ not in ("DummyClassifier", "DummyRegressor", "str"):
        raise Unsupported("gradient boosting with the parameter 'init' has no converter", "train it without 'init'")
    zeros = np.zeros((1, estimator.n_features_in_), np.float32)
    base = np.asarray(estimator._raw_predict_init(zeros)).reshape(-1)  # noqa: SLF001
    trees = [
        _tree(member.tree_, False, estimator.learning_rate, target)
        for stage in estimator.estimators_
        for target, member in enumerate(stage)
    ]
    forest = Forest(trees, "<=", base.astype(np.float64), estimator.n_features_in_)
    if not hasattr(estimator, "classes_"):
        return forest, "identity", 1.0
    return forest, "sigmoid" if len(base) == 1 else "softmax", 2.0 if estimator.loss == "exponential" else 1.0


def _histogram(estimator: Any) -> tuple[Forest, str]:
    if estimator.is_categorical_ is not None and estimator.is_categorical_.any():
        raise Unsupported(
            f"{type(estimator).__name__} with categorical features has no converter", "encode them with OneHotEncoder"
        )
    trees = []
    for stage in estimator._predictors:  # noqa: SLF001
        for target, predictor in enumerate(stage):
            nodes, leaf = predictor.nodes, predictor.nodes["is_leaf"].astype(np.bool_)
            left, right = (np.where(leaf, -1, nodes[side].astype(np.int64)) for side in ("left", "right"))
            feature, missing = nodes["feature_idx"].astype(np.int64), nodes["missing_go_to_left"].astype(np.bool_)
            trees.append(Tree(feature, nodes["num_threshold"], left, right, missing, nodes["value"][:, None], target))
    base = np.asarray(estimator._baseline_prediction, np.float64).reshape(-1)  # noqa: SLF001
    forest = Forest(trees, "<=", base, estimator.n_features_in_)
    if hasattr(estimator, "classes_"):
        return forest, "sigmoid" if len(base) == 1 else "softmax"
    return forest, "exponent" if estimator.loss in ("poisson", "gamma") else "identity"


def writer_of(estimator: Any) -> Callable[..., str] | None:
    """The function that writes a transformer, if it is one of this file."""
    kind = type(estimator)
    if not kind.__module__.startswith("sklearn."):
        return None
    if kind.__name__ in _SCALERS:
        return write_scaler
    others = {"KBinsDiscretizer": write_bins, "TfidfTransformer": write_tfidf}
    is_text = hasattr(estimator, "vocabulary_") and hasattr(estimator, "token_pattern")
    return write_text if is_text else others.get(kind.__name__)


def write_bins(discretizer: Any, writer: GraphWriter, x: str, _: DataType) -> str:
    """Add the nodes of a KBinsDiscretizer, which compares in float64. Returns float32: the bins, or a column for each bin."""
    inner, counts = [edges[1:-1] for edges in discretizer.bin_edges_], discretizer.n_bins_
    table = np.full((len(inner), max(1, *map(len, inner))), np.inf)
    for row, edges in zip(table, inner, strict=True):
        row[: len(edges)] = edges
    wide = writer("Unsqueeze", writer("Cast", x, to=DataType.FP64.onnx), np.array([2]))
    reached = writer("Cast", writer("GreaterOrEqual", wide, table), to=DataType.FP32.onnx)
    bins = writer("ReduceSum", reached, np.array([2]), keepdims=0)
    if discretizer.encode == "ordinal":
        return bins
    columns = writer("Gather", bins, np.repeat(np.arange(len(counts)), counts), axis=1)
    numbers = np.concatenate([np.arange(count, dtype=np.float32) for count in counts])
    return writer("Cast", writer("Equal", columns, numbers), to=DataType.FP32.onnx)


def write_text(vectorizer: Any, writer: GraphWriter, texts: str, datatype: DataType) -> str:
    """Add the nodes of a CountVectorizer or TfidfVectorizer for ``texts``. Raises Unsupported. Returns float32 [N, words]."""
    pattern = _pattern(vectorizer)
    texts = writer("Reshape", texts, np.array([-1]))
    if vectorizer.lowercase:
        texts = writer("StringNormalizer", texts, case_change_action="LOWER", locale=_LOCALE)
    padding = "#"
    while any(padding in words for words in vectorizer.vocabulary_):
        padding += "#"
    attributes = {"mark": 0, "mincharnum": 1, "pad_value": padding, "tokenexp": pattern}
    tokens = writer("Tokenizer", texts, domain="com.microsoft", **attributes)
    found = writer("TfIdfVectorizer", tokens, mode="TF", **_grams(vectorizer))
    if vectorizer.binary:
        found = writer("Min", found, _ONE)
    return found if not hasattr(vectorizer, "use_idf") else write_tfidf(vectorizer, writer, found, datatype)


def write_tfidf(vectorizer: Any, writer: GraphWriter, counts: str, _: DataType) -> str:
    """Add the nodes that weight ``counts``, for a TfidfTransformer or TfidfVectorizer."""
    counts = writer("Cast", counts, to=DataType.FP32.onnx)
    if vectorizer.sublinear_tf:
        some = writer("Greater", counts, _ZERO)
        logarithm = writer("Add", writer("Log", writer("Max", counts, _ONE)), _ONE)
        counts = writer("Where", some, logarithm, _ZERO)
    if vectorizer.use_idf:
        counts = writer("Mul", counts, vectorizer.idf_.astype(np.float32))
    if vectorizer.norm is None:
        return counts
    norm = writer("ReduceL1" if vectorizer.norm == "l1" else "ReduceL2", counts, np.array([1]), keepdims=1)
    return writer("Div", counts, writer("Where", writer("Equal", norm, _ZERO), _ONE, norm))


def _pattern(vectorizer: Any) -> str:
    """The regular expression of a token, for RE2."""
    name = type(vectorizer).__name__
    for parameter, usual in (
        ("analyzer", "word"),
        ("strip_accents", None),
        ("preprocessor", None),
        ("tokenizer", None),
    ):
        if getattr(vectorizer, parameter) != usual:
            raise Unsupported(
                f"{name} with {parameter}={getattr(vectorizer, parameter)!r} has no converter", f"use {usual!r}"
            )
    if vectorizer.get_stop_words() and vectorizer.ngram_range[1] > 1:
        raise Unsupported(
            f"{name} with stop words and n-grams has no converter", "use ngram_range=(1, 1) or no stop words"
        )
    pattern = vectorizer.token_pattern
    if pattern == _WORD:
        return r"[\pL\pN_][\pL\pN_]+"
    pattern = pattern.removeprefix("(?u)")
    if _NOT_RE2.search(pattern) or ("[" in pattern and ("^" in pattern or "\\" in pattern)):
        raise Unsupported(
            f"{name} with token_pattern={pattern!r} has no converter", f"use the default pattern {_WORD!r}"
        )
    for python, re2 in _RE2.items():
        pattern = pattern.replace(python, re2)
    return str(pattern)


def _grams(vectorizer: Any) -> dict[str, Any]:
    """The vocabulary as attributes of TfIdfVectorizer, which wants the n-grams in order of their length."""
    low, high = vectorizer.ngram_range
    entries = sorted((words.split(" "), column) for words, column in vectorizer.vocabulary_.items())
    by_length: list[list[tuple[list[str], int]]] = [[] for _ in range(high)]
    for words, column in entries:
        if not low <= len(words) <= high:
            raise Unsupported(
                f"the vocabulary has '{' '.join(words)}' with {len(words)} words", "use a token_pattern without spaces"
            )
        by_length[len(words) - 1].append((words, column))
    ordered = [entry for grams in by_length for entry in grams]
    starts = np.cumsum([0] + [len(grams) * length for length, grams in enumerate(by_length, start=1)])[:-1]
    return {
        "min_gram_length": low,
        "max_gram_length": high,
        "max_skip_count": 0,
        "ngram_counts": starts.tolist(),
        "ngram_indexes": [column for _, column in ordered],
        "pool_strings": [word for words, _ in ordered for word in words],
    }


def is_linear_classifier(estimator: Any) -> bool:
    """True for an SGDClassifier with probabilities."""
    kind = type(estimator)
    has_probabilities = getattr(estimator, "loss", None) in ("log_loss", "modified_huber")
    return kind.__module__.startswith("sklearn.") and kind.__name__ == "SGDClassifier" and has_probabilities


def write_linear_classifier(classifier: Any, writer: GraphWriter, x: str, datatype: DataType) -> tuple[str, str]:
    """Add the nodes of an SGDClassifier, in its own precision. Returns the names of the labels and of the probabilities [N, classes].

    The labels follow from the scores, because probabilities of several classes can round to the same number.
    """
    inner = DataType.FP32 if datatype is DataType.FP32 and classifier.coef_.dtype == np.float32 else DataType.FP64
    zero, one = np.zeros((), inner.dtype), np.ones((), inner.dtype)
    weights, bias = (one.astype(inner.dtype) for one in (classifier.coef_.T, classifier.intercept_))
    scores = writer("Add", writer("MatMul", writer("Cast", x, to=inner.onnx), weights), bias)
    if classifier.loss == "log_loss":
        # The kernel of Sigmoid cuts the smallest probabilities off, which matter if those of all classes are small.
        wide = writer("Cast", scores, to=DataType.FP64.onnx)
        below = writer("Exp", writer("Min", wide, np.zeros(())))
        found = writer("Div", below, writer("Add", writer("Exp", writer("Neg", writer("Abs", wide))), np.ones(())))
        found = writer("Cast", found, to=inner.onnx)
    else:
        found = writer("Div", writer("Add", writer("Clip", scores, -one, one), one), np.array(2, inner.dtype))
    if len(classifier.classes_) == 2:
        best = writer("Squeeze", writer("Cast", writer("Greater", scores, zero), to=DataType.INT64.onnx), np.array([1]))
        return writer("Gather", classifier.classes_, best), writer("Concat", writer("Sub", one, found), found, axis=1)
    total = writer("ReduceSum", found, np.array([1]), keepdims=1)
    none = writer("Equal", total, zero)  # all classes are equally probable then
    found = writer("Where", none, one, found)
    total = writer("Where", none, np.array(len(classifier.classes_), inner.dtype), total)
    best = writer("ArgMax", scores, axis=1, keepdims=0)
    return writer("Gather", classifier.classes_, best), writer("Div", found, total)


def write_scaler(scaler: Any, writer: GraphWriter, x: str, datatype: DataType) -> str:
    """Add the nodes of a scaler, which round as scikit-learn does: float32 after each step, but all inside a step in float64."""
    wide = datatype is not DataType.FP32 or type(scaler).__name__ == "StandardScaler"
    inner = DataType.FP32 if wide and datatype is DataType.FP32 else DataType.FP64
    for op, attribute in _SCALERS[type(scaler).__name__]:
        constant = getattr(scaler, attribute)
        if constant is not None:
            x = x if datatype is inner else writer("Cast", x, to=inner.onnx)
            x = writer(op, x, np.asarray(constant).astype(inner.dtype))
            x = x if wide else writer("Cast", x, to=DataType.FP32.onnx)
    if getattr(scaler, "clip", False):
        low, high = getattr(scaler, "feature_range", (-1, 1))
        x = writer("Clip", x, *np.array([low, high], inner.dtype if wide else np.float32))
    return x if datatype in (DataType.FP32, DataType.FP64) else writer("Cast", x, to=DataType.FP32.onnx)
