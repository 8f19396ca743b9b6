from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offline.compress.training.operators.registry import Node
from penstock.offline.compress.training.operators.windows import Windows, pad, read_windows, share
from penstock.offline.compress.training.torch import torch


def windows(kernel: list[int], sizes: list[int], **attributes: Any) -> Windows:
    return read_windows(Node("Conv", ("x",), ("y",), attributes, 18), kernel, sizes)


def test_defaults_and_given_numbers() -> None:
    assert windows([3, 2], [8, 8]) == Windows([3, 2], [1, 1], [1, 1], [0, 0], [0, 0])
    found = windows([3, 2], [8, 8], strides=[2, 1], dilations=[1, 3], pads=[1, 0, 2, 4])
    assert found == Windows([3, 2], [2, 1], [1, 3], [1, 0], [2, 4])
    assert found.reach == [3, 4]


def test_valid_ignores_pads() -> None:
    found = windows([3], [8], auto_pad="VALID", pads=[1, 1])
    assert (found.begin, found.end) == ([0], [0])


@given(
    size=st.integers(1, 30),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    upper=st.booleans(),
)
def test_same_gives_one_output_for_each_stride(size: int, kernel: int, stride: int, dilation: int, upper: bool) -> None:
    how = "SAME_UPPER" if upper else "SAME_LOWER"
    found = windows([kernel], [size], auto_pad=how, strides=[stride], dilations=[dilation])
    (begin,), (end,), (reach,) = found.begin, found.end, found.reach
    padded = begin + size + end
    if padded >= reach:
        assert (padded - reach) // stride + 1 == -(-size // stride)
    assert (end - begin if upper else begin - end) in (0, 1)


def test_the_odd_element_goes_where_it_is_asked_for() -> None:
    assert share([3, 4], upper=True) == ([1, 2], [2, 2])
    assert share([3, 4], upper=False) == ([2, 2], [1, 2])


def test_padding_and_cropping() -> None:
    x = torch.arange(6.0).reshape(1, 1, 2, 3)
    assert pad(x, [0, 0], [0, 0]) is x
    padded = pad(x, [1, 0], [0, -1], value=9.0)
    assert padded.tolist() == [[[[9, 9], [0, 1], [3, 4]]]]
    assert Windows([1], [1], [1], [2], [0]).pad(x).shape == (1, 1, 2, 5)


@pytest.mark.parametrize("attributes", [{"strides": []}, {"dilations": []}, {"pads": []}], ids=str)
def test_empty_attributes_are_defaults(attributes: dict[str, list[int]]) -> None:
    assert windows([3], [8], **attributes) == windows([3], [8])
