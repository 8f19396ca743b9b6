"""The budget of a plan: the permitted loss of accuracy and the available time."""

from __future__ import annotations

import msgspec

from penstock.bundle.evidence import Accuracy
from penstock.measurement import percent, percent_beside
from penstock.offline.compress.table import Kind
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.sample_size import samples_needed

_SHARES: dict[Kind, float] = {"structure": 0.6, "sparsity": 0.75, "precision": 0.9}
"""After a step of this kind, a model may have used at most this fraction of the allowed loss. After a step of any other kind, it may
have used the whole allowed loss."""

_GRACE, _MIN_GRACE_S = 0.5, 30.0
"""After the budget is used up, a running step may continue for ``_GRACE`` times the budget, or ``_MIN_GRACE_S`` seconds if longer."""


class Spending(msgspec.Struct, frozen=True):
    """The budget of a plan."""

    contract: Contract
    budget_s: float
    samples: int = 0
    """Number of held-out samples if accuracy is a proportion of them; 0 if accuracy is continuous."""

    def allowance(self, kind: Kind) -> Contract:
        """The contract for a model after a step of ``kind``. It limits the total loss of this step and all earlier steps.

        If any loss is allowed, the loss of one sample is allowed too, because a smaller loss cannot be measured. ``prove_accuracy``
        applies only if there are enough samples to prove that a model with unchanged outputs meets the contract.
        """
        asked = self.contract
        share = _SHARES.get(kind, 1.0)
        loss = share * asked.max_accuracy_loss
        provable = True
        if loss > 0 and self.samples:
            loss = min(1.0, max(loss, 1 / self.samples))
            enough = samples_needed(loss, changed=0.0)
            provable = enough is not None and enough <= self.samples
        return msgspec.structs.replace(
            asked,
            max_accuracy_loss=loss,
            max_output_error=share * asked.max_output_error,
            prove_accuracy=asked.prove_accuracy and provable,
        )

    def account(self, accuracy: Accuracy) -> str:
        """A sentence that states the used and the remaining part of the allowed loss."""
        allowed, loss = self.contract.limit(accuracy.metric), accuracy.loss.value
        spent = max(0.0, loss)
        account = f"{percent_beside(spent, allowed)} spent of {percent(allowed)}"
        if spent > allowed and self.samples:
            return f"{account}: one sample of {self.samples}, the smallest measurable loss"
        return f"{account}, {max(0.0, allowed - spent):.2%} left" + (f"; {-loss:.2%} gained" if loss < 0 else "")

    def is_over(self, elapsed_s: float, share: float = 1.0) -> bool:
        """True if the fraction ``share`` of the time is used up, so that no new step may start."""
        return elapsed_s >= share * self.budget_s

    def is_exceeded(self, elapsed_s: float) -> bool:
        """True if a running step must stop."""
        return elapsed_s >= self.budget_s + max(_MIN_GRACE_S, _GRACE * self.budget_s)
