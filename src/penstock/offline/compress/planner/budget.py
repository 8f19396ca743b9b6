"""What a plan may spend: accuracy, shared out over kinds of steps, and time. Pure."""

from __future__ import annotations

import msgspec

from penstock.bundle.evidence import Accuracy
from penstock.offline.compress.table import Kind
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.sample_size import samples_needed

_SHARES: dict[Kind, float] = {"structure": 0.6, "sparsity": 0.75, "precision": 0.9}
"""Share of the allowed loss that may be spent after a step of a kind, so that later steps have some left; else all of it."""

_PATIENCE, _LEAST_PATIENCE_S = 0.5, 30.0
"""A running step may exceed the budget by this share of it, and by at least this many seconds; then it is broken off."""


class Spending(msgspec.Struct, frozen=True):
    """The account of a plan."""

    contract: Contract
    budget_s: float
    samples: int = 0
    """Held out, on which accuracy moves in steps of one sample; 0 where it moves smoothly."""

    def allowance(self, kind: Kind) -> Contract:
        """The contract that a model must meet after a step of ``kind``, all before it included.

        What is less than a sample cannot be measured, so one may be lost, unless none at all. Proof is demanded only where a
        model that changes no answer could give it.
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
        """What a model has spent of the contract, and what is left, as a sentence."""
        allowed, loss = self.contract.max_accuracy_loss, accuracy.loss.value
        spent = max(0.0, loss)
        account = f"{spent:.2%} spent of {allowed:.2%}"
        if spent > allowed and self.samples:
            return f"{account}: one sample of {self.samples}, the least that can be measured"
        return f"{account}, {max(0.0, allowed - spent):.2%} left" + (f"; {-loss:.2%} gained" if loss < 0 else "")

    def is_over(self, elapsed_s: float, share: float = 1.0) -> bool:
        """Whether ``share`` of the time is spent, so that nothing new is begun."""
        return elapsed_s >= share * self.budget_s

    def is_exceeded(self, elapsed_s: float) -> bool:
        """Whether so much more is spent that a step which has begun is broken off."""
        return elapsed_s >= self.budget_s + max(_LEAST_PATIENCE_S, _PATIENCE * self.budget_s)
