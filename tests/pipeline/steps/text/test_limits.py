"""Limits of texts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.text.limits import check_is_text, checked
from penstock.pipeline.value import FILE, TEXT


@given(st.text(), st.integers(0, 40))
def test_the_limit_counts_bytes_of_utf8(text: str, limit: int) -> None:
    if len(text.encode()) <= limit:
        assert checked(text, limit) == text
        return
    with pytest.raises(InvalidInput, match=f"the text has {len(text.encode())} bytes, the limit is {limit}"):
        checked(text, limit)


def test_a_surrogate_is_no_text() -> None:
    with pytest.raises(InvalidInput, match="an unpaired surrogate at character 2"):
        checked("ab\ud800", 100)


def test_only_one_text_is_a_text() -> None:
    check_is_text("tokenise", "text", {"text": TEXT})
    for other in (FILE, msgspec.structs.replace(TEXT, many=True)):
        with pytest.raises(InvalidConfig, match="step 'tokenise' needs a text as 'text'"):
            check_is_text("tokenise", "text", {"text": other})
