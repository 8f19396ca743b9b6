"""``optimize``: run passes over a model, verify them, and undo those that change the outputs.

artifact ─ load, infer shapes ─▶ all passes ─ changed? ─ verify ─┬ agrees: keep ──▶ next round … until nothing changes
                                                                 └ differs: undo all, then verify each pass separately;
                                                                   undo only the wrong applications of a wrong pass,
                                                                   and do not try them again (bisect.py)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import onnx
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.offline.optimize.base import OptimizeReport, Pass, PassRecord
from penstock.offline.optimize.bisect import applied, first_wrong, minimal_model
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import from_proto, infer_shapes, read_proto, to_artifact, to_proto
from penstock.offline.optimize.passes import default_passes
from penstock.offline.optimize.verify import Verdict, Verifier
from penstock.protocol.onnx_scan import has_external_data
from penstock.tensor import Array

MAX_ROUNDS = 8
"""Maximum number of rounds through all passes. Two or three usually suffice; the limit stops a pass that always reports a change."""

_MAX_WRONG = 8
"""Maximum number of wrong applications of one pass in one round. If there are more, the whole pass is undone."""


def optimize(
    artifact: Artifact, samples: Sequence[Mapping[str, Array]] = (), passes: Sequence[Pass] | None = None
) -> tuple[Artifact, OptimizeReport]:
    """Optimise ``artifact``. Returns a self-contained artifact with the same outputs and fewer nodes, and a report on every pass.

    Outputs are compared on generated inputs, and on the first 8 of ``samples``, which are real inputs. ``passes`` replaces the default
    passes. An application of a pass that changes the outputs is undone; the record of the pass gives the reason and a minimal model.
    The result is deterministic, and a self-contained model that no pass changes keeps its bytes. Raises InvalidModel or Unsupported
    for a model that cannot be read, InvalidArgument for a sample that does not fit the model.
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
    return artifact.derive(artifact if unchanged else to_artifact(build.model), "optimize", options, facts), report


class _Build:
    """The model that passes edit, and the protobuf of its last verified state."""

    def __init__(self, model: ir.Model, verifier: Verifier) -> None:
        self.model = model
        self.records: list[PassRecord] = []
        self._proto = to_proto(model)
        self._verifier = verifier
        self._skipped: dict[str, set[str]] = {}
        """The sites of wrong applications, by pass."""

    def round(self, passes: Sequence[Pass], number: int) -> list[PassRecord]:
        """Run ``passes`` and verify the result. If it is wrong, undo all, and verify each pass separately. Then infer shapes again."""
        start = self._proto
        records = [self._run(current, number) for current in passes]
        if any(record.status != "unchanged" for record in records):
            # Shape inference finds more shapes after constants are folded.
            self._go_back(self._proto, infer=True)
            verdict = self._verifier.check(artifact_of(self._proto))
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
        """Run one pass. Undo it if it raises an error. With ``verify``, undo those of its applications that change the outputs."""
        start, before = time.perf_counter(), self.node_count()
        reasons: list[str] = []
        example, error = "", None
        sites, verdict = self._attempt(current, verify)
        while sites and verdict.failure and not self._verifier.obstacle and len(reasons) < _MAX_WRONG:
            site, wrong, cause = self._wrong_application(current, sites)
            if not reasons:
                example = minimal_model(cause, current)
            self._skipped.setdefault(current.name, set()).add(site)
            reasons.append(f"at '{site}': {wrong.failure}")
            error = wrong.max_relative_error
            sites, verdict = self._attempt(current, verify)
        if verdict.failure:
            reasons.append(verdict.failure)
        is_kept = bool(sites) and not verdict.failure
        return PassRecord(
            name=current.name,
            round=number,
            status="applied" if is_kept else "reverted" if reasons else "unchanged",
            nodes_before=before,
            nodes_after=self.node_count(),
            max_relative_error=verdict.max_relative_error if is_kept or verdict.failure else error,
            seconds=time.perf_counter() - start,
            reason="; ".join(reasons),
            example=example,
        )

    def _attempt(self, current: Pass, verify: bool) -> tuple[list[str], Verdict]:
        """Make all applications of a pass not known to be wrong. If the outputs change, undo all of them. Returns their sites."""
        try:
            sites = list(current.applications(self.model, self._skipped.get(current.name, ())))
            proto = to_proto(self.model) if sites else self._proto
        except Exception as failure:  # noqa: BLE001 - a pass that raises is undone, as a wrong pass is
            self._go_back(self._proto)
            return [], Verdict(None, f"the pass failed: {type(failure).__name__}: {failure}")
        verdict = self._verifier.check(artifact_of(proto)) if verify and sites else Verdict(None)
        if verdict.failure:
            self._go_back(self._proto)
        else:
            self._proto = proto
        return sites, verdict

    def _wrong_application(self, current: Pass, sites: list[str]) -> tuple[str, Verdict, onnx.ModelProto]:
        """The site of an application that changes the outputs, a description of the change, and the model before this application."""
        skipped, verdicts = self._skipped.get(current.name, ()), {}

        def is_wrong(limit: int) -> bool:
            verdicts[limit] = self._verifier.check(artifact_of(to_proto(applied(current, self._proto, skipped, limit))))
            return bool(verdicts[limit].failure)

        wrong = first_wrong(len(sites), is_wrong)
        if wrong not in verdicts:
            is_wrong(wrong)
        before = to_proto(applied(current, self._proto, skipped, wrong - 1))
        return sites[wrong - 1], verdicts[wrong], before

    def _go_back(self, proto: onnx.ModelProto, infer: bool = False) -> None:
        self.model = infer_shapes(proto) if infer else from_proto(proto)
        self._proto = to_proto(self.model) if infer else proto


def _verified(record: PassRecord, error: float | None) -> PassRecord:
    return msgspec.structs.replace(record, max_relative_error=error) if record.status == "applied" else record
