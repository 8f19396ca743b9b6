"""The accuracy and the time that a plan may spend, and their distribution over kinds of steps. Pure."""

from __future__ import annotations

import msgspec

from penstock.bundle.evidence import Accuracy
from penstock.offline.compress.table import Kind
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.sample_size import samples_needed

_SHARES: dict[Kind, float] = {"structure": 0.6, "sparsity": 0.75, "precision": 0.9}
"""Share of the allowed loss that may be used up after a step of this kind; all of it after other kinds."""

_GRACE, _MIN_GRACE_S = 0.5, 30.0
"""Time beyond the budget after which a running step is stopped: a share of the budget, and at least this many seconds."""


class Spending(msgspec.Struct, frozen=True):
    """The budget of a plan."""

    contract: Contract
    budget_s: float
    samples: int = 0
    """Number of held-out samples, if accuracy is a share of them; 0 if accuracy is continuous."""

    def allowance(self, kind: Kind) -> Contract:
        """The contract for a model after a step of ``kind`` and all steps before it.

        If any loss is allowed, one sample may be lost, because a smaller loss cannot be measured. Proof is required only if the
        samples suffice to prove it for a model that changes no answer.
        """
        asked = self.contract
        loss = _SHARES.get(kind, 1.0) * asked.max_accuracy_loss
        provable = True
        if loss > 0 and self.samples:
            loss = min(1.0, max(loss, 1 / self.samples))
            enough = samples_needed(loss, changed=0.0)
            provable = enough is not None and enough <= self.samples
        return msgspec.structs.replace(asked, max_accuracy_loss=loss, prove_accuracy=asked.prove_accuracy and provable)

    def account(self, accuracy: Accuracy) -> str:
        """A sentence on the part of the allowed loss that a model has used, and the rest."""
        allowed, loss = self.contract.max_accuracy_loss, accuracy.loss.value
        spent = max(0.0, loss)
        account = f"{spent:.2%} spent of {allowed:.2%}"
        if spent > allowed and self.samples:
            return f"{account}: one sample of {self.samples}, the smallest measurable loss"
        return f"{account}, {max(0.0, allowed - spent):.2%} left" + (f"; {-loss:.2%} gained" if loss < 0 else "")

    def is_over(self, elapsed_s: float, share: float = 1.0) -> bool:
        """True if ``share`` of the time is used, so that no new step may start."""
        return elapsed_s >= share * self.budget_s

    def is_exceeded(self, elapsed_s: float) -> bool:
        """True if a running step must stop."""
        return elapsed_s >= self.budget_s + max(_MIN_GRACE_S, _GRACE * self.budget_s)
