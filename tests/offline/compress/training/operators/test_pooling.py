from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from one_node import agree, floats

_WINDOWS: list[dict[str, Any]] = [
    {},
    {"strides": [2, 2]},
    {"strides": [2, 3], "pads": [1, 0, 1, 1]},
    {"strides": [2, 2], "pads": [0, 0, 1, 1]},
    {"strides": [3, 3], "pads": [1, 1, 1, 1]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    {"auto_pad": "VALID", "strides": [2, 2]},
]


@pytest.mark.parametrize("attributes", _WINDOWS, ids=str)
@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("size", [7, 8])
def test_max_pool(attributes: dict[str, Any], ceil_mode: int, size: int) -> None:
    agree("MaxPool", floats(2, 3, size, 9), kernel_shape=[3, 2], ceil_mode=ceil_mode, opset=22, **attributes)


@pytest.mark.parametrize("dilations", [[2, 1], [2, 3]])
def test_max_pool_with_gaps(dilations: list[int]) -> None:
    agree("MaxPool", floats(2, 3, 9, 9), kernel_shape=[3, 2], dilations=dilations, pads=[1, 0, 1, 1])


@pytest.mark.parametrize("attributes", _WINDOWS, ids=str)
@pytest.mark.parametrize(("ceil_mode", "padding"), list(product([0, 1], [0, 1])))
@pytest.mark.parametrize("size", [7, 8])
def test_average_pool(attributes: dict[str, Any], ceil_mode: int, padding: int, size: int) -> None:
    agree(
        "AveragePool",
        floats(2, 3, size, 9),
        kernel_shape=[3, 2],
        ceil_mode=ceil_mode,
        count_include_pad=padding,
        opset=22,
        **attributes,
    )


def test_average_pool_with_gaps() -> None:
    agree("AveragePool", floats(2, 3, 9, 9), kernel_shape=[3, 2], dilations=[2, 3], pads=[1, 0, 1, 1], opset=19)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(p: int) -> None:
    agree("LpPool", floats(2, 3, 8, 9), kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1], p=p)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("rank", [1, 3])
def test_pools_over_other_ranks(op_type: str, rank: int) -> None:
    agree(op_type, floats(2, 3, *[6] * rank), kernel_shape=[2] * rank, strides=[2] * rank, pads=[1] * 2 * rank)


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_global_pools(op_type: str, rank: int) -> None:
    agree(op_type, floats(2, 3, *[4] * rank))
