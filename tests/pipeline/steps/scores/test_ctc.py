"""CTC decoding against its definition."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.steps.scores.ctc import CtcDecode
from penstock.pipeline.value import TEXT, ValueType
from penstock.tensor import Array

AB = ("a", "b")


def collapsed(path: tuple[int, ...], blank: int) -> str:
    """The text of an alignment."""
    return "".join("ab"[index - (index > blank)] for index, _ in itertools.groupby(path) if index != blank)


def probabilities(steps: int, seed: int) -> Array:
    """Random probabilities of three classes."""
    powers = np.exp(np.random.default_rng(seed).normal(size=(steps, 3)) * 2).astype(np.float32)
    found: Array = powers / powers.sum(1, keepdims=True)
    return found


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 999), st.sampled_from([0, 1, 2, -1]))
def test_both_ways_equal_all_alignments(steps: int, seed: int, blank: int) -> None:
    scores = probabilities(steps, seed)
    totals: dict[str, float] = defaultdict(float)
    for path in itertools.product(range(3), repeat=steps):
        totals[collapsed(path, blank % 3)] += float(np.prod([scores[step, index] for step, index in enumerate(path)]))
    found = CtcDecode(labels=AB, blank=blank, beam=1000).run({"value": scores})
    best = max(totals.values())
    assert totals[found["text"]] == pytest.approx(best, rel=1e-3)
    assert float(found["score"]) == pytest.approx(best, rel=1e-3)
    greedy = CtcDecode(labels=AB, blank=blank).run({"value": scores})
    assert greedy["text"] == collapsed(tuple(scores.argmax(1)), blank % 3)


def test_repeats_are_merged_and_blanks_part_them() -> None:
    scores = np.eye(3, dtype=np.float32)[[1, 1, 0, 1, 2, 0, 0]] * 0.8
    found = CtcDecode(labels=AB).run({"value": scores})
    assert found["text"] == "aab"
    assert float(found["score"]) == pytest.approx(0.8)
    assert CtcDecode(labels=AB).run({"value": scores[:0]}) == {"text": "", "score": 0}
    assert CtcDecode(labels=AB, softmax=True).run({"value": scores * 1e4})["text"] == "aab"


def test_wrong_values() -> None:
    step = CtcDecode(labels="letters").bound(StepResources(labels={"letters": AB}))
    assert step.check({"value": ValueType(shape=(-1, 3))})["text"] == TEXT
    with pytest.raises(InvalidConfig, match="2 labels and a blank, but there are 4 classes"):
        step.check({"value": ValueType(shape=(-1, 4))})
    with pytest.raises(InvalidConfig, match="needs probabilities"):
        step.check({"value": ValueType(shape=(4,))})
    with pytest.raises(InvalidInput, match=r"not \[time, 3\]"):
        step.run({"value": np.zeros((5, 4), np.float32)})
    with pytest.raises(InvalidInput, match="NaN"):
        step.run({"value": np.full((5, 3), np.nan, np.float32)})
    with pytest.raises(InvalidInput, match="NaN"):
        CtcDecode(labels=AB, softmax=True).run({"value": np.full((5, 3), np.inf, np.float32)})
    with pytest.raises(InvalidInput, match="'value' contains -1, which is no probability.*softmax: true"):
        step.run({"value": np.full((5, 3), -1, np.float32)})
    with pytest.raises(InvalidConfig, match="no labels 'x'"):
        CtcDecode(labels="x").bound(StepResources())
