"""A quantised model whose ranges can be changed without writing or loading it again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import helper

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.judge.accuracy import answers
from penstock.offline.judge.metrics import Outputs
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import Overridden, loaded
from penstock.tensor import Array


class RangeProbe:
    """The model ``quantised``, a result of ``quantize``, with the activations' scales and zero points as optional inputs.

    Between two roundings, the probe computes in FP32, as the graph specifies. Integer kernels differ by a few rounding steps.
    """

    def __init__(self, quantised: Artifact, scheme: IntegerScheme) -> None:
        proto = read_proto(quantised)
        constants = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._scheme = scheme
        self._parameters: dict[str, str] = {}
        """The names of the zero points by the names of the scales."""
        self._scales: dict[str, str] = {}
        """The name of each tensor's scale, by the name of the tensor."""
        for node in proto.graph.node:
            # If tensors share a scale, the first tensor in the graph owns it.
            if node.op_type == "QuantizeLinear" and node.input[1] not in self._parameters:
                self._parameters[node.input[1]] = node.input[2]
                # ``quantize`` names the node after the tensor.
                self._scales[node.name.removesuffix(f"_{node.op_type}")] = node.input[1]
        proto.graph.input.extend(
            helper.make_tensor_value_info(name, constants[name].data_type, constants[name].dims)
            for pair in self._parameters.items()
            for name in pair
        )
        self._artifact = artifact_of(proto)

    def answers(self, ranges: Mapping[str, Range], data: Dataset, threads: int, batch_size: int) -> Outputs:
        """The outputs on ``data`` with activations quantised to ``ranges``."""
        values: dict[str, Array] = {}
        for name in self._scales.keys() & ranges.keys():
            scale, zero = self._scheme.parameters(np.array(ranges[name].low), np.array(ranges[name].high))
            scale_name = self._scales[name]
            values[scale_name] = np.asarray(scale, np.float32)
            values[self._parameters[scale_name]] = np.asarray(zero, self._scheme.activation.dtype)
        with loaded(self._artifact, threads, as_written=True) as model:
            return answers(Overridden(model, values), data, batch_size)
