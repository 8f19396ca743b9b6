import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.online.scheduler.batch import merge, split


def request(rows: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((rows, 3)), "ids": random.integers(0, 9, (rows,))}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_split_undoes_merge(rows: list[int]) -> None:
    requests = [request(count, seed) for seed, count in enumerate(rows)]
    for given_back, sent in zip(split(merge(requests), rows), requests, strict=True):
        for name in sent:
            np.testing.assert_array_equal(given_back[name], sent[name])


def test_a_single_request_is_not_copied() -> None:
    inputs = request(2, 0)
    assert merge([inputs])["x"] is inputs["x"]


@pytest.mark.parametrize("shape", [(3, 2), (), (5,)])
def test_outputs_that_do_not_follow_the_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PenstockError, match="output 'y' has shape"):
        split({"y": np.zeros(shape)}, [1, 1])
