"""The pass seam: ``Pass`` edits a model, ``PassManager`` runs passes and undoes those that change the answers.

artifact ─ load, infer shapes ─▶ pass ─ modified? ─ verify ─┬ agrees: keep ──▶ next pass … until a round changes nothing
                                                            └ differs: undo, record why, never try that pass again
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.optimize.model import count_by_op_type, infer_shapes, is_self_contained, read_proto, to_bytes
from penstock.offline.optimize.verify import Verifier
from penstock.tensor import Array

MAX_ROUNDS = 8
"""Rounds through all passes; two or three reach the fixed point, this bounds a pass that never says unchanged."""


class PassResult(msgspec.Struct, frozen=True):
    """What a pass reports: whether it modified the model."""

    modified: bool


class Pass(ABC):
    """One rewrite of the graph, in place.

    The docstring gives its rules by number, those for what is left alone as well, and the code marks them. A pass keeps
    inputs and outputs with their names, lets every other name denote the same tensor as before or disappear, counts what
    subgraphs capture as use, and is deterministic.
    """

    name: ClassVar[str]

    @abstractmethod
    def call(self, model: ir.Model) -> PassResult:
        """Edit ``model`` in place; its values carry what shape inference found."""


class PassRecord(msgspec.Struct, frozen=True):
    """How one run of one pass went."""

    name: str
    round: int
    status: Literal["applied", "unchanged", "reverted"]
    nodes_before: int
    nodes_after: int
    """As kept: of a reverted pass, the same as before."""
    max_relative_error: float | None
    """Against the original model, over all samples; None if nothing was run (JSON writes an infinite error as null too)."""
    seconds: float
    reason: str = ""
    """Of a reverted pass: output, error and first divergent tensor, or why it could not be verified."""


class OptimizeReport(msgspec.Struct, frozen=True):
    """All passes in the order they ran, and the graph before and after; node counts include subgraphs."""

    passes: tuple[PassRecord, ...]
    nodes_before: int
    nodes_after: int
    op_types_before: dict[str, int]
    op_types_after: dict[str, int]

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
        """Of the model as it is now against the original; None if nothing was applied."""
        errors = [record.max_relative_error for record in self.passes if record.status == "applied"]
        return errors[-1] if errors else None


class PassManager:
    """Runs ``passes`` in order, again and again until a round changes nothing."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)

    def run(
        self,
        artifact: Artifact,
        samples: Sequence[Mapping[str, Array]] = (),
        on_pass: Callable[[PassRecord], None] | None = None,
    ) -> tuple[Artifact, OptimizeReport]:
        """The optimised, self-contained artifact; the original bytes if nothing was to be done and they are self-contained.

        ``on_pass`` is told each record as it comes. Raises InvalidModel, Unsupported as ``load_model``, and InvalidArgument
        for a sample that does not fit the signature.
        """
        build = _Build(infer_shapes(read_proto(artifact)), Verifier(artifact, samples))
        before = count_by_op_type(build.model)
        active = list(self.passes)
        for number in range(1, MAX_ROUNDS + 1):
            records = []
            for current in active:
                records.append(build.apply(current, number))
                if on_pass is not None:
                    on_pass(records[-1])
            undone = {record.name for record in records if record.status == "reverted"}
            active = [current for current in active if current.name not in undone]
            if all(record.status != "applied" for record in records):
                break
            build.infer_again()
        after = count_by_op_type(build.model)
        report = OptimizeReport(tuple(build.records), sum(before.values()), sum(after.values()), before, after)
        unchanged = not report.applied and is_self_contained(artifact)
        data = artifact.data if unchanged else to_bytes(build.model)
        return self._derive(artifact, data, report), report

    def _derive(self, artifact: Artifact, data: bytes, report: OptimizeReport) -> Artifact:
        options = {"passes": [current.name for current in self.passes]}
        facts: dict[str, Any] = {
            "applied": report.applied,
            "reverted": report.reverted,
            "nodes_before": report.nodes_before,
            "nodes_after": report.nodes_after,
            "max_relative_error": report.max_relative_error,
            "onnx_ir": ir.__version__,
        }
        return artifact.derive(data, "optimize", options, facts)


class _Build:
    """The model while passes work on it, and the bytes to go back to."""

    def __init__(self, model: ir.Model, verifier: Verifier) -> None:
        self.model = model
        self.records: list[PassRecord] = []
        self._data = to_bytes(model)
        self._verifier = verifier

    def apply(self, current: Pass, number: int) -> PassRecord:
        """Run one pass; keep its work only if it is verified."""
        start, before = time.perf_counter(), self._node_count()
        status: Literal["applied", "unchanged", "reverted"] = "unchanged"
        error, reason = None, ""
        try:
            modified = current.call(self.model).modified
            data = to_bytes(self.model) if modified else self._data
        except Exception as failure:  # noqa: BLE001 - a pass that fails is undone like one that is wrong
            modified, data, reason = True, self._data, f"the pass failed: {type(failure).__name__}: {failure}"
        if modified:
            if not reason:
                verdict = self._verifier.check(data)
                error, reason = verdict.max_relative_error, verdict.failure
            status = "reverted" if reason else "applied"
            if reason:
                self.model = ir.from_proto(onnx.load_model_from_string(self._data))
            else:
                self._data = data
        seconds = time.perf_counter() - start
        record = PassRecord(current.name, number, status, before, self._node_count(), error, seconds, reason)
        self.records.append(record)
        return record

    def infer_again(self) -> None:
        """Infer shapes anew: folded constants make more of them known."""
        self.model = infer_shapes(onnx.load_model_from_string(self._data))
        self._data = to_bytes(self.model)

    def _node_count(self) -> int:
        return sum(1 for _ in self.model.graph.all_nodes())
