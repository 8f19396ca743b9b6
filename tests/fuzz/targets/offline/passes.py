"""Fuzzes the passes: none may be undone, and the optimised model's outputs are the original's."""

from __future__ import annotations

from penstock.artifact import Artifact
from penstock.offline.optimize.optimizer import optimize
from tests.fuzz.offline import ModelTarget, agree
from tests.random_models import RandomModel


class PassesTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        made, report = optimize(artifact)
        wrong = {name: reason for name, reason in report.reverted.items() if "unverifiable" not in reason}
        assert not wrong, wrong
        agree(artifact, made, model)
