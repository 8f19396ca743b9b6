"""Fold BatchNormalization into the preceding Conv, ConvTranspose or Gemm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from penstock.offline.optimize import graph
from penstock.offline.optimize.base import NodePass
from penstock.offline.optimize.linear import read_linear


class ConvBatchNorm(NodePass):
    """``gamma (y - mean) / sqrt(variance + epsilon) + beta`` becomes part of the weight and bias of the node that computes ``y``.

    Folded (Jacob et al. 2018, §3.2):

    1. BatchNormalization after a Conv, ConvTranspose (grouped or not) or Gemm whose weight and bias are constants. Weights that other
       nodes share are copied first.

    Not folded:

    2. ``y`` if another node, a subgraph or the model's caller also reads it.
    3. BatchNormalization in training mode, with a second output in use, or with ``spatial`` = 0 (per activation). Also before opset 7,
       which has no attribute for the training mode.
    4. Parameters that are not constant, that are not one per channel, or that give a weight that is not finite.
    """

    name = "conv_batch_norm"

    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        return node.op_type == "BatchNormalization" and _is_inference(node, graph.opset(model)) and _fold(node)


def _is_inference(node: ir.Node, opset: int) -> bool:
    # Rule 3
    return (
        opset >= 7
        and graph.int_attribute(node, "training_mode", 0) == 0
        and graph.int_attribute(node, "spatial", 1) == 1
        and not any(graph.is_used(output) for output in node.outputs[1:])
    )


def _fold(node: ir.Node) -> bool:
    source = node.inputs[0]
    linear = read_linear(source.producer()) if source is not None else None
    if linear is None or source is None or graph.sole_consumer(source) is not node:
        return False  # Rules 1, 2
    found = [array.astype(np.float64) for value in node.inputs[1:5] if (array := graph.constant(value)) is not None]
    if len(found) != 4 or any(array.shape != (linear.channels,) for array in found):
        return False  # Rule 4
    gamma, beta, mean, variance = found
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = gamma / np.sqrt(variance + graph.float_attribute(node, "epsilon", 1e-5))
    if not np.isfinite(scale).all():
        return False  # Rule 4
    return linear.fold(node, scale, beta - mean * scale)  # Rule 1
