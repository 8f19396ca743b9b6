from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("skl2onnx", reason="the extra penstock[sklearn] is not installed")

from sklearn.ensemble import GradientBoostingRegressor, HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LinearRegression

from conversions import assert_same
from penstock.errors import Unsupported
from penstock.offline.convert.tables.estimators import read_trees, write_text
from penstock.offline.convert.tables.forest import GraphWriter
from penstock.tensor import DataType

TEXTS = [
    "the cat sat on the mat",
    "a dog! barked",
    "naïve café Über straße",
    "",
    "e-mail me: foo@bar.com x y z",
    "cat_1 fox2",
]
ODD = ["ÉCOLE Été", "line\nbreak\ttab the", "٣٤ the", "#", "## the # cat", "日本 語 日本", "x"]


@pytest.mark.parametrize(
    "vectorizer",
    [
        TfidfVectorizer(),
        TfidfVectorizer(ngram_range=(1, 3), sublinear_tf=True),
        TfidfVectorizer(ngram_range=(2, 2), norm="l1", lowercase=False),
        TfidfVectorizer(stop_words=["the"], use_idf=False, norm=None),
        TfidfVectorizer(token_pattern="[a-z]+", max_features=5),
        CountVectorizer(binary=True, token_pattern=r"\w+"),
        CountVectorizer(vocabulary=["cat", "dog"]),
    ],
    ids=str,
)
def test_text_gives_the_same_numbers(vectorizer: Any, tmp_path: Path) -> None:
    texts = np.array([[one.encode()] for one in TEXTS + ODD], np.object_)
    assert_same("sklearn", vectorizer.fit(TEXTS), tmp_path, text=texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"analyzer": "char"}, "analyzer='char'"),
        ({"strip_accents": "unicode"}, "strip_accents='unicode'"),
        ({"stop_words": "english", "ngram_range": (1, 2)}, "stop words and n-grams"),
        ({"token_pattern": r"\w+(?=s)"}, "token_pattern"),
        ({"token_pattern": r"[\w-]+"}, "token_pattern"),
        ({"token_pattern": "cat|cats"}, "token_pattern"),
    ],
)
def test_text_that_would_change_is_refused(options: dict[str, Any], message: str) -> None:
    vectorizer = CountVectorizer(**options).fit([*TEXTS, "cats"])
    with pytest.raises(Unsupported, match=message) as raised:
        write_text(vectorizer, GraphWriter(), "text", DataType.BYTES)
    assert raised.value.hint


def test_trees_that_would_change_are_refused() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 2
    many = RandomForestClassifier(2).fit(x, np.stack([y, y], axis=1))
    started = GradientBoostingRegressor(n_estimators=2, init=LinearRegression()).fit(x, y)
    categories = HistGradientBoostingRegressor(max_iter=2, categorical_features=[0]).fit(np.abs(x.astype(int)), y)
    for estimator, message in (
        (many, "more than one output"),
        (started, "'init'"),
        (categories, "categorical features"),
    ):
        with pytest.raises(Unsupported, match=message):
            read_trees(estimator)
