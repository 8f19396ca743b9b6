"""Finds the rows of constant tables, such as those of position embeddings, that no call has read. Errors in them stay unknown.

A ``Gather`` reads the rows of its indices, and a ``Slice`` a range. Every other operator reads all of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import PenstockError
from penstock.offline.convert.parity.nodes import Nodes
from penstock.tensor import Array


class _Reader(NamedTuple):
    table: str
    axis: int
    at: tuple[str, ...]
    """The tensors that tell which rows are read: the indices, or starts, ends, axes and steps."""
    is_slice: bool


class Coverage:
    """The rows of the tables of ``nodes`` that were read."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._readers = [reader for node in nodes.proto.graph.node if (reader := self._reader(node)) is not None]
        self._read: dict[tuple[str, int], Array] = {
            (one.table, one.axis): np.zeros(nodes.constants[one.table].shape[one.axis], bool) for one in self._readers
        }

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Mark the rows that the graph reads for ``inputs``."""
        wanted = list(dict.fromkeys(name for one in self._readers for name in one.at))
        try:
            values = self._nodes.run(inputs, wanted) if wanted else {}
        except PenstockError:
            return
        for one in self._readers:
            rows, found = self._read[one.table, one.axis], [values[name] for name in one.at]
            if one.is_slice:
                _mark_range(rows, found)
            else:
                rows[found[0].astype(np.int64).ravel() % len(rows)] = True

    def unread(self) -> Iterator[tuple[str, Array]]:
        """The tables with their rows that no call has read."""
        for (name, _), rows in self._read.items():
            if not rows.all():
                yield name, np.flatnonzero(~rows)

    def lengths(self) -> list[int]:
        """The lengths of the tables of which the last row was not read."""
        return sorted({len(rows) for rows in self._read.values() if not rows[-1]})

    def _reader(self, node: Any) -> _Reader | None:
        constants = self._nodes.constants
        if node.op_type not in ("Gather", "Slice") or node.input[0] not in constants:
            return None
        at = tuple(name for name in node.input[1:] if name)
        if all(name in constants for name in (at if node.op_type == "Gather" else at[:2])):
            return None  # a part of the table is the table
        if node.op_type == "Gather":
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
        else:
            axes = (
                constants.get(node.input[3], np.array([0])) if len(node.input) > 3 and node.input[3] else np.array([0])
            )
            if np.size(axes) != 1:
                return None
            axis = int(np.ravel(axes)[0])
        return _Reader(node.input[0], axis % constants[node.input[0]].ndim, at, node.op_type == "Slice")


def _mark_range(rows: Array, values: list[Array]) -> None:
    starts, ends = (int(np.ravel(one)[0]) for one in values[:2])
    step = int(np.ravel(values[3])[0]) if len(values) > 3 else 1
    rows[slice(starts, ends if ends > -len(rows) - 1 else None, step)] = True


def shown(rows: Array) -> str:
    """``rows`` as ranges, such as ``4 to 7, 9``."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    texts = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], f"and {len(texts) - 3} other ranges"])
