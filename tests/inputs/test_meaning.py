from __future__ import annotations

import pytest

from penstock.inputs.meaning import Meaning, Role


@pytest.mark.parametrize(
    ("meaning", "text"),
    [
        (Meaning(Role.TOKEN_IDS, "index of a table", (0.0,), (29.0,)), "token ids 0 to 29 (index of a table)"),
        (Meaning(Role.IMAGE, "why", (-1.0,), (0.5,), layout="NCHW"), "NCHW image -1 to 0.5 (why)"),
        (Meaning(Role.SAMPLING_RATE, "why", choices=(8000, 16000)), "sampling rate 8000, 16000 (why)"),
        (Meaning(Role.FEATURES, "why", choices=(b"a", b"b", b"c", b"d", b"e")), "features a, b, c, d, … (why)"),
        (Meaning(Role.FEATURES, "why", (1.0, -2.5), (4.0, 3.0)), "features -2.5 to 4 (why)"),
        (Meaning(Role.STATE, "why", partner="hn"), "state, returned as 'hn' (why)"),
        (Meaning(Role.LENGTHS, "why", partner="x"), "lengths of 'x' (why)"),
        (Meaning(Role.FEATURES, "why", (0.0,), (float("inf"),)), "features (why)"),
    ],
)
def test_the_text_has_the_role_the_values_and_the_reason(meaning: Meaning, text: str) -> None:
    assert meaning.text == text
