from __future__ import annotations

import pytest

from benchmarks.zoo.onnx import faulty
from faulty_models import relu_tanh, runs
from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.convert.repairs import repair


def test_a_model_without_faults_stays_the_same() -> None:
    artifact = relu_tanh()
    assert repair(artifact) == (artifact, ())


def test_many_faults_at_once() -> None:
    repaired, done = repair(Artifact.from_bytes(faulty().SerializeToString()))
    assert len(done) == 6
    assert runs(repaired).shape == (2, 3, 12, 16)


def test_a_file_that_is_no_model() -> None:
    with pytest.raises(InvalidModel, match="not an ONNX model"):
        repair(Artifact.from_bytes(b"\xff\xff\xff"))
