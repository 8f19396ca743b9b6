"""Models for the tests of graph optimisation, written as ONNX text, and passes run on them with verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import onnx.parser
import pytest

from penstock.artifact import Artifact
from penstock.offline.optimize.base import OptimizeReport, Pass
from penstock.offline.optimize.optimizer import optimize


class Outcome(NamedTuple):
    """The result of one pass on a model, verified in ONNX Runtime."""

    status: str
    ops: list[str]
    graph: onnx.GraphProto
    artifact: Artifact
    report: OptimizeReport

    @property
    def constants(self) -> dict[str, np.ndarray]:
        return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in self.graph.initializer}

    def node(self, op_type: str) -> onnx.NodeProto:
        (node,) = [node for node in self.graph.node if node.op_type == op_type]
        return node


@pytest.fixture
def parse() -> Callable[..., Artifact]:
    """``parse(text, opset=17, **weights)``: the model of a graph in ONNX's text form, with weights by name."""

    def make(text: str, opset: int = 17, **weights: np.ndarray) -> Artifact:
        imports = f'"" : {opset}, "custom" : 1'
        model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\n{text}")
        model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
        return Artifact.from_bytes(model.SerializeToString())

    return make


@pytest.fixture
def apply() -> Callable[[Pass, Artifact], Outcome]:
    """``apply(pass, artifact)``: run one pass through the optimiser, which verifies the change."""

    def run(current: Pass, artifact: Artifact) -> Outcome:
        result, report = optimize(artifact, passes=[current])
        graph = onnx.load_model_from_string(result.data).graph
        assert not report.reverted, report.reverted
        return Outcome(report.passes[0].status, [node.op_type for node in graph.node], graph, result, report)

    return run


@pytest.fixture
def weights() -> Callable[..., np.ndarray]:
    """``weights(2, 3)``: seeded FP32 numbers of that shape, positive and away from zero."""
    rng = np.random.default_rng(7)

    def make(*shape: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)

    return make
