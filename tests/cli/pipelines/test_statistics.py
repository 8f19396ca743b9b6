"""Statistics of outputs, by their types."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cli.pipelines.statistics import OutputStatistics, is_single
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType

LABELS = ValueType(Media.TEXT, DataType.BYTES, many=True)
ONE_LABEL = ValueType(Media.TEXT, DataType.BYTES, many=True, count=1)


def test_a_detector() -> None:
    found = OutputStatistics({"boxes": ValueType(shape=(-1, 4)), "scores": ValueType(shape=(-1,)), "labels": LABELS})
    for labels in (["cat"], [], ["dog", "cat", "cat"]):
        scores = np.linspace(0.9, 0.5, len(labels), dtype=np.float32)
        found.add({"boxes": np.zeros((len(labels), 4), np.float32), "scores": scores, "labels": labels})
    assert found.items == 3
    assert found.texts() == {"labels": {"cat": 2, "dog": 1}, "labels.first": {"cat": 1, "dog": 1}}
    numbers = found.numbers()
    assert set(numbers) == {"boxes.length", "scores[0]", "scores.length", "labels.length"}
    assert (numbers["boxes.length"]["mean"], numbers["boxes.length"]["max"]) == (pytest.approx(4 / 3), 3)
    assert (numbers["scores[0]"]["count"], numbers["scores[0]"]["min"]) == (2, pytest.approx(0.9))
    assert not found.left_out


def test_the_statistics_do_not_depend_on_the_first_values() -> None:
    """A detector that finds one object in each frame has the statistics of a detector."""
    found = OutputStatistics({"scores": ValueType(shape=(-1,)), "labels": LABELS})
    found.add({"scores": np.ones(1, np.float32), "labels": ["cat"]})
    assert set(found.numbers()) == {"scores[0]", "scores.length", "labels.length"}
    assert set(found.texts()) == {"labels", "labels.first"}


def test_top_k() -> None:
    found = OutputStatistics(
        {"labels": ONE_LABEL, "scores": ValueType(shape=(2,)), "text": TEXT, "score": ValueType(shape=(1, 1))}
    )
    for number in (1, 3):
        pair = np.array([number, -number], np.float32)
        found.add({"labels": ["a"], "scores": pair, "text": "b", "score": pair[None, :1]})
    assert found.texts() == {"labels": {"a": 2}, "text": {"b": 2}}
    assert {name: one["mean"] for name, one in found.numbers().items()} == {"scores[0]": 2, "scores[1]": -2, "score": 2}


def test_the_others_are_left_out_and_named() -> None:
    kinds = {"embedding": ValueType(shape=(512,)), "picture": FILE, "crops": ValueType(shape=(-1, -1, 3), many=True)}
    found = OutputStatistics({**kinds, "maybe": ValueType(shape=())})
    found.add({"embedding": np.zeros(512), "picture": b"png", "crops": [np.zeros((2, 2, 3))]})
    assert set(found.left_out) == {"embedding", "picture"}
    assert list(found.numbers()) == ["crops.length"]


def test_one_text_or_number() -> None:
    single = [TEXT, ONE_LABEL, ValueType(), ValueType(shape=(1, 1))]
    assert [is_single(kind) for kind in (*single, LABELS, FILE, ValueType(shape=(-1,)))] == [True] * 4 + [False] * 3
