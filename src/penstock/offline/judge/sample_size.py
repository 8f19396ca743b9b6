"""The number of samples that is needed to prove that a loss is within its limit, and notes on data with too few samples."""

from __future__ import annotations

from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidArgument
from penstock.offline.judge.intervals import proves_loss, tail

RATES = ("top-1", "top-5", "agreement")
"""Metrics that count each sample as right or wrong."""

_REACHABLE = 20
"""A note suggests at most this multiple of the given samples. If the loss is close to the limit, a proof may need any number."""
_MOST = 1 << 22


def samples_needed(max_loss: float, loss: float = 0.0, changed: float = 0.02, looks: int = 1) -> int | None:
    """The number of samples that proves a loss within ``max_loss`` at 95 % confidence by ``proves_loss``.

    ``loss`` is the true loss. ``changed`` is the fraction of samples that only one of the two models gets right; it is at least
    ``loss``. ``looks`` is the number of candidates that are judged on the same samples. None if ``loss`` is not below ``max_loss``, or
    so close to it that more than four million samples would be needed.
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


def too_few(samples: int, metric: str, max_loss: float, what: str, looks: int = 1) -> tuple[str, ...]:
    """A note if ``samples`` samples cannot prove a loss within ``max_loss``, even if no answer changes. The note suggests a number of
    samples; ``what`` names their kind in the note.

    There is no note for metrics that do not count hits, or for a maximum loss of 0, which no number of samples can prove.
    """
    if metric not in RATES or max_loss <= 0:
        return ()
    if proves_loss(samples, 0, 0, max_loss, tail(looks)):
        return ()
    likely, least = (samples_needed(max_loss, changed=changed, looks=looks) for changed in (0.02, 0.0))
    together = f" for {looks} candidates" if looks > 1 else ""
    note = (
        f"{samples} {what} samples cannot prove a loss within {max_loss:.2%}{together}, so losses are estimates: give at least "
        f"{least}, which suffice if no answer changes, or {likely}, which suffice if 2 % of the answers change"
    )
    return (note,)


def unproved(accuracy: Accuracy, max_loss: float) -> tuple[str, ...]:
    """A note if ``accuracy`` is within ``max_loss`` but not proven to be. The note states how many samples would prove it."""
    loss = accuracy.loss
    bound = loss.high if accuracy.bound is None else accuracy.bound
    if max_loss <= 0 or bound <= max_loss or loss.value > max_loss:
        return ()
    note = (
        f"a loss within {max_loss:.2%} is an estimate from {accuracy.samples} samples and not proven: with 95 % confidence the "
        f"loss is at most {bound:.2%}{proof_advice(accuracy, max_loss)}"
    )
    return (note,)


def proof_advice(accuracy: Accuracy, max_loss: float) -> str:
    """The number of samples that would prove the loss at the same rate of changes, as advice; empty if it is unknown."""
    if accuracy.metric not in RATES or max_loss <= 0:
        return ""
    changed = (accuracy.lost + accuracy.won) / accuracy.samples
    enough = samples_needed(max_loss, max(0.0, accuracy.loss.value), changed, accuracy.looks)
    if enough is None or enough > max(1000, _REACHABLE * accuracy.samples):
        return ""
    return f"; about {enough} samples would prove it if the estimate is correct"
