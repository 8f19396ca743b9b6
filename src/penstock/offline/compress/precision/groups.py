"""Groups of operators that are either all float or all integer, and INT8 models in which some groups stay float.

If a single operator became float, the model would need additional conversions, for example between a convolution and the following
Relu. So operators are grouped by two rules:

1. An operator other than a product with weights joins those producers of its inputs that have no other consumer. If all producers have
   other consumers, the operator joins the last producer. For example, the addition of a residual block joins the block's last
   convolution, not the convolution before the block.
2. The projections whose results are multiplied with each other form one group: query, key and value in attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import onnx

from penstock.artifact import Artifact
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.qdq_placement import (
    LINEAR_OPS,
    FloatModel,
    QdqPlacement,
    float_model,
    nothing_to_quantise,
)
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import Range, TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme

_TRANSPARENT = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Where", "Softmax", "Identity", "Cast", "Dropout", "MatMul"}
    | {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Split", "Slice", "Concat", "Gather"}
)
"""Operators that may stand between a projection and the product that combines it with another projection."""


class OperatorGroup(msgspec.Struct, frozen=True):
    """A group of operators that are either all integer or all float."""

    name: str
    """The first tensor that the group computes."""
    nodes: tuple[str, ...]
    """Names of the nodes in a ``FloatModel``, in the order of the graph."""
    operators: tuple[str, ...]


def find_groups(model: FloatModel, nodes: Sequence[onnx.NodeProto]) -> tuple[OperatorGroup, ...]:
    """Divide ``nodes``, which can become integer, into groups, in the order of the groups' first nodes."""
    return _Grouping(model, nodes).groups()


class MixedModel:
    """Makes INT8 versions of a float model in which any given groups stay float.

    The versions are deterministic. Raises Unsupported if no operator can become integer, and the errors of ``FloatModel``.
    """

    def __init__(
        self,
        artifact: Artifact,
        statistics: Mapping[str, TensorStatistics],
        scheme: IntegerScheme,
        placement: QdqPlacement = QdqPlacement.LINEAR,
        method: RangeMethod = RangeMethod.MSE,
    ) -> None:
        """``statistics`` come from ``collect`` on calibration data."""
        self.artifact, self.statistics, self.scheme, self.placement = artifact, statistics, scheme, placement
        self.ranges: dict[str, Range] = ranges(statistics, method, scheme)
        self.model = float_model(artifact)
        self.groups = find_groups(self.model, self.model.integer_nodes(placement))
        if not self.groups:
            raise nothing_to_quantise()
        self._names = frozenset(group.name for group in self.groups)

    def nodes(self, names: Collection[str]) -> list[str]:
        """The nodes of the groups called ``names``, in the order of the groups. Raises InvalidArgument for an unknown name."""
        unknown = sorted(set(names) - self._names)
        if unknown:
            raise InvalidArgument(
                f"no group is called {unknown}", f"choose from {[group.name for group in self.groups]}"
            )
        return [node for group in self.groups if group.name in names for node in group.nodes]

    def others(self, name: str) -> frozenset[str]:
        """The names of all groups except this one."""
        return self._names - {name}

    def is_integer(self, floats: Collection[str]) -> bool:
        """True if any operator becomes integer when these groups stay float."""
        return bool(self.model.integer_nodes(self.placement, self.nodes(floats)))

    def with_float(self, floats: Collection[str] = ()) -> Artifact:
        """The INT8 version with these groups float; the original if no product is left to quantise."""
        if not self.is_integer(floats):
            return self.artifact
        return quantize(self.artifact, self.ranges, self.scheme, self.placement, self.nodes(floats))


class _Grouping:
    """Disjoint sets of ``nodes``, each identified by its smallest index."""

    def __init__(self, model: FloatModel, nodes: Sequence[onnx.NodeProto]) -> None:
        self._model, self._nodes = model, nodes
        self._parents = list(range(len(nodes)))
        self._writers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        self._readers: dict[str, list[str]] = defaultdict(list)
        for node in model.nodes:
            for name in dict.fromkeys(node.input):
                self._readers[name].append(node.name)
        for name in model.output_names:
            self._readers[name].append("")

    def groups(self) -> tuple[OperatorGroup, ...]:
        """Apply the two rules, and return the resulting groups."""
        for index, node in enumerate(self._nodes):
            if node.op_type not in LINEAR_OPS:
                self._join(index, self._neighbours(node))
        for node in self._model.nodes:
            if node.op_type == "MatMul" and not self._is_weighted(node):
                meeting = sorted({root for name in node.input for root in self._projections(name)})
                self._join(self._writers.get(node.output[0], meeting[0] if meeting else 0), meeting)
        members: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        for index, node in enumerate(self._nodes):
            members[self._find(index)].append(node)
        return tuple(
            OperatorGroup(found[0].output[0], tuple(node.name for node in found), tuple(node.op_type for node in found))
            for _, found in sorted(members.items())
        )

    def _neighbours(self, node: onnx.NodeProto) -> list[int]:
        """The operators that an operator other than a product joins (rule 1)."""
        producers = sorted({self._writers[name] for name in node.input if name in self._writers})
        own = [at for at in producers if self._is_only_read_by(self._nodes[at], node)]
        return own or producers[-1:]

    def _is_only_read_by(self, node: onnx.NodeProto, reader: onnx.NodeProto) -> bool:
        return {one for name in node.output for one in self._readers[name]} == {reader.name}

    def _projections(self, tensor: str) -> Iterator[int]:
        """The integer products with weights from which ``tensor`` is computed by operators that ``_TRANSPARENT`` lists."""
        waiting, seen = [tensor], {tensor}
        while waiting:
            node = self._model.producers.get(waiting.pop())
            if node is None:
                continue
            if self._is_weighted(node):
                if node.output[0] in self._writers:
                    yield self._writers[node.output[0]]
            elif node.op_type in _TRANSPARENT:
                waiting += [name for name in node.input if name not in seen]
                seen.update(node.input)

    def _is_weighted(self, node: onnx.NodeProto) -> bool:
        return node.op_type in LINEAR_OPS and (
            node.op_type != "MatMul" or any(n in self._model.weights for n in node.input)
        )

    def _join(self, index: int, others: Sequence[int]) -> None:
        for other in others:
            low, high = sorted((self._find(index), self._find(other)))
            self._parents[high] = low

    def _find(self, index: int) -> int:
        while self._parents[index] != index:
            index = self._parents[index]
        return index
