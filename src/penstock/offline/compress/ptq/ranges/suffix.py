"""What follows a tensor in a float model, as a model of its own in which the tensor is rounded, with any scale::

    value ── QuantizeLinear(scale, zero) ── DequantizeLinear ── t ── all that t leads to ── outputs

To try a range, only this needs to run: what comes before the tensor, and beside it, stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx
from onnx import helper

from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.offline.compress.ptq.qdq_placement import FloatModel, reads
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import Array, DataType, Signature

_VALUE, _SCALE, _ZERO = "penstock_value", "penstock_scale", "penstock_zero"


class Suffix:
    """All nodes of ``model`` that ``tensor`` leads to."""

    def __init__(self, model: FloatModel, tensor: str) -> None:
        self.tensor, self._model = tensor, model
        reached, chosen = {tensor}, set[str]()
        for node in model.nodes:
            if not reached.isdisjoint(reads(node)):
                chosen.add(node.name)
                reached.update(filter(None, node.output))
        self.outputs = [name for name in model.output_names if name in reached]
        self.beside: list[str] = []
        """Other tensors that these nodes read, in the order of the graph."""
        for node in reversed(model.nodes):
            if node.name in chosen:
                for name in sorted(reads(node) - reached - model.weights.keys()):
                    if name in model.values:
                        self.beside.append(name)
                    elif name in model.producers:  # of a type that an input must tell: computed here as well
                        chosen.add(model.producers[name].name)
        self._nodes = [node for node in model.nodes if node.name in chosen]
        computed = {name for node in self._nodes for name in node.output}
        self.beside = [name for name in dict.fromkeys(reversed(self.beside)) if name not in computed]

    def artifact(self, scheme: IntegerScheme) -> Artifact:
        """The model: what ``tensor`` holds, its scale and zero point, and ``beside`` in, ``outputs`` out."""
        value = onnx.ValueInfoProto(name=_VALUE, type=self._model.values[self.tensor].type)
        inputs = [
            value,
            helper.make_tensor_value_info(_SCALE, DataType.FP32.onnx, []),
            helper.make_tensor_value_info(_ZERO, scheme.activation.onnx, []),
            *(self._model.values[name] for name in self.beside),
        ]
        rounding = [
            helper.make_node("QuantizeLinear", [_VALUE, _SCALE, _ZERO], ["penstock_integer"]),
            helper.make_node("DequantizeLinear", ["penstock_integer", _SCALE, _ZERO], [self.tensor]),
        ]
        needed = set[str]().union(*map(reads, self._nodes))
        whole = self._model.proto
        proto = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, functions=whole.functions)
        proto.graph.name = "suffix"
        proto.graph.input.extend(inputs)
        proto.graph.node.extend([*rounding, *self._nodes])
        proto.graph.output.extend(value for value in whole.graph.output if value.name in self.outputs)
        proto.graph.initializer.extend(tensor for tensor in whole.graph.initializer if tensor.name in needed)
        return Artifact.from_bytes(proto.SerializeToString())


class RoundedModel(LoadedModel):
    """A model to those who know its own inputs only, in which one tensor is rounded; ``range`` says how.

    It answers for ``batches`` one after the other, again and again: what a suffix reads in each.
    """

    def __init__(
        self,
        suffix: Suffix,
        loaded: LoadedModel,
        whole: Signature,
        batches: Sequence[Mapping[str, Array]],
        scheme: IntegerScheme,
    ) -> None:
        outputs = tuple(spec for spec in whole.outputs if spec.name in suffix.outputs)
        self.signature = msgspec.structs.replace(whole, outputs=outputs)
        self.range = Range(0.0, 0.0)
        self._loaded, self._scheme, self._at = loaded, scheme, 0
        self._batches = [
            {_VALUE: batch[suffix.tensor], **{name: batch[name] for name in suffix.beside}} for batch in batches
        ]

    def forward(self, _inputs: Mapping[str, Array]) -> dict[str, Array]:
        scale, zero = self._scheme.parameters(np.array(self.range.low), np.array(self.range.high))
        fed = self._batches[self._at]
        self._at = (self._at + 1) % len(self._batches)
        rounding = {_SCALE: np.asarray(scale, np.float32), _ZERO: np.asarray(zero, self._scheme.activation.dtype)}
        return self._loaded.forward({**fed, **rounding})

    def unload(self) -> None:
        self._loaded.unload()
