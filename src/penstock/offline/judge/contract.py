"""The contract: the user's requirements for accuracy and latency, and the check of a candidate against them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from penstock.bundle.evidence import Accuracy, CandidateRecord
from penstock.bundle.titles import title
from penstock.errors import ContractUnmet, InvalidConfig
from penstock.measurement import Interval, percent, percent_beside
from penstock.offline.judge.sample_size import proof_advice

FASTER = 1.01
"""A candidate counts as faster only if the lower bound of its speed-up exceeds this value."""


_ROUNDING = 1e-12


class Contract(msgspec.Struct, frozen=True):
    """Requirements for accuracy and latency, and the metric of accuracy."""

    max_accuracy_loss: float = 0.01
    """Maximum loss of accuracy against the original, as a fraction (0.01 is one percentage point)."""
    p99_ms: float | None = None
    """Maximum p99 latency of a single forward call, in milliseconds; None for no limit."""
    prove_accuracy: bool = False
    """Require that the upper bound of the 95 % interval of the loss is within ``max_accuracy_loss``, not only the estimate."""

    max_output_error: float = 0.1
    """Maximum deviation of any output from the original's output: the fraction of changed classes, or the error relative to the
    output's spread. If the metric is fidelity, this limit replaces ``max_accuracy_loss``."""
    metric: str = ""
    """Name of the metric, or ``module:function``. Empty: a metric that suits the model's outputs and the labels."""
    output: str = ""
    """The output that the metric judges. Empty: the first output that suits the metric."""
    cut: float | None = None
    """The score above which a sample is of class 1, if the output has one score per sample. None: 0.5 if all of the original's scores
    are from 0 to 1, otherwise 0."""
    trust_labels: bool = False
    """Accept labels on which the original is no better than chance."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_accuracy_loss <= 1:
            raise InvalidConfig(
                f"the allowed accuracy loss must be between 0 % and 100 %, not {percent(self.max_accuracy_loss, 1)}",
                "give a fraction, e.g. 1% or 0.01",
            )
        if not self.max_output_error >= 0:
            raise InvalidConfig(
                f"the output error allowed must be at least 0 %, not {percent(self.max_output_error, 1)}",
                "give a fraction, e.g. 10% or 0.1",
            )
        if self.p99_ms is not None and not (self.p99_ms > 0 and math.isfinite(self.p99_ms)):
            raise InvalidConfig(
                f"the p99 latency must be a positive time, not {self.p99_ms} ms", "omit it to set no limit"
            )

    def limit(self, metric: str) -> float:
        """The maximum loss for the metric ``metric``."""
        return self.max_output_error if metric == "fidelity" else self.max_accuracy_loss

    def accuracy_objection(self, accuracy: Accuracy) -> str:
        """Why ``accuracy`` violates the contract; empty if it meets the contract."""
        return accuracy.broken or self._loss_objection(accuracy) or self._deviation_objection(accuracy)

    def _loss_objection(self, accuracy: Accuracy) -> str:
        loss, limit = accuracy.loss, self.limit(accuracy.metric)
        bound = self.bound(accuracy)
        if bound <= limit + _ROUNDING:
            return ""
        what, advice = ("may lose up to", proof_advice(accuracy, limit)) if self.prove_accuracy else ("loses", "")
        return (
            f"{what} {percent_beside(bound, limit)} {accuracy.metric}, {percent(limit)} are allowed "
            f"(95 % interval {loss.low:+.2%} … {loss.high:+.2%}, {accuracy.samples} samples{advice})"
        )

    def _deviation_objection(self, accuracy: Accuracy) -> str:
        if accuracy.unjudged_error <= self.max_output_error + _ROUNDING:
            return ""
        found, limit = accuracy.unjudged_error, self.max_output_error
        return (
            f"output '{accuracy.unjudged_output}' differs by {percent_beside(found, limit, 1)} from the original's, "
            f"{percent(limit, 0)} are allowed"
        )

    def bound(self, accuracy: Accuracy) -> float:
        """The loss to compare with the limit: the upper bound with ``prove_accuracy``, otherwise the estimate."""
        proven = accuracy.loss.high if accuracy.bound is None else accuracy.bound
        return proven if self.prove_accuracy else accuracy.loss.value

    def latency_objection(self, p99_ms: float) -> str:
        """Why a p99 of ``p99_ms`` violates the contract; empty if it meets the contract."""
        if self.p99_ms is None or p99_ms <= self.p99_ms:
            return ""
        return f"p99 {p99_ms:.3g} ms, {self.p99_ms:.3g} ms are allowed (--p99)"


def is_faster(speedup: Interval) -> bool:
    """True if a speed-up is proven at 95 % confidence."""
    return speedup.low > FASTER


def unproven_speed(than: str, speedup: Interval | None, busy: str) -> str:
    """The verdict on a candidate that is not provably faster than the model ``than``. ``busy`` describes other load on the machine."""
    if speedup is not None and speedup.high < 1:
        return f"slower than {than}{while_busy(busy)}"
    return f"not measurable here, the machine was busy ({busy})" if busy else f"not provably faster than {than}"


def while_busy(busy: str) -> str:
    """A caveat about a measured speed; empty if there was no other load on the machine."""
    return f", measured while the machine was busy ({busy})" if busy else ""


def unmet(contract: Contract, records: Sequence[CandidateRecord]) -> ContractUnmet:
    """The error if none of ``records`` meets the contract. The message states the missed limit and the nearest feasible limit."""
    measured = [record for record in records if record.accuracy is not None and record.p99_ms is not None]
    if not measured:
        return ContractUnmet("no candidate could be measured", "see the reasons: `penstock build --json` lists them")
    accurate = [record for record in measured if not contract.accuracy_objection(_accuracy(record))]
    quick = [record for record in measured if not contract.latency_objection(_p99(record))]
    unproven = [record for record in accurate if record in quick]
    accurate, quick = ([r for r in some if r not in unproven] for some in (accurate, quick))
    ways = []
    if accurate:
        nearest = min(accurate, key=_p99)
        ways.append(f"--p99 {_round_up(_p99(nearest)):g}ms would suffice ({title(nearest)})")
    others = quick or ([] if accurate or unproven else measured)
    if kindest := min(others, key=lambda record: _least(contract, record), default=None):
        ways += _concessions(contract, kindest)
    if unproven:
        binding = f"latency: only {title(unproven[0])} is within the limit, perhaps by chance, since it is not provably faster"
    elif accurate and not quick:
        quickest = min(_p99(record) for record in measured)
        binding = f"latency: the lowest p99 is {quickest:.3g} ms, but at most {contract.p99_ms:g} ms is allowed"
    elif quick and not accurate:
        best = min(measured, key=lambda record: _least(contract, record))
        binding = f"accuracy: the most accurate candidate {contract.accuracy_objection(_accuracy(best))}"
    elif accurate:
        binding = "accuracy and latency: the accurate candidates are too slow, and the fast ones are too inaccurate"
    else:
        binding = "every candidate is both too inaccurate and too slow"
    return ContractUnmet(f"no candidate meets the contract; {binding}", "; ".join(ways))


def _accuracy(record: CandidateRecord) -> Accuracy:
    assert record.accuracy is not None
    return record.accuracy


def _p99(record: CandidateRecord) -> float:
    assert record.p99_ms is not None
    return record.p99_ms


def _least(contract: Contract, record: CandidateRecord) -> tuple[bool, float, float]:
    """The sort key of candidates by accuracy: broken candidates last, then by loss, then by deviation."""
    accuracy = _accuracy(record)
    return bool(accuracy.broken), contract.bound(accuracy), accuracy.unjudged_error


def _concessions(contract: Contract, record: CandidateRecord) -> list[str]:
    """The options with the limits that ``record`` would meet, as one text for the command line; empty if its outputs are broken, or if
    a limit would exceed 100 %.
    """
    accuracy = _accuracy(record)
    if accuracy.broken:
        return []
    needed = [f"--p99 {_round_up(_p99(record)):g}ms"] if contract.latency_objection(_p99(record)) else []
    exceeded = []
    if (bound := contract.bound(accuracy)) > contract.limit(accuracy.metric):
        exceeded.append(("--max-output-error" if accuracy.metric == "fidelity" else "--max-accuracy-loss", bound))
    if accuracy.unjudged_error > contract.max_output_error:
        exceeded.append(("--max-output-error", accuracy.unjudged_error))
    if any(value > 1 for _, value in exceeded):
        return []
    needed += [f"{option} {_percent(value)}" for option, value in exceeded]
    return [f"{' '.join(needed)} would suffice ({title(record)})"]


def _percent(value: float) -> str:
    return f"{min(100.0, _round_up(100 * value)):g}%"


def _round_up(value: float) -> float:
    """``value`` > 0 plus a tenth for the noise of the next measurement, rounded up to two significant digits."""
    value *= 1.1
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit - 1e-9) * unit
