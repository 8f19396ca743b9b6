"""The models of the zoo, with every converter whose package is installed."""

from __future__ import annotations

import pytest

from benchmarks.zoo.catalog import models
from benchmarks.zoo.model import ZooModel
from conformance.converters import ConverterConformance

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
"""The frameworks warn when they save models."""
_FAST = ("caffe/", "onnx/", "xgboost/", "lightgbm/", "catboost/")
_MODELS = models()


@pytest.fixture(
    params=[name if name.startswith(_FAST) else pytest.param(name, marks=pytest.mark.slow) for name in _MODELS],
    scope="module",
)
def zoo_model(request: pytest.FixtureRequest) -> ZooModel:
    return _MODELS[request.param]


class TestConformance(ConverterConformance):
    pass
