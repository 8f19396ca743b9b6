"""The pass seam: ``Pass`` edits a model; ``PassRecord`` and ``OptimizeReport`` describe what the passes did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import msgspec
import onnx_ir as ir

from penstock.offline.optimize import graph


class Pass(ABC):
    """One rewrite of the graph, in place.

    The docstring numbers its rules, including the exceptions, and the code marks them. A pass keeps inputs and outputs with their
    names. Every other name denotes the same tensor as before or disappears. A capture by a subgraph counts as a use. A pass is
    deterministic.
    """

    name: ClassVar[str]

    @abstractmethod
    def call(self, model: ir.Model) -> bool:
        """Edit ``model``, whose values have inferred types and shapes. Returns whether it changed."""


class NodePass(Pass):
    """A pass that rewrites nodes one by one: those of the standard domain without subgraphs, in order."""

    def call(self, model: ir.Model) -> bool:
        """Rewrite every node that is still in the graph when its turn comes."""
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
    """Nodes of the graph that was kept; for a reverted pass the same as before."""
    max_relative_error: float | None
    """Error against the original over all samples, after all passes of the round if these are right. None if nothing was run.
    JSON writes an infinite error as null too.
    """
    seconds: float
    reason: str = ""
    """Of a reverted pass: output, error and first divergent tensor, or why it could not be verified."""


class OptimizeReport(msgspec.Struct, frozen=True):
    """All passes in the order they ran, and the number of nodes before and after, subgraphs included."""

    passes: tuple[PassRecord, ...]
    nodes_before: int
    nodes_after: int

    @property
    def applied(self) -> list[str]:
        """Names of the passes that changed the model, each once, in order of their first success."""
        return list(dict.fromkeys(record.name for record in self.passes if record.status == "applied"))

    @property
    def reverted(self) -> dict[str, str]:
        """Names of the passes that were undone, and why."""
        return {record.name: record.reason for record in self.passes if record.status == "reverted"}

    @property
    def max_relative_error(self) -> float | None:
        """Error of the optimised model against the original; None if no pass was applied."""
        errors = [record.max_relative_error for record in self.passes if record.status == "applied"]
        return errors[-1] if errors else None
