from __future__ import annotations

import numpy as np
import pytest

import models
import networks
from penstock.dataset import make_dataset
from penstock.errors import Unsupported
from penstock.offline.compress.method import StepContext
from penstock.offline.compress.ptq.preparation import check_float, placed, prepared
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement

DATA = make_dataset({"x": np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)}, None)


def test_a_model_without_weights_cannot_be_quantised() -> None:
    check_float(networks.mlp())
    with pytest.raises(Unsupported, match="no operator to quantise"):
        check_float(models.sum_and_difference())


def test_a_placement_is_timed_once_for_each_model() -> None:
    model = networks.mlp()
    context = StepContext(model, model, DATA)
    assert placed(model, context, "wide", 1, 0.05) is QdqPlacement.WIDE
    assert not context.placements
    found = placed(model, context, "fastest", 1, 0.05)
    assert context.placements == {model.digest: found}
    context.placements[model.digest] = QdqPlacement.WIDE
    assert placed(model, context, "fastest", 1, 0.05) is QdqPlacement.WIDE


def test_channels_stay_without_equalisation() -> None:
    model = networks.mlp()
    context = StepContext(model, model, DATA)
    assert prepared(model, context, equalize=False) is model
    assert prepared(model, context, equalize=True).provenance
