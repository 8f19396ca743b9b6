from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, agree, floats

_CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"pads": [1, 1, 1, 1]},
    {"pads": [0, 1, 2, 0]},
    {"strides": [2, 1]},
    {"dilations": [2, 1], "pads": [2, 1, 2, 1]},
    {"auto_pad": "VALID"},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
]


def _weight(*shape: int, seed: int = 1) -> Const:
    return Const(floats(*shape, seed=seed), np.float32)


@pytest.mark.parametrize("attributes", _CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_conv(attributes: dict[str, Any], groups: int) -> None:
    agree("Conv", floats(2, 4, 8, 7), _weight(8, 4 // groups, 3, 2), _weight(8, seed=2), group=groups, **attributes)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_conv_over_other_ranks(rank: int, bias: bool) -> None:
    x, pads = floats(2, 3, *[6] * rank), [0] * rank + [1] * rank
    agree("Conv", x, _weight(4, 3, *[3] * rank), _weight(4, seed=2) if bias else None, pads=pads)
    agree("ConvTranspose", x, _weight(3, 4, *[3] * rank), _weight(4, seed=2) if bias else None, pads=pads)


_TRANSPOSED: list[dict[str, Any]] = [
    {},
    {"pads": [1, 0, 1, 1]},
    {"strides": [2, 3], "pads": [0, 1, 2, 0]},
    {"strides": [2, 2], "output_padding": [1, 1]},
    {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 0]},
    {"dilations": [2, 1]},
    {"strides": [2, 2], "output_shape": [11, 10]},
    {"strides": [2, 2], "output_shape": [10, 11], "auto_pad": "SAME_UPPER"},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"strides": [2, 2], "auto_pad": "VALID"},
]


@pytest.mark.parametrize("attributes", _TRANSPOSED, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose(attributes: dict[str, Any], groups: int) -> None:
    x, weight, bias = floats(2, 4, 5, 5), _weight(4, 6 // groups, 3, 3), _weight(6, seed=2)
    agree("ConvTranspose", x, weight, bias, group=groups, **attributes)


@pytest.mark.parametrize(("left", "right"), list(product([0, 1], [0, 1])))
@pytest.mark.parametrize("bias", [None, (5,), (3, 1), (3, 5), (1,), ()], ids=str)
def test_gemm(left: int, right: int, bias: tuple[int, ...] | None) -> None:
    a, b = floats(4, 3) if left else floats(3, 4), _weight(*((5, 4) if right else (4, 5)))
    c = None if bias is None else _weight(*bias, seed=2)
    agree("Gemm", a, b, c, transA=left, transB=right)
    agree("Gemm", a, b, c, transA=left, transB=right, alpha=0.5, beta=2.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,))],
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    agree("MatMul", floats(*a), _weight(*b))


def test_matmul_of_integers() -> None:
    agree("MatMul", np.array([[1, 2], [3, -4]], np.int64), np.array([[5], [6]], np.int64), kinds=(TensorProto.INT64,))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("bthd,bshd->bhts", [(2, 3, 2, 4), (2, 5, 2, 4)]),
        ("ij->ji", [(3, 4)]),
        ("ij->", [(3, 4)]),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]]) -> None:
    agree("Einsum", *[floats(*shape, seed=i) for i, shape in enumerate(shapes)], equation=equation)
