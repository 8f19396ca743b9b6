"""Finds the first node of an ONNX model that computes something else than its source.

Each linked tensor is computed from the source's values of the linked tensors before it. So an error of an earlier node does not
matter, and the tolerance is that of a few nodes. A link can be wrong: an exporter may give the name of a layer to a tensor before the
layer's activation. The nodes that read the tensor show this: they agree with the source on the ONNX model's value, but not on the
source's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from penstock.errors import PenstockError
from penstock.offline.convert.base import FrameworkModel, TensorLink
from penstock.offline.convert.certificate import Divergence
from penstock.offline.convert.parity.compare import OutputDifference, compare, statistics
from penstock.offline.convert.parity.nodes import NodeError, Nodes
from penstock.offline.convert.parity.tolerance import RoundingModel
from penstock.tensor import Array

_LINEAR = frozenset(
    {
        "Cast",
        "Concat",
        "Conv",
        "Expand",
        "Flatten",
        "Gather",
        "Gemm",
        "Identity",
        "MatMul",
        "Mul",
        "Neg",
        "Pad",
        "ReduceMean",
    }
    | {"ReduceSum", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"}
)
"""Operators of which other magnitudes of the inputs show nothing new."""
_WITH_EPSILON = frozenset(
    {"Add", "BatchNormalization", "Clip", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "Max"}
    | {"RMSNormalization", "LpNormalization"}
)
_SIZES = (1.0, 1e-3, 1e-6)
"""Root mean squares of the inputs of a part. The last ones are those of usual epsilons."""
_LARGEST = 1e15
"""Larger numbers are those of masks."""


class Blame:
    """The linked tensors of one call, with their values in the source."""

    def __init__(
        self,
        nodes: Nodes,
        source: FrameworkModel,
        links: Sequence[TensorLink],
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        self._nodes, self._source, self._inputs = nodes, source, inputs
        order = nodes.makers
        self._links = {link.tensor: link for link in links if link.tensor in order and link.tensor not in inputs}
        values = (
            source.values(inputs, list(dict.fromkeys(link.source for link in self._links.values())))
            if self._links
            else {}
        )
        self._values: dict[str, Array] = {
            tensor: values[link.source] for tensor, link in self._links.items() if link.source in values
        }
        self.has_links = bool(self._values)
        self._outputs = {name: array for name, array in outputs.items() if name in order}
        self._values = self._outputs | self._values
        self._order = sorted(self._values, key=lambda name: order[name])
        self.proves = False
        """True if every part agrees, so that the outputs agree. Known after ``find``."""

    def find(self, *, only_sure: bool = False) -> Divergence | None:
        """The first part that differs; None if no part differs beyond rounding. With ``only_sure``, differences that have no effect
        on later parts do not count."""
        weak: Divergence | None = None
        decided = 0
        for tensor in list(self._order):
            try:
                got, difference = self._check(tensor, {})
            except NodeError as error:
                weak = weak or self._failure(tensor, error)
                continue
            except PenstockError:
                continue
            decided += difference.decides
            if not difference.reason:
                if not difference.decides and tensor not in self._outputs:
                    self._drop(tensor)  # the link may be wrong, and would mislead the parts after it
                continue
            verdict = self._confirmed(tensor, got)
            if verdict == "wrong link":
                decided -= difference.decides
                self._drop(tensor)
            elif verdict == "sure":
                return self._divergence(tensor, got, difference)
            else:
                weak = weak or self._divergence(tensor, got, difference)
        self.proves = weak is None and decided == len(self._order)
        return None if only_sure else weak

    def probe(self) -> Divergence | None:
        """The first part that differs if its inputs have other magnitudes than in the call: the formulas of an activation differ for
        ordinary values, and epsilons matter for tiny ones, but the values of a network with random weights are neither."""
        for tensor in self._order:
            link = self._links.get(tensor, TensorLink(tensor, ""))
            given = {name: array for name, array in {**self._inputs, **self._values}.items() if name != tensor}
            indices = self._nodes.needed([tensor], given)
            kinds = {self._nodes.proto.graph.node[index].op_type for index in indices}
            reads = {name for index in indices for name in self._nodes.reads[index] if name in given}
            for size in _SIZES if kinds & _WITH_EPSILON else _SIZES[:1] if kinds - _LINEAR else ():
                changed = {name: _resized(given[name], size) for name in reads}
                with contextlib.suppress(PenstockError):  # the source rejects the values
                    named = {self._links[name].source if name in self._links else name: changed[name] for name in reads}
                    want = self._source.values(named, [link.source]).get(link.source)
                    if want is None:
                        break  # the source does not compute this part from the same values
                    with np.errstate(all="ignore"):
                        got = self._nodes.run(changed, [tensor])[tensor]
                    rounding = RoundingModel(self._nodes, changed, [tensor])
                    difference = compare(tensor, want, got, rounding, is_inner=True)
                    if difference.reason:
                        return replace(self._divergence(tensor, got, difference), expected=statistics(want))
        return None

    def _drop(self, tensor: str) -> None:
        del self._values[tensor]
        self._order.remove(tensor)

    def _check(self, tensor: str, instead: Mapping[str, Array]) -> tuple[Array, OutputDifference]:
        given = {**self._inputs, **self._values, **instead}
        want = given.pop(tensor)
        with np.errstate(all="ignore"):
            got = self._nodes.run(given, [tensor])[tensor]
        return got, compare(tensor, want, got, RoundingModel(self._nodes, given, [tensor]), is_inner=True)

    def _confirmed(self, tensor: str, got: Array) -> str:
        """Whether the difference of ``tensor`` is that of a node (``sure``), of the link, or without effect (``weak``)."""
        if tensor in self._outputs:
            return "sure"
        readers = self._readers(tensor)
        on_source = [self._agrees(reader, {}) for reader in readers]
        on_ours = [self._agrees(reader, {tensor: got}) for reader in readers]
        if not readers or (any(on_ours) and all(on_ours) and not all(on_source)):
            return "wrong link"
        return "sure" if all(on_source) and not all(on_ours) else "weak"

    def _agrees(self, tensor: str, instead: Mapping[str, Array]) -> bool:
        try:
            return not self._check(tensor, instead)[1].reason
        except PenstockError:
            return False

    def _readers(self, tensor: str) -> list[str]:
        """The linked tensors that are computed from ``tensor`` without another linked tensor between."""
        later = self._order[self._order.index(tensor) + 1 :]
        return [name for name in later if self._reads(name, tensor)]

    def _reads(self, name: str, tensor: str) -> bool:
        given = {*self._inputs, *self._values} - {name}
        return any(tensor in self._nodes.reads[index] for index in self._nodes.needed([name], given))

    def _part(self, tensor: str, last: str = "") -> str:
        """The nodes that compute ``tensor`` from the linked tensors before it, at most up to the node ``last``."""
        indices = self._nodes.needed([tensor], {*self._inputs, *self._values} - {tensor})
        labels = [self._nodes.label(index) for index in indices]
        if last in labels:
            labels = labels[: labels.index(last) + 1]
        return ", ".join(labels)

    def _failure(self, tensor: str, error: NodeError) -> Divergence:
        link = self._links.get(tensor)
        return Divergence(
            self._part(tensor, error.node),
            link.source if link else tensor,
            where=link.where if link else "",
            expected=statistics(self._values[tensor]),
            found=error.message,
        )

    def _divergence(self, tensor: str, got: Array, difference: OutputDifference) -> Divergence:
        link = self._links.get(tensor)
        return Divergence(
            node=self._part(tensor),
            source=link.source if link else tensor,
            error=difference.error,
            where=link.where if link else "",
            expected=statistics(self._values[tensor]),
            found=statistics(got),
        )


def _resized(array: Array, size: float) -> Array:
    """``array`` multiplied by a power of two, which is exact, so that the root mean square of its numbers is about ``size``."""
    if array.dtype != np.float32 or not array.size:
        return array
    present = float(np.sqrt(np.mean(array.astype(np.float64) ** 2)))
    if not 0 < present < _LARGEST:
        return array
    return np.asarray(np.ldexp(array, round(np.log2(size / present))), np.float32)


def of_failure(nodes: Nodes, links: Sequence[TensorLink], inputs: Mapping[str, Array], reason: str) -> Divergence:
    """The node that fails on ``inputs``, although the source accepts them."""
    label, made = "", set[str]()
    try:
        nodes.run(inputs, nodes.outputs)
    except NodeError as error:
        label = error.node
        index = next((n for n in range(len(nodes.reads)) if nodes.label(n) == label), None)
        made = set(nodes.proto.graph.node[index].output) if index is not None else set()
    except PenstockError:
        pass
    link = next((link for link in links if link.tensor in made), None)
    return Divergence(
        node=label or "the whole graph",
        source=link.source if link else "",
        where=link.where if link else "",
        found=reason,
    )


def of_output(nodes: Nodes, name: str, want: Any, got: Any, difference: OutputDifference) -> Divergence:
    """The node that computes the output ``name``, if no earlier value of the source is known."""
    index = nodes.makers.get(name)
    return Divergence(
        node=nodes.label(index) if index is not None else name,
        source=name,
        error=difference.error,
        expected=statistics(want) if want is not None else "",
        found=statistics(got) if got is not None else "missing",
        is_first=False,
    )
