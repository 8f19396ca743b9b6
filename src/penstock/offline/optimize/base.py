"""Interface of passes: ``Pass`` edits a model; ``PassRecord`` and ``OptimizeReport`` describe the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import ClassVar, Literal

import msgspec
import onnx_ir as ir

from penstock.offline.optimize import graph


class Pass(ABC):
    """One rewrite of the graph, in place.

    The docstring of a pass numbers its rules and exceptions; comments in the code refer to these numbers. A pass keeps the names of
    the graph's inputs and outputs. Other names may disappear, but a remaining name must denote the same tensor as before. A tensor
    that a subgraph reads counts as used. A pass is deterministic.
    """

    name: ClassVar[str]

    @abstractmethod
    def applications(self, model: ir.Model, skipped: Collection[str] = ()) -> Iterator[str]:
        """Edit ``model``, whose values have inferred types and shapes, one application at a time.

        Yields the site of each application after the change is made. A site is the name of a value that identifies the application;
        the sites of a model are always the same. Sites in ``skipped`` are not changed. If the caller stops early, the model is valid.
        """

    def call(self, model: ir.Model) -> bool:
        """Make every application. Returns True if the model changed."""
        return sum(1 for _ in self.applications(model)) > 0


class NodePass(Pass):
    """A pass that rewrites nodes one by one, in order. It visits nodes of the standard domain without subgraphs."""

    def applications(self, model: ir.Model, skipped: Collection[str] = ()) -> Iterator[str]:
        """Rewrite the nodes, except nodes that an earlier rewrite removed. A node's site is its first output."""
        for node in graph.plain_nodes(model):
            site = graph.site(node)
            if site not in skipped and self.rewrite(node, model):
                yield site

    @abstractmethod
    def rewrite(self, node: ir.Node, model: ir.Model) -> bool:
        """Rewrite ``node``. Returns True if the graph changed."""


class PassRecord(msgspec.Struct, frozen=True):
    """One run of one pass."""

    name: str
    round: int
    status: Literal["applied", "unchanged", "reverted"]
    nodes_before: int
    nodes_after: int
    """Number of nodes after the pass; equal to ``nodes_before`` if the pass was undone."""
    max_relative_error: float | None
    """Error against the original over all samples. Passes that are verified together share one error: the error after the last pass.
    None if no comparison was run. In JSON, an infinite error is also null.
    """
    seconds: float
    reason: str = ""
    """Why the pass, or part of it, was undone. States the site, the output, its error and the first differing tensor, or why no
    comparison was possible. Empty if all applications were kept.
    """
    example: str = ""
    """The smallest known model whose outputs an undone application changes, as ONNX text; empty if there is none."""


class OptimizeReport(msgspec.Struct, frozen=True):
    """The report of all passes, in the order in which they ran. Numbers of nodes include the nodes of subgraphs."""

    passes: tuple[PassRecord, ...]
    nodes_before: int
    nodes_after: int

    @property
    def applied(self) -> list[str]:
        """Names of the passes that changed the model, without duplicates, in the order of their first change."""
        return list(dict.fromkeys(record.name for record in self.passes if record.status == "applied"))

    @property
    def reverted(self) -> dict[str, str]:
        """Maps the name of each pass that was undone, fully or partly, to the reason."""
        return {record.name: record.reason for record in self.passes if record.reason}

    @property
    def max_relative_error(self) -> float | None:
        """Error of the optimised model against the original; None if no pass was applied."""
        errors = [record.max_relative_error for record in self.passes if record.status == "applied"]
        return errors[-1] if errors else None
