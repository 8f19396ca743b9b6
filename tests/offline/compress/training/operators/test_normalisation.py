from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, agree, floats

_X = floats(2, 6, 4, 5)


def _weight(*shape: int, seed: int = 1, low: float = -2.0) -> Const:
    return Const(floats(*shape, seed=seed, low=low), np.float32)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("opset", [9, 14, 15])
def test_batch_normalization(shape: tuple[int, ...], opset: int) -> None:
    agree(
        "BatchNormalization",
        floats(*shape),
        *[_weight(3, seed=seed) for seed in (1, 2, 3)],
        _weight(3, seed=4, low=0.1),
        epsilon=1e-3,
        opset=opset,
    )


@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_normalization(axis: int, bias: bool) -> None:
    shape = _X.shape[axis:]
    agree("LayerNormalization", _X, _weight(*shape), _weight(*shape, seed=2) if bias else None, axis=axis, epsilon=1e-3)


def test_layer_normalization_with_its_statistics() -> None:
    agree("LayerNormalization", _X, _weight(4, 5), axis=2, kinds=(TensorProto.FLOAT,) * 3)


def test_layer_normalization_with_one_scale() -> None:
    agree("LayerNormalization", _X, _weight(1, 5), _weight(5, seed=2), axis=-2)


@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 3, 7), (2, 3, 4, 5)], ids=str)
def test_instance_normalization(shape: tuple[int, ...]) -> None:
    agree("InstanceNormalization", floats(*shape), _weight(3), _weight(3, seed=2), epsilon=1e-3)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_group_normalization(groups: int) -> None:
    agree("GroupNormalization", _X, _weight(6), _weight(6, seed=2), num_groups=groups, epsilon=1e-3, opset=21)


@pytest.mark.parametrize("axis", [-1, 2])
def test_rms_normalization(axis: int) -> None:
    agree("RMSNormalization", _X, _weight(*_X.shape[axis:]), axis=axis, epsilon=1e-3, opset=23)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_lp_normalization(p: int, axis: int) -> None:
    agree("LpNormalization", _X, p=p, axis=axis)
    agree("LpNormalization", np.zeros_like(_X), p=p, axis=axis)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_local_response_normalization(size: int) -> None:
    agree("LRN", _X, size=size, alpha=0.1, beta=0.6, bias=1.5)
