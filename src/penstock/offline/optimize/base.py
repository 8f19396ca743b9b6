"""The pass seam: ``Pass`` edits a model, ``PassManager`` runs passes and undoes those that change the answers.

artifact ─ load, infer shapes ─▶ all passes ─ modified? ─ verify ─┬ agrees: keep ──▶ next round … until one changes nothing
                                                                  └ differs: undo, then verify pass by pass; a pass
                                                                    that is wrong is undone and not tried again
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
from penstock.offline.optimize.model import (
    count_by_op_type,
    infer_shapes,
    is_self_contained,
    read_proto,
    to_bytes,
    to_proto,
)
from penstock.offline.optimize.verify import Verifier
from penstock.tensor import Array

MAX_ROUNDS = 8
"""Rounds through all passes; two or three reach the fixed point, this bounds a pass that never says unchanged."""


class PassResult(msgspec.Struct, frozen=True):
    """The report of a pass: whether it modified the model."""

    modified: bool


class Pass(ABC):
    """One rewrite of the graph, in place.

    The docstring numbers its rules, including the exceptions, and the code marks them. A pass keeps inputs and outputs with their
    names. Every other name denotes the same tensor as before or disappears. A capture by a subgraph counts as a use. A pass is
    deterministic.
    """

    name: ClassVar[str]

    @abstractmethod
    def call(self, model: ir.Model) -> PassResult:
        """Edit ``model`` in place; its values carry what shape inference found."""


class PassRecord(msgspec.Struct, frozen=True):
    """One run of one pass."""

    name: str
    round: int
    status: Literal["applied", "unchanged", "reverted"]
    nodes_before: int
    nodes_after: int
    """Nodes in the graph that was kept; for a reverted pass the same as before."""
    max_relative_error: float | None
    """Against the original model, over all samples, after all passes of the round if those are right; None if nothing was run
    (JSON writes an infinite error as null too)."""
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

        ``on_pass`` is called with the records of each round. Raises InvalidModel, Unsupported as ``load_model``, and InvalidArgument
        for a sample that does not fit the signature.
        """
        build = _Build(infer_shapes(read_proto(artifact)), Verifier(artifact, samples))
        before = count_by_op_type(build.model)
        active = list(self.passes)
        for number in range(1, MAX_ROUNDS + 1):
            records = build.round(active, number)
            if on_pass is not None:
                for record in records:
                    on_pass(record)
            undone = {record.name for record in records if record.status == "reverted"}
            active = [current for current in active if current.name not in undone]
            if all(record.status != "applied" for record in records):
                break
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
    """The model while passes work on it, and the protobuf to go back to."""

    def __init__(self, model: ir.Model, verifier: Verifier) -> None:
        self.model = model
        self.records: list[PassRecord] = []
        self._proto = to_proto(model)
        self._verifier = verifier

    def round(self, passes: Sequence[Pass], number: int) -> list[PassRecord]:
        """Run ``passes`` and verify the result; if it is wrong, go back and verify them one by one. Then infer shapes anew."""
        start = self._proto
        records = [self._run(current, number) for current in passes]
        if any(record.status != "unchanged" for record in records):
            # Constants that were folded make more shapes known.
            self._go_back(self._proto, infer=True)
            verdict = self._verifier.check(_bytes(self._proto))
            if verdict.failure or any(record.status == "reverted" for record in records):
                self._go_back(start)
                records = [self._run(current, number, verify=True) for current in passes]
                self._go_back(self._proto, infer=True)
            else:
                records = [_verified(record, verdict.max_relative_error) for record in records]
        self.records += records
        return records

    def _run(self, current: Pass, number: int, verify: bool = False) -> PassRecord:
        """Run one pass; with ``verify``, keep its work only if that is right. A pass that fails is undone in either case."""
        start, before = time.perf_counter(), self._node_count()
        status: Literal["applied", "unchanged", "reverted"] = "unchanged"
        error, reason, proto = None, "", self._proto
        try:
            modified = current.call(self.model).modified
            proto = to_proto(self.model) if modified else proto
        except Exception as failure:  # noqa: BLE001 - a pass that fails is undone like one that is wrong
            modified, reason = True, f"the pass failed: {type(failure).__name__}: {failure}"
        if modified:
            if verify and not reason:
                verdict = self._verifier.check(_bytes(proto))
                error, reason = verdict.max_relative_error, verdict.failure
            status = "reverted" if reason else "applied"
            if reason:
                self._go_back(self._proto)
            else:
                self._proto = proto
        seconds = time.perf_counter() - start
        return PassRecord(current.name, number, status, before, self._node_count(), error, seconds, reason)

    def _go_back(self, proto: onnx.ModelProto, infer: bool = False) -> None:
        self.model = infer_shapes(proto) if infer else ir.from_proto(proto)
        self._proto = to_proto(self.model) if infer else proto

    def _node_count(self) -> int:
        return sum(1 for _ in self.model.graph.all_nodes())


def _verified(record: PassRecord, error: float | None) -> PassRecord:
    return msgspec.structs.replace(record, max_relative_error=error) if record.status == "applied" else record


def _bytes(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))
