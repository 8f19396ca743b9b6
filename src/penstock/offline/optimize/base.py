"""Interface of passes: ``Pass`` edits a model; ``PassRecord`` and ``OptimizeReport`` describe the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import msgspec
import onnx_ir as ir

from penstock.offline.optimize import graph


class Pass(ABC):
    """One rewrite of the graph, in place.

    The docstring of a pass numbers its rules and exceptions; comments in the code refer to them. A pass keeps the names of inputs and
    outputs. Every other name either denotes the same tensor as before or disappears. A tensor that a subgraph refers to counts as
    used. A pass is deterministic.
    """

    name: ClassVar[str]

    @abstractmethod
    def call(self, model: ir.Model) -> bool:
        """Edit ``model``, whose values have inferred types and shapes. Returns whether it changed."""


class NodePass(Pass):
    """A pass that rewrites nodes one by one, in order. It visits nodes of the standard domain without subgraphs."""

    def call(self, model: ir.Model) -> bool:
        """Rewrite the nodes; skip those that an earlier rewrite removed."""
        modified = False
        for node in graph.plain_nodes(model):
            modified |= self.rewrite(node, model)
        return modified

    @abstractmethod
    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        """Rewrite ``node``. Returns whether the graph changed."""


class PassRecord(msgspec.Struct, frozen=True):
    """One run of one pass."""

    name: str
    round: int
    status: Literal["applied", "unchanged", "reverted"]
    nodes_before: int
    nodes_after: int
    """Number of nodes after the pass; for a reverted pass, the same as before it."""
    max_relative_error: float | None
    """Error against the original over all samples. Passes that are verified together share the error after the last
    one. None if nothing was run. JSON writes an infinite error as null too.
    """
    seconds: float
    reason: str = ""
    """For a reverted pass: the output, its error and the first divergent tensor, or the reason why it could not be verified."""


class OptimizeReport(msgspec.Struct, frozen=True):
    """The report of all passes, in the order in which they ran. Numbers of nodes include the nodes of subgraphs."""

    passes: tuple[PassRecord, ...]
    nodes_before: int
    nodes_after: int

    @property
    def applied(self) -> list[str]:
        """Names of the passes that changed the model, without duplicates, in order of their first change."""
        return list(dict.fromkeys(record.name for record in self.passes if record.status == "applied"))

    @property
    def reverted(self) -> dict[str, str]:
        """The reasons why passes were undone, by name."""
        return {record.name: record.reason for record in self.passes if record.status == "reverted"}

    @property
    def max_relative_error(self) -> float | None:
        """Error of the optimised model against the original; None if no pass was applied."""
        errors = [record.max_relative_error for record in self.passes if record.status == "applied"]
        return errors[-1] if errors else None
