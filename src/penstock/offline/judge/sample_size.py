"""The number of samples needed to prove that a loss is within its limit, and notes on data with too few samples."""

from __future__ import annotations

from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidArgument
from penstock.measurement import percent, percent_beside
from penstock.offline.judge.intervals import bets_needed, proves_loss, tail
from penstock.offline.judge.metric_table import METRICS

RATES = ("top-1", "top-5", "agreement")
"""Metrics that count each sample as right or wrong."""

_REACHABLE = 20
"""A note suggests at most this multiple of the given samples. If the loss is close to the limit, a proof may need any number."""
_MOST = 1 << 22


def samples_needed(max_loss: float, loss: float = 0.0, changed: float = 0.02, looks: int = 1) -> int | None:
    """The number of samples with which ``proves_loss`` can prove a loss within ``max_loss`` at 95 % confidence.

    ``loss`` is the true loss. ``changed`` is the fraction of samples that only one of the two models gets right; it is at least
    ``loss``. ``looks`` is the number of candidates that are judged on the same samples. None if ``loss`` is not below ``max_loss``, or
    if more than four million samples would be needed.
    """
    if not 0 < max_loss <= 1 or not -1 <= loss <= 1 or not 0 <= changed <= 1:
        raise InvalidArgument(
            f"the allowed loss {max_loss}, the loss {loss} or the share of changed samples {changed} is not a fraction",
            "write one percentage point as 0.01; the allowed loss must be above 0",
        )
    if loss >= max_loss:
        return None
    changed = max(changed, abs(loss))

    def proves(count: int) -> bool:
        lost, won = round(count * (changed + loss) / 2), round(count * (changed - loss) / 2)
        return proves_loss(count, lost, won, max_loss, tail(looks))

    few, enough = 0, 1
    while not proves(enough):
        few, enough = enough, 2 * enough
        if enough > _MOST:
            return None
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if proves(middle) else (middle, enough)
    return enough


def too_few(
    samples: int, metric: str, max_loss: float, what: str, looks: int = 1, *, prove: bool = False
) -> tuple[str, ...]:
    """A note if ``samples`` samples cannot prove a loss within ``max_loss``, even if no output changes. The note suggests a number of
    samples and calls them ``what``. ``prove`` is True if the contract requires a proof.

    There is no note if a proof is impossible, because of the metric or because the maximum loss is 0.
    """
    if max_loss <= 0 or _width(metric) is None:
        return ()
    likely, least = (_needed(metric, max_loss, changed=changed, looks=looks) for changed in (0.02, 0.0))
    if least is None or least <= samples:
        return ()
    together = f" for {looks} candidates" if looks > 1 else ""
    effect = (
        "--prove-accuracy rejects every candidate that is not more accurate than the original"
        if prove
        else "losses are estimates"
    )
    many = f", or {likely}, which suffice if 2 % of the answers change" if metric in RATES else ""
    note = (
        f"{samples} {what} samples cannot prove a loss within {percent(max_loss)}{together}, so {effect}: give at least "
        f"{least}, which suffice if no answer changes{many}"
    )
    return (note,)


def unproved(accuracy: Accuracy, max_loss: float) -> tuple[str, ...]:
    """A note if the loss is within ``max_loss``, but not proven. The note states how many samples a proof needs."""
    loss = accuracy.loss
    bound = loss.high if accuracy.bound is None else accuracy.bound
    if max_loss <= 0 or bound <= max_loss or loss.value > max_loss:
        return ()
    about = "" if _width(accuracy.metric) else "about "
    note = (
        f"a loss within {percent(max_loss)} is an estimate from {accuracy.samples} samples and not proven: with {about}95 % "
        f"confidence the loss is at most {percent_beside(bound, max_loss)}{proof_advice(accuracy, max_loss)}"
    )
    return (note,)


def proof_advice(accuracy: Accuracy, max_loss: float) -> str:
    """The end of a sentence: how many samples would prove the loss if the estimate is correct, or why a number is not possible."""
    reason = ""
    if _width(accuracy.metric) is None:
        reason = f"a loss of {accuracy.metric} cannot be proven"
    elif max_loss <= 0:
        reason = "the limit is 0"
    elif accuracy.loss.value >= max_loss:
        reason = "the estimate is not below the limit"
    else:
        changed = (accuracy.lost + accuracy.won) / accuracy.samples
        enough = _needed(accuracy.metric, max_loss, accuracy.loss.value, changed, accuracy.spread, accuracy.looks)
        most = max(1000, _REACHABLE * accuracy.samples)
        if enough is not None and enough > most:
            return f"; more than {most} samples would be needed to prove it"
        if enough is not None:
            return f"; about {max(enough, accuracy.samples + 1)} samples would prove it if the estimate is correct"
        reason = "the estimate is too close to the limit"
    return f"; no number of samples can be named that would prove it, because {reason}"


def _needed(
    metric: str, max_loss: float, loss: float = 0.0, changed: float = 0.0, spread: float = 0.0, looks: int = 1
) -> int | None:
    """The number of samples that proves a loss of ``metric`` within ``max_loss``, if the changes are as estimated."""
    if metric in RATES:
        return samples_needed(max_loss, loss, changed, looks)
    return bets_needed(max_loss, loss, spread, tail(looks), _width(metric) or 1.0)


def _width(metric: str) -> float | None:
    """The largest loss of a sample by ``metric``; None if a loss of ``metric`` cannot be proven."""
    known = METRICS.get(metric)
    return None if known is None or known.unprovable or known.span is None else known.span[1] - known.span[0]
