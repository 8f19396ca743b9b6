from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from penstock.errors import InvalidData
from penstock.offline.judge.scoring.texts import cer, distance, perplexity, wer

WORDS = st.text(alphabet="abc", max_size=8)


def test_perplexity_is_the_exponential_of_the_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    scores, tokens = rng.normal(0, 3, (4, 6, 11)), rng.integers(0, 11, (4, 6))
    logs = special.log_softmax(scores, axis=-1)
    want = np.exp(-np.take_along_axis(logs, tokens[..., None], -1).mean())
    assert perplexity(scores, tokens) == pytest.approx(want)
    assert perplexity(np.zeros((4, 6, 11)), tokens) == pytest.approx(11)
    tokens[:, 3:] = -100
    want = np.exp(-np.take_along_axis(logs, tokens[..., None].clip(0), -1)[:, :3].mean())
    assert perplexity(scores, tokens) == pytest.approx(want)
    with pytest.raises(InvalidData, match="no position has a label"):
        perplexity(scores, np.full((4, 6), -1))


def test_rates_by_hand() -> None:
    truth, output = np.array(["the cat sat", "a dog"]), np.array([b"the cat", b"a big dog"], object)
    assert wer(output, truth) == pytest.approx(2 / 5)
    assert cer(output, truth) == pytest.approx(8 / 16)
    assert wer(np.array([[1, 2, -1], [5, 6, 7]]), np.array([[1, 2, 3], [5, 6, 7]])) == pytest.approx(1 / 6)


def edits(a: str, b: str) -> int:
    """The distance by its definition."""
    row = list(range(len(b) + 1))
    for i, one in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (one != other))
    return row[-1]


@given(st.text(alphabet="abc", max_size=100), st.text(alphabet="abc", max_size=100))
def test_the_distance_is_that_of_its_definition(a: str, b: str) -> None:
    assert distance(a, b) == edits(a, b)


class Token:
    """A token that counts comparisons."""

    compared = 0

    def __init__(self, text: str) -> None:
        self.text = text

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return isinstance(other, Token) and self.text == other.text


def test_the_distance_of_long_texts_takes_few_comparisons() -> None:
    Token.compared = 0
    assert distance([Token(one) for one in "abcd" * 100], [Token(one) for one in "abdc" * 100]) == edits(
        "abcd" * 100, "abdc" * 100
    )
    assert Token.compared < 2_000


@given(WORDS, WORDS, WORDS)
def test_the_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c)
    assert abs(len(a) - len(b)) <= distance(a, b) <= max(len(a), len(b))
