"""The judge: compares candidates with the original on samples that were not used for calibration or training.

The original is the user's model. Its outputs are computed once, and candidates are compared with them sample by sample. Candidates and
the original are timed in turns; see ``race.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy, SizeGain
from penstock.dataset import Dataset, SizedCall
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidConfig, InvalidData
from penstock.measurement import Interval
from penstock.offline.judge.accuracy import Reference, make_reference, not_finite, served_answers
from penstock.offline.judge.chance import check_labels
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.metric_table import METRICS
from penstock.offline.judge.metrics import Outputs, share_of_few
from penstock.offline.judge.race import race
from penstock.offline.judge.scoring.classes import is_float
from penstock.offline.sessions import call_rows, coupling_of, loaded, signature_of
from penstock.perf.measure import Timings, speedup
from penstock.tensor import Array

_FEW_DECIDE = 0.9
"""Part of the spread that a twentieth of the samples may make up without a note. Of normal rows, they make up at most a third."""
BATCH = 64
"""Samples per call, if the rows of the model are proven to be independent."""
ORIGINAL = "original"
"""The original's name in a race, and the prefix of its name in the evidence."""


class Judgement(msgspec.Struct, frozen=True):
    """The comparison of one candidate's outputs with the original's outputs, in a few bytes per sample."""

    accuracy: Accuracy
    scores: Array
    """Scores of the samples, float32; see ``Reference.scores``."""
    divergence: Array
    """Divergences of the samples, float32; see ``Reference.divergence``."""


class Comparison(msgspec.Struct, frozen=True):
    """A candidate compared with its original: size, accuracy and speed, measured on this machine."""

    original_bytes: int
    compressed_bytes: int
    original_accuracy: float
    accuracy: Accuracy
    """Accuracy of the candidate, with its loss against the original."""
    original_ms: float
    """Median latency of one call of ``rows`` samples."""
    compressed_ms: float
    speedup: Interval
    threads: int
    rows: int
    busy: str = ""
    """Other processes that disturbed the timing, as text; empty if there were none."""
    by_size: tuple[SizeGain, ...] = ()
    """The speed at each size, if the data have samples of several sizes."""

    @property
    def size_ratio(self) -> float:
        """Size of the original divided by the size of the candidate."""
        return self.original_bytes / self.compressed_bytes


class Judge:
    """Compares candidates with ``original`` on ``data``. All models run in ``engine`` with ``threads`` threads."""

    def __init__(
        self,
        original: Artifact,
        data: Dataset,
        threads: int = 1,
        *,
        engine: str = "onnxruntime",
        contract: Contract = Contract(),  # noqa: B008 - immutable
        looks: int = 1,
    ) -> None:
        """``contract`` names the metric. Intervals are valid together for ``looks`` candidates.

        Raises InvalidModel or EngineUnavailable if the original does not load; InvalidData if there are no samples, the original's
        outputs are not finite, or the labels suit no output or are no better than chance; InvalidArgument if the contract's metric or
        output does not exist; InvalidConfig if the contract requires a proof but the metric has only approximate intervals;
        Unsupported if the outputs cannot be compared sample by sample.
        """
        if data.count == 0:
            raise InvalidData("there are no samples to judge on", "give samples that are not used for training")
        self.original, self.data, self.threads = original, data, threads
        self._engine = engine
        with loaded(original, threads, engine=engine) as model:
            self.signature = model.signature
            self.coupling = coupling_of(original, model.signature) if data.joins else ""
            """Why the original's rows may depend on each other; empty if they are proven not to, if its batch size is fixed, or if a
            sample is a whole call."""
            found = self._answers(model, original)
            self.reference = checked_reference(
                found, data.labels, contract, looks, coupling=self.coupling, groups=data.sequences
            )
        self.contract = msgspec.structs.replace(contract, cut=self.reference.choice.cut)
        """The contract, with ``cut`` set to the value in use: the contract's own, or else the one that the original's scores decide
        (0 or 0.5). None if the metric needs no cut.
        """
        self.baseline = self._judgement(self.reference.answers)
        """The original compared with itself; its loss is 0."""

    def jointly(self, looks: int) -> Judge:
        """This judge, with intervals that are valid together for ``looks`` candidates. The original is not run again."""
        judge = copy.copy(self)
        judge.reference = msgspec.structs.replace(self.reference, looks=looks)
        judge.baseline = msgspec.structs.replace(self.baseline, accuracy=judge.reference.original())
        return judge

    @property
    def metric(self) -> str:
        return self.reference.metric

    def assess(self, candidate: Artifact) -> Judgement:
        """Run ``candidate`` on all samples, and judge its outputs. Raises PenstockError if ``candidate`` fails, or its outputs differ
        in shape from the original's.
        """
        with loaded(candidate, self.threads, engine=self._engine) as model:
            return self.assess_loaded(model, candidate)

    def assess_loaded(self, model: LoadedModel, candidate: Artifact) -> Judgement:
        """Like ``assess``, for a ``candidate`` that is already loaded as ``model``, in any engine."""
        return self._judgement(self._answers(model, candidate))

    def race(self, candidates: Mapping[str, Artifact], budget_s: float, rows: int = 1) -> dict[str, Timings]:
        """Time ``candidates`` and the original (named ``ORIGINAL``) in turns, in calls of ``rows`` samples of the data's sizes."""
        calls = self.data.mix(call_rows(self.signature, rows))
        return race({ORIGINAL: self.original, **candidates}, calls, budget_s, self.threads, self._engine)

    def compare(self, candidate: Artifact, *, rows: int = 1, budget_s: float = 3.0) -> Comparison:
        """The accuracy and the speed of ``candidate``, timed with ``rows`` samples per call, or with the model's fixed batch size."""
        judgement = self.assess(candidate)
        timings = self.race({"candidate": candidate}, budget_s, rows)
        before, after = timings[ORIGINAL], timings["candidate"]
        return Comparison(
            original_bytes=self.original.size_bytes,
            compressed_bytes=candidate.size_bytes,
            original_accuracy=self.baseline.accuracy.value,
            accuracy=judgement.accuracy,
            original_ms=before.p50_ms,
            compressed_ms=after.p50_ms,
            speedup=speedup(before, after),
            threads=self.threads,
            rows=call_rows(self.signature, rows),
            busy=after.busy,
            by_size=size_gains(self.data.mix(call_rows(self.signature, rows)), before, after),
        )

    def _answers(self, model: LoadedModel, artifact: Artifact) -> Outputs:
        """The outputs of ``artifact`` as it is served: one row per call if its own rows may depend on each other."""
        is_apart = self.coupling or coupling_of(artifact, model.signature)
        return served_answers(model, self.data, 1 if is_apart else BATCH)

    def _judgement(self, outputs: Outputs) -> Judgement:
        reference = self.reference
        accuracy = reference.original() if outputs is reference.answers else reference.compare(outputs)
        return Judgement(accuracy, reference.scores(outputs).astype(np.float32), reference.divergence(outputs))


