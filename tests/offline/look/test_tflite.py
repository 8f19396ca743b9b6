from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert", reason="the extra penstock[tflite] is not installed")

import contextlib

import tflite_models
from penstock.artifact import Artifact, Format
from penstock.engines.tflite import TfLiteEngine
from penstock.errors import InvalidModel
from penstock.offline.look.tflite import read
from penstock.tensor import DataType


@pytest.mark.parametrize(
    "artifact",
    [
        tflite_models.linear(),
        tflite_models.fixed_batch(),
        *(
            tflite_models.identity(kind, signature)
            for kind in (DataType.FP32, DataType.INT64)
            for signature in (True, False)
        ),
    ],
)
def test_the_file_says_the_signature_that_the_engine_reads(artifact: Artifact) -> None:
    assert read(artifact).signature == TfLiteEngine().load(artifact, {"threads": 1}).signature


def test_operators_and_parameters() -> None:
    found = read(tflite_models.linear())
    assert found.operators == {"FULLY_CONNECTED": 1}
    assert (found.parameters, found.weight_bytes, found.quantised) == (6, 24, "")


def test_custom_operators_are_read_by_their_name() -> None:
    value = (DataType.FP32, (-1, 2))
    found = read(tflite_models.artifact([("Frobnicate", ["x"], ["y"], None)], {"x": value}, {"y": value}))
    assert found.operators == {"Frobnicate": 1}


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModel, match="not a TensorFlow Lite model"):
        read(Artifact.from_bytes(b"not a model", Format.TFLITE))


def test_a_damaged_file_ends_with_an_error_or_with_facts() -> None:
    good, random = tflite_models.linear().data, np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(good)
        for place in random.integers(8, len(data), 5):
            data[place] = random.integers(256)
        with contextlib.suppress(InvalidModel):
            read(Artifact.from_bytes(bytes(data), Format.TFLITE))
