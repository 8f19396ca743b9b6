"""The number of samples that a decision about accuracy needs, and notes on decisions with too few."""

from __future__ import annotations

from penstock.bundle.evidence import Accuracy
from penstock.errors import InvalidArgument
from penstock.offline.judge.metrics import matched_pairs

_REACHABLE = 20
"""A note suggests at most this many times the samples; a loss close to the bound would need an arbitrarily large number."""


def samples_needed(max_loss: float, loss: float = 0.0, changed: float = 0.02) -> int | None:
    """The number of samples that proves a loss within ``max_loss`` at 95 % confidence, by the upper bound of ``paired_interval``.

    ``loss`` is the true loss. ``changed`` is the fraction of samples that only one of the two models gets right; it is at least as
    large as the loss. All arguments are fractions. None if no number of samples suffices, because the loss is not below
    ``max_loss``.
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
        return matched_pairs(count, count * loss, count * changed).high <= max_loss

    few, enough = 0, 1
    while not proves(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if proves(middle) else (middle, enough)
    return enough


def too_few(samples: int, metric: str, max_loss: float, what: str) -> tuple[str, ...]:
    """A note if ``samples`` samples of the kind ``what`` cannot prove a loss within ``max_loss``, whatever the result. It states a
    sufficient number.

    No note for fidelity, which does not count hits, or for a maximum loss of 0, which no number of samples can prove.
    """
    if metric == "fidelity" or max_loss <= 0:
        return ()
    likely, least = samples_needed(max_loss), samples_needed(max_loss, changed=0.0)
    if likely is None or least is None or samples >= least:
        return ()
    note = (
        f"{samples} {what} samples cannot prove a loss within {max_loss:.2%}, so losses are estimates: give at least {least}, "
        f"which suffice if no answer changes, or {likely}, which suffice if 2 % of the answers change"
    )
    return (note,)


def unproved(accuracy: Accuracy, max_loss: float) -> tuple[str, ...]:
    """A note if ``accuracy`` is within ``max_loss`` but this is not proven. It states the number of samples that would prove it."""
    loss = accuracy.loss
    if accuracy.metric == "fidelity" or max_loss <= 0 or loss.high <= max_loss or loss.value > max_loss:
        return ()
    enough = samples_needed(max_loss, max(0.0, loss.value))
    is_reachable = enough is not None and enough <= _REACHABLE * accuracy.samples
    advice = f"; about {enough} samples would prove it if the estimate is correct" if is_reachable else ""
    note = (
        f"a loss within {max_loss:.2%} is an estimate from {accuracy.samples} samples and not proven: with 95 % confidence the "
        f"loss is at most {loss.high:.2%}{advice}"
    )
    return (note,)
