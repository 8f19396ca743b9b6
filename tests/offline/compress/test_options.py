"""Bounds that are written in annotations hold."""

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
        (FitOptions(epochs=math.nan), r"training cannot use epochs=nan \(epochs > 0\)"),
        (FitOptions(epochs=math.inf), "training cannot use epochs=inf"),
        (FitOptions(optimizer="adam"), "training cannot use optimizer='adam'"),
        (DistillOptions(fit=FitOptions(seed=-1)), "distillation cannot use fit.seed=-1"),
        (DistillOptions(hints={"a": 1}), "distillation cannot use hints"),
        (ShrinkOptions(share=0.0), r"shrinking cannot use share=0.0 \(share > 0\)"),
        (ShrinkOptions(rounds=101), "shrinking cannot use rounds=101"),
        (IterativeOptions(levels=0), "pruning cannot use levels=0"),
        (IterativeOptions(PruneOptions(GlobalRule(sparsity=2.0))), "pruning cannot use goal.rule.sparsity=2.0"),
    ],
    ids=str,
)
def test_what_an_annotation_rules_out_is_refused(options: Options, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        options.check()