def checked_reference(
    found: Outputs,
    labels: Array | None,
    contract: Contract,
    looks: int = 1,
    who: str = "the original",
    coupling: str = "",
    groups: Array | None = None,
) -> Reference:
    """Make the reference from ``found``, the outputs of ``who``. ``coupling`` is why their rows may depend on each other, or empty.
    ``groups`` has the number of each sample's sequence.

    Raises the errors of ``Judge`` about data, labels and metric.
    """
    if broken := not_finite(found):
        raise InvalidData(f"{who}'s {broken}", "remove these samples, or repair the model")
    reference = make_reference(found, labels, contract.metric, contract.output, looks, contract.cut, groups)
    if contract.prove_accuracy and (cause := reference.choice.metric.unprovable):
        exact = ", ".join(name for name, metric in METRICS.items() if not metric.unprovable)
        raise InvalidConfig(
            f"a loss of {reference.metric} cannot be proven: {cause}",
            f"use --metric with one of {exact} (and labels if the metric needs them), or do not require a proof",
        )
    reference.check_metric()  # A metric that fails must fail before long work.
    if reference.labels is not None and not contract.trust_labels:
        check_labels(
            f"{reference.metric} of output '{reference.output}'",
            lambda shuffled: reference.value(found, shuffled),
            reference.labels,
            reference.choice.metric.higher,
            who,
            "; ".join(coupling_notes(coupling)),
        )
    return reference


def judging(reference: Reference, contract: Contract) -> tuple[str, ...]:
    """Notes that name the judged output and the metric, if the model has several outputs and ``contract`` names none, that say how
    sequences are judged, and that warn if few samples decide the spread by which fidelity is measured.
    """
    notes: list[str] = []
    if not contract.output and len(reference.answers) > 1:
        notes.append(f"judging {reference.choice}; choose with --metric-output")
    if reference.groups is not None:
        notes.append(
            f"judging {reference.units} sequence(s) of {len(reference.groups)} calls: each sequence counts as one sample, and a "
            "candidate gets the states that it returned itself"
        )
    for name in reference.choice.outputs if reference.is_fidelity else ():
        answers = reference.answers[name]
        if is_float(answers) and (share := share_of_few(answers)) > _FEW_DECIDE:
            notes.append(
                f"a twentieth of the samples makes up {share:.0%} of the spread of output '{name}', to which fidelity relates the "
                "differences: on the other samples, a candidate may differ by more than they do among themselves. For outputs of "
                "several numbers, --metric cosine counts every sample alike"
            )
    return tuple(notes)


def coupling_notes(reason: str, rows: int = 1) -> tuple[str, ...]:
    """A note on calls of ``rows`` rows, if rows may depend on each other because of ``reason``."""
    if not reason:
        return ()
    if rows == 1:
        effect = "every row was run alone, as the server runs it"
    else:
        effect = f"the answers hold for calls of {rows} rows, but the server runs every row alone"
    return (f"rows of the model may depend on each other ({reason}): {effect}",)


def size_gains(calls: Sequence[SizedCall], before: Timings, after: Timings) -> tuple[SizeGain, ...]:
    """The gain at each of the sizes of ``calls``; empty if there is only one size."""
    return tuple(
        SizeGain(
            {name: array.shape for name, array in call.inputs.items()},
            call.share,
            one.p50_ms,
            other.p50_ms,
            speedup(one, other),
        )
        for call, one, other in zip(calls, before.sizes, after.sizes, strict=bool(before.sizes))
    )


def hold_out(artifact: Artifact, data: Dataset, share: float = 0.2) -> tuple[Dataset, Dataset]:
    """Hold out a random ``share`` of ``data``, in multiples of ``artifact``'s batch size. Returns the remaining and held-out samples.

    Raises InvalidData if there are too few samples.
    """
    return data.split_shuffled(share, signature_of(artifact).smallest_batch)
