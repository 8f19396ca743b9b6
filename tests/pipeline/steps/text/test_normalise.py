"""Normalisation of text."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.text.normalise import NormaliseText
from penstock.pipeline.value import TEXT, ValueType

FORMS = ("none", "NFC", "NFD", "NFKC", "NFKD")
STEPS = [
    NormaliseText(form=form, strip_accents=accents, lower=lower, whitespace=spaces)  # type: ignore[arg-type]
    for form, accents, lower, spaces in itertools.product(FORMS, *[(False, True)] * 3)
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from("aÀÅ\u030a\u0327İiΣςﬁ㎏™ \u00a0\n"))


@given(TEXTS, st.sampled_from(STEPS))
def test_normalising_twice_changes_nothing(text: str, step: NormaliseText) -> None:
    once = step.run({"value": text})
    assert step.run(once) == once
    if step.form != "none":
        assert unicodedata.is_normalized(step.form, once["value"])


@given(TEXTS.filter(lambda text: all(unicodedata.category(each) != "Cn" for each in text)))
def test_it_agrees_with_the_normalisers_of_tokenizers(text: str) -> None:
    for form, theirs in (("NFC", normalizers.NFC()), ("NFKD", normalizers.NFKD())):
        step = NormaliseText(form=form)  # type: ignore[arg-type]
        assert step.run({"value": text})["value"] == theirs.normalize_str(text)


@pytest.mark.parametrize(
    ("step", "text", "expected"),
    [
        (NormaliseText(), "A\u030a", "Å"),
        (NormaliseText(strip_accents=True, lower=True), "Ünïcode İ", "unicode i"),
        (NormaliseText(form="NFKC", lower=True), "ＦＵＬＬ™ ㎏", "fulltm kg"),
        (NormaliseText(whitespace=True), " a\t\n b\u00a0 ", "a b"),
        (NormaliseText(), "", ""),
    ],
)
def test_examples(step: NormaliseText, text: str, expected: str) -> None:
    assert step.run({"value": text}) == {"value": expected}


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="has 3 bytes, the limit is 2"):
        NormaliseText(max_bytes=2).run({"value": "aé"})
    with pytest.raises(InvalidInput, match="unpaired surrogate"):
        NormaliseText().run({"value": "\udc00"})
    assert NormaliseText().check({"value": TEXT}) == {"value": TEXT}
    with pytest.raises(InvalidConfig, match="needs a text"):
        NormaliseText().check({"value": ValueType(shape=(3,))})
