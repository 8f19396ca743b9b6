"""Damaged texts of LightGBM models are refused before LightGBM reads them, and whole ones are not."""

import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.offline.convert.tables.lightgbm_text import check, parts


def _text(categories: bool) -> str:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 3))
    x[:, 2] = rng.integers(0, 5, 200)
    data = lightgbm.Dataset(x, x[:, 0] + (x[:, 2] == 1), categorical_feature=[2] if categories else [])
    trained: str = lightgbm.train({"verbose": -1, "num_leaves": 5}, data, 3).model_to_string()
    return trained


_TEXTS = {categories: _text(categories) for categories in (False, True)}


@pytest.mark.parametrize("categories", [False, True])
def test_a_whole_model_is_accepted(categories: bool) -> None:
    check(_TEXTS[categories])
    assert len(parts(_TEXTS[categories])) == 4  # the header and three trees


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["threshold", "left_child", "leaf_value", "split_feature"]), st.booleans())
def test_a_lost_number_is_found(key: str, categories: bool) -> None:
    lines = _TEXTS[categories].split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{key}="))
    lines[at] = lines[at].rpartition(" ")[0]
    with pytest.raises(ValueError, match="tree"):
        check("\n".join(lines))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, len(_TEXTS[False].partition("\nend of trees")[0])))
def test_a_truncated_model_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"truncated|header"):
        check(_TEXTS[False][:length])
