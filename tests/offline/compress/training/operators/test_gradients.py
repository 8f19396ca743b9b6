"""Every family of operators has correct gradients for all differentiable inputs, checked by finite differences in FP64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from one_node import Const, Operand, floats, one_node, run_ort, with_shapes
from penstock.artifact import Artifact
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel

_X, _PLANES = floats(2, 3, 4), floats(1, 2, 5, 4)
_ONES = [Const(floats(2, seed=seed, low=0.5), np.float32) for seed in (1, 2, 3, 4)]

_CASES: list[tuple[str, tuple[Operand, ...], int, dict[str, Any]]] = [
    ("Add", (_X, floats(4, seed=1)), 18, {}),
    ("Div", (_X, floats(3, 1, seed=1, low=0.5)), 18, {}),
    ("Pow", (floats(3, low=0.5), Const(1.5, np.float32)), 18, {}),
    ("Erf", (_X,), 18, {}),
    ("Where", (np.array([True, False, True, False]), _X, floats(4, seed=1)), 18, {}),
    ("Max", (_X, floats(4, seed=1)), 18, {}),
    ("Clip", (_X, Const(-0.5, np.float32), Const(0.7, np.float32)), 18, {}),
    ("Gelu", (_X,), 20, {}),
    ("HardSwish", (3 * _X,), 18, {}),
    ("Softmax", (_X,), 11, {"axis": 1}),
    ("LogSoftmax", (_X,), 18, {}),
    ("PRelu", (_X, floats(3, 1, seed=1)), 18, {}),
    ("Conv", (_PLANES, floats(4, 1, 3, 2, seed=1), floats(4, seed=2)), 18, {"group": 2, "auto_pad": "SAME_LOWER"}),
    ("ConvTranspose", (_PLANES, floats(2, 2, 3, 2), floats(2)), 18, {"strides": [2, 2], "pads": [1, 0, 0, 1]}),
    ("Gemm", (floats(4, 3), floats(4, 2, seed=1), floats(2)), 18, {"transA": 1, "alpha": 0.5, "beta": 2.0}),
    ("MatMul", (_X, floats(4, 2, seed=1)), 18, {}),
    ("Einsum", (_X, floats(2, 4, 3, seed=1)), 18, {"equation": "bij,bjk->bik"}),
    ("BatchNormalization", (_PLANES, *_ONES), 15, {}),
    ("LayerNormalization", (_X, floats(4), floats(4)), 18, {}),
    ("InstanceNormalization", (_PLANES, *_ONES[:2]), 18, {}),
    ("GroupNormalization", (_PLANES, *_ONES[:2]), 21, {"num_groups": 1}),
    ("MaxPool", (_PLANES,), 18, {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", (_PLANES,), 19, {"kernel_shape": [3, 2], "pads": [1, 1, 0, 0], "dilations": [1, 2]}),
    ("GlobalAveragePool", (_PLANES,), 18, {}),
    ("ReduceMean", (_X,), 17, {"axes": [1]}),
    ("ReduceL2", (_X,), 17, {"axes": [-1]}),
    ("ReduceProd", (floats(3, low=0.5),), 17, {}),
    ("Reshape", (_X, Const([0, -1])), 18, {}),
    ("Slice", (_X, Const([3]), Const([0]), Const([2]), Const([-2])), 18, {}),
    ("Pad", (_X, Const([0, 1, 2, 0, 2, 3])), 18, {"mode": "reflect"}),
    ("Expand", (floats(3, 1), Const([2, 1, 4])), 18, {}),
    ("DepthToSpace", (floats(1, 4, 2, 2),), 18, {"blocksize": 2}),
    ("Resize", (_PLANES, None, Const([1, 1, 1.7, 0.6], np.float32)), 18, {"mode": "linear"}),
    ("Gather", (_X, Const([1, -1, 1])), 18, {"axis": 2}),
    ("GatherND", (_X, Const([[0, 1], [1, -1]])), 18, {}),
    ("ScatterND", (_X, Const([[0, 1], [1, -1]]), floats(2, 4, seed=1)), 18, {}),
    ("CumSum", (_X, Const(1)), 18, {"reverse": 1}),
    ("LRN", (_PLANES,), 18, {"size": 3}),
]


@pytest.mark.parametrize(("op_type", "operands", "opset", "attributes"), _CASES, ids=[case[0] for case in _CASES])
def test_gradient(op_type: str, operands: tuple[Operand, ...], opset: int, attributes: dict[str, Any]) -> None:
    proto = one_node(op_type, operands, [TensorProto.FLOAT], opset, **attributes)
    numpy_feeds = {f"x{i}": x for i, x in enumerate(operands) if isinstance(x, np.ndarray)}
    feeds = {name: torch.from_numpy(x) for name, x in numpy_feeds.items()}
    names = [name for name, x in feeds.items() if x.is_floating_point()]
    model = TrainableModel(Artifact.from_bytes(with_shapes(proto, run_ort(proto, numpy_feeds)))).double()

    def outputs(*tensors: Any) -> Any:
        return model(feeds | dict(zip(names, tensors, strict=True)))["y0"]

    assert torch.autograd.gradcheck(outputs, tuple(feeds[name].double().requires_grad_() for name in names))


@pytest.mark.parametrize("op_type", ["LpNormalization", "LpPool", "ReduceL2"])
def test_a_norm_of_zeros_lets_no_nan_through(op_type: str) -> None:
    attributes = {"kernel_shape": [2, 2]} if op_type == "LpPool" else {}
    zeros = torch.zeros(1, 2, 4, 4, requires_grad=True)
    results = {"ReduceL2": (1, 1, 1, 1), "LpPool": (1, 2, 3, 3), "LpNormalization": (1, 2, 4, 4)}
    proto = one_node(op_type, (zeros.detach().numpy(),), [TensorProto.FLOAT], 17, **attributes)
    model = TrainableModel(Artifact.from_bytes(with_shapes(proto, [np.zeros(results[op_type], np.float32)])))
    model({"x0": zeros})["y0"].sum().backward()
    assert torch.isfinite(zeros.grad).all()
