"""From a model of each framework to answers: convert, build, serve, ask with Triton's client."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.zoo.catalog import models
from commands import Command
from served_conversions import assert_served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
"""The frameworks warn when they save models."""
_MODELS = models()


@pytest.mark.parametrize(
    "name",
    [
        "caffe/lenet",
        "catboost/classes",
        "lightgbm/classes",
        "onnx/upsample_7",
        "sklearn/logistic",
        "sklearn/table",
        "tensorflow/graph_cnn",
        "tensorflow/keras_two_inputs",
        "tensorflow/saved_linear",
        "tensorflow/saved_words",
        "tflite/lite_mlp",
        "xgboost/classes",
    ],
)
def test_the_server_gives_the_answers_of_the_framework(penstock: Command, name: str, tmp_path: Path) -> None:
    if name not in _MODELS:
        pytest.skip(f"the framework of {name} is not installed")
    assert_served(penstock, _MODELS[name], _MODELS[name].make(tmp_path), tmp_path)
