"""The bounds in annotations are enforced."""

from __future__ import annotations

import math

import pytest

from penstock.errors import InvalidConfig
from penstock.offline.compress.options import Options
from penstock.offline.compress.pruning.iterative import IterativeOptions
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions
from penstock.offline.compress.pruning.structured.recovery import ShrinkOptions
from penstock.offline.compress.pruning.structured.search import NarrowOptions
from penstock.offline.compress.training.distill import DistillOptions
from penstock.offline.compress.training.options import FitOptions
from penstock.offline.compress.training.qat import QatOptions


@pytest.mark.parametrize(
    "kind", [FitOptions, DistillOptions, QatOptions, NarrowOptions, ShrinkOptions, IterativeOptions]
)
def test_defaults_hold(kind: type[Options]) -> None:
    kind().check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FitOptions(epochs=math.nan), "epochs must be greater than 0, got nan"),
        (FitOptions(epochs=math.inf), "epochs must be at most 1e.12, got inf"),
        (FitOptions(optimizer="adam"), "optimizer must be one of adamw, sgd, got 'adam'"),
        (DistillOptions(fit=FitOptions(seed=-1)), "fit.seed must be at least 0, got -1"),
        (DistillOptions(hints={"a": 1}), "hints"),
        (ShrinkOptions(share=0.0), "share must be greater than 0%, got 0%"),
        (ShrinkOptions(rounds=101), "rounds must be at most 100, got 101"),
        (IterativeOptions(levels=0), "levels must be at least 1, got 0"),
        (IterativeOptions(PruneOptions(GlobalRule(sparsity=2.0))), "goal.rule.sparsity must be at most 1, got 2"),
    ],
    ids=str,
)
def test_what_an_annotation_rules_out_is_refused(options: Options, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        options.check()
