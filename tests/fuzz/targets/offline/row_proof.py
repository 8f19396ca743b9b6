"""Fuzzes the proof that rows are independent, on models of the offline half: merged rows have the outputs of rows alone."""

from __future__ import annotations

from penstock.artifact import Artifact
from penstock.offline.sessions import signature_of
from penstock.rows.proof import unproven
from tests.fuzz.offline import ModelTarget, optimized
from tests.random_models import RandomModel
from tests.row_graphs import apart


class RowProofTarget(ModelTarget):
    """See ``Target``."""

    def check(self, artifact: Artifact, model: RandomModel) -> None:
        made = optimized(artifact)
        signature = signature_of(made)
        if signature.batchable and not unproven(made, signature):
            assert apart(made) == ""
