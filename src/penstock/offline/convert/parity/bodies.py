"""Runs the bodies of ``If``, ``Loop`` and ``Scan`` node by node, as ``Nodes`` runs a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import onnx
from onnx import helper

from penstock.tensor import Array

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})

Values = dict[str, Any]
"""Tensors by name. A sequence is a list."""
How = Literal["inexact", "all", "scaled", "tied"]
"""Values to change: those that were rounded, also exact ones, also whole numbers, or all so that no two stay equal."""
Noise = Callable[[str, Array, How], Array]
"""Changes the value of a tensor as rounding could."""


class _Body(Protocol):
    inputs: list[str]
    outputs: list[str]

    def run(
        self,
        given: Mapping[str, Any],
        wanted: list[str],
        *,
        precise: bool,
        noise: Noise | None,
        seen: Callable[[Values], None] | None,
    ) -> Values: ...


class Bodies(NamedTuple):
    """The bodies of one control-flow node, by attribute."""

    node: onnx.NodeProto
    graphs: Mapping[str, _Body]

    def run(self, values: Values, *, noise: Noise | None, seen: Callable[[Values], None] | None) -> list[Any]:
        """The outputs of the node in double precision. ``values`` are its inputs and the tensors that its bodies read."""

        def body(name: str, given: list[Any]) -> list[Any]:
            graph = self.graphs[name]
            found = graph.run(
                values | dict(zip(graph.inputs, given, strict=False)),
                graph.outputs,
                precise=True,
                noise=noise,
                seen=seen,
            )
            return [found[output] for output in graph.outputs]

        inputs = [values.get(name) for name in self.node.input]
        match self.node.op_type:
            case "If":
                return body("then_branch" if bool(np.all(inputs[0])) else "else_branch", [])
            case "Loop":
                return self._loop(body, inputs)
            case _:
                return self._scan(body, inputs)

    def _loop(self, body: Callable[[str, list[Any]], list[Any]], inputs: list[Any]) -> list[Any]:
        trips, carried = inputs[0], inputs[2:]
        going = np.array(True) if inputs[1] is None else inputs[1]
        scanned: list[list[Array]] = [[] for _ in range(len(self.graphs["body"].outputs) - 1 - len(carried))]
        for number in itertools.count():
            if not np.all(going) or (trips is not None and number >= int(np.max(trips))):
                break
            going, *results = body("body", [np.array(number), going, *carried])
            carried, rows = results[: len(carried)], results[len(carried) :]
            for kept, row in zip(scanned, rows, strict=True):
                kept.append(row)
        return [*carried, *(np.stack(rows) if rows else np.zeros(0) for rows in scanned)]

    def _scan(self, body: Callable[[str, list[Any]], list[Any]], inputs: list[Any]) -> list[Any]:
        options = {each.name: helper.get_attribute_value(each) for each in self.node.attribute}
        count = options["num_scan_inputs"]
        carried, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
        axes = options.get("scan_input_axes", [0] * count)
        rows = [np.moveaxis(one, axis, 0) for one, axis in zip(scanned, axes, strict=True)]
        flips = options.get("scan_input_directions", [0] * count)
        rows = [one[::-1] if flip else one for one, flip in zip(rows, flips, strict=True)]
        made: list[list[Array]] = []
        for row in zip(*rows, strict=True):
            results = body("body", [*carried, *row])
            carried = results[: len(carried)]
            made.append(results[len(carried) :])
        found = [np.stack(one) for one in zip(*made, strict=True)]
        flips = options.get("scan_output_directions", [0] * len(found))
        axes = options.get("scan_output_axes", [0] * len(found))
        found = [one[::-1] if flip else one for one, flip in zip(found, flips, strict=True)]
        return [*carried, *(np.moveaxis(one, 0, axis) for one, axis in zip(found, axes, strict=True))]
