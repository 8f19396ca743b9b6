"""Models of a single node, computed by ONNX Runtime and by torch: the oracle of every trainable operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.offline.compress.training.torch import torch
from penstock.offline.compress.training.trainable import TrainableModel


class Const:
    """An operand that is an initialiser."""

    def __init__(self, values: Any, dtype: Any = np.int64) -> None:
        self.array = np.asarray(values, dtype)


Operand = np.ndarray | Const | None


def floats(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def one_node(
    op_type: str, operands: tuple[Operand, ...], kinds: list[int], opset: int, domain: str = "", **attributes: Any
) -> bytes:
    names = ["" if operand is None else f"x{i}" for i, operand in enumerate(operands)]
    while names and not names[-1]:
        names.pop()
    results = [f"y{i}" for i in range(len(kinds))]
    node = helper.make_node(op_type, names, results, domain=domain, **attributes)
    inputs, weights = [], []
    for name, operand in zip(names, operands, strict=False):
        if isinstance(operand, Const):
            weights.append(numpy_helper.from_array(operand.array, name))
        elif operand is not None:
            inputs.append(
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(operand.dtype), operand.shape)
            )
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(results, kinds, strict=True)]
    graph = helper.make_graph([node], "one", inputs, outputs, weights)
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model: bytes = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    return model


def run_ort(model: bytes, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, dict(feeds))
    return found


def agree(
    op_type: str,
    *operands: Operand,
    opset: int = 18,
    kinds: tuple[int, ...] = (TensorProto.FLOAT,),
    domain: str = "",
    tolerance: float = 1e-5,
    **attributes: Any,
) -> None:
    """Assert that both give the same shapes, and the same values to ``tolerance`` of the largest; integers exactly."""
    model = one_node(op_type, operands, list(kinds), opset, domain, **attributes)
    feeds = {f"x{i}": operand for i, operand in enumerate(operands) if isinstance(operand, np.ndarray)}
    theirs = run_ort(model, feeds)
    model = with_shapes(model, theirs)
    with torch.no_grad():
        ours = TrainableModel(Artifact.from_bytes(model))(
            {name: torch.from_numpy(array) for name, array in feeds.items()}
        )
    for got, want in zip(ours.values(), theirs, strict=True):
        array = got.numpy()
        assert array.shape == want.shape
        assert array.dtype == want.dtype
        if want.dtype.kind == "f":
            magnitude = np.abs(want[np.isfinite(want)]).max(initial=0.0)
            np.testing.assert_allclose(array, want, rtol=0, atol=tolerance * max(magnitude, 1e-6))
        else:
            np.testing.assert_array_equal(array, want)


def with_shapes(model: bytes, results: list[np.ndarray]) -> bytes:
    """The checker wants shapes of outputs, which only a run tells."""
    proto = onnx.load_model_from_string(model)
    for value, result in zip(proto.graph.output, results, strict=True):
        value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, result.shape))
    return bytes(proto.SerializeToString())
