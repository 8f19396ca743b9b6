"""``optimize``: run passes over a model, verify them, and undo those that change the outputs.

artifact ─ load, infer shapes ─▶ all passes ─ modified? ─ verify ─┬ agrees: keep ──▶ next round … until one changes nothing
                                                                  └ differs: undo, then verify pass by pass; a pass
                                                                    that is wrong is undone and not tried again
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.optimize.base import OptimizeReport, Pass, PassRecord
from penstock.offline.optimize.model import infer_shapes, read_proto, to_bytes, to_proto
from penstock.offline.optimize.passes import default_passes
from penstock.offline.optimize.verify import Verifier
from penstock.protocol.onnx_scan import has_external_data
from penstock.tensor import Array

MAX_ROUNDS = 8
"""Maximum number of rounds through all passes. Two or three reach the fixed point; this bounds a pass that always reports a change."""


def optimize(
    artifact: Artifact, samples: Sequence[Mapping[str, Array]] = (), passes: Sequence[Pass] | None = None
) -> tuple[Artifact, OptimizeReport]:
    """Returns a self-contained artifact with the same outputs and fewer nodes, and the report of every pass.

    ``samples`` are real inputs on which the outputs are compared, in addition to generated inputs; the first 8 are used. ``passes``
    replaces the default passes. A pass that changes the outputs is undone, and its record gives the reason. The result is
    deterministic. A self-contained model that no pass changes keeps its bytes. Raises InvalidModel or Unsupported for a model that
    cannot be read, InvalidArgument for a sample that does not fit.
    """
    active = default_passes() if passes is None else list(passes)
    options = {"passes": [current.name for current in active]}
    build = _Build(infer_shapes(read_proto(artifact)), Verifier(artifact, samples))
    nodes_before = build.node_count()
    for number in range(1, MAX_ROUNDS + 1):
        records = build.round(active, number)
        undone = {record.name for record in records if record.status == "reverted"}
        active = [current for current in active if current.name not in undone]
        if all(record.status != "applied" for record in records):
            break
    report = OptimizeReport(tuple(build.records), nodes_before, build.node_count())
    unchanged = not report.applied and not has_external_data(artifact.data)
    facts = {
        "applied": report.applied,
        "reverted": report.reverted,
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "max_relative_error": report.max_relative_error,
        "onnx_ir": ir.__version__,
    }
    return artifact.derive(artifact.data if unchanged else to_bytes(build.model), "optimize", options, facts), report


class _Build:
    """The model that passes work on, and the protobuf of its last verified state."""

    def __init__(self, model: ir.Model, verifier: Verifier) -> None:
        self.model = model
        self.records: list[PassRecord] = []
        self._proto = to_proto(model)
        self._verifier = verifier

    def round(self, passes: Sequence[Pass], number: int) -> list[PassRecord]:
        """Run ``passes`` and verify the result. If it is wrong, undo all and verify them one by one. Then infer shapes again."""
        start = self._proto
        records = [self._run(current, number) for current in passes]
        if any(record.status != "unchanged" for record in records):
            # Shape inference finds more shapes after constants are folded.
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

    def node_count(self) -> int:
        """The number of nodes, including those of subgraphs."""
        return sum(1 for _ in self.model.graph.all_nodes())

    def _run(self, current: Pass, number: int, verify: bool = False) -> PassRecord:
        """Run one pass. Undo it if it fails or, with ``verify``, if it changes the outputs."""
        start, before = time.perf_counter(), self.node_count()
        status: Literal["applied", "unchanged", "reverted"] = "unchanged"
        error, reason, proto = None, "", self._proto
        try:
            modified = current.call(self.model)
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
        return PassRecord(current.name, number, status, before, self.node_count(), error, seconds, reason)

    def _go_back(self, proto: onnx.ModelProto, infer: bool = False) -> None:
        self.model = infer_shapes(proto) if infer else ir.from_proto(proto)
        self._proto = to_proto(self.model) if infer else proto


def _verified(record: PassRecord, error: float | None) -> PassRecord:
    return msgspec.structs.replace(record, max_relative_error=error) if record.status == "applied" else record


def _bytes(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))
