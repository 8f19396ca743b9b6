"""What a plan may spend: accuracy, shared out over kinds of steps, and time. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.offline.tune.contract import Contract

Kind = Literal["structure", "sparsity", "precision", "sharing"]

_SHARES: dict[Kind, float] = {"structure": 0.5, "sparsity": 0.6, "precision": 0.9, "sharing": 1.0}
"""How much of the loss allowed may be spent when a step of a kind is done: what comes later finds something left."""


class Spending(msgspec.Struct, frozen=True):
    """The account of a plan."""

    contract: Contract
    budget_s: float

    def allowance(self, kind: Kind) -> Contract:
        """The contract that a model must meet after a step of ``kind``, all before it included."""
        return msgspec.structs.replace(self.contract, max_accuracy_loss=_SHARES[kind] * self.contract.max_accuracy_loss)

    def is_over(self, elapsed_s: float, expected_s: float = 0.0) -> bool:
        """Whether a step that takes ``expected_s`` no longer fits."""
        return elapsed_s + expected_s > self.budget_s
