from __future__ import annotations

import importlib.util

import pytest

from penstock.artifact import Artifact, FileEntry, Format
from penstock.errors import InvalidModel
from penstock.offline.look.facts import TensorFacts
from penstock.offline.look.tensorflow import read
from saved_models import saved_model


def test_the_signature_operators_and_variables() -> None:
    beside = (FileEntry("variables/variables.data-00000-of-00001", 24, ""), FileEntry("assets/words.txt", 9, ""))
    found = read(Artifact(saved_model(), Format.SAVED_MODEL, "", beside=beside))
    assert found.inputs == (TensorFacts("a", "INT64", (2,)), TensorFacts("b", "FP32", (-1, 3)))
    assert found.outputs == (TensorFacts("y", "FP16", None),)
    assert found.operators == {"MatMul": 1, "Placeholder": 1, "Relu": 1}
    assert found.weight_bytes == 24
    assert found.notes == ("other signatures: train",)


@pytest.mark.parametrize("data", [b"\xff\xff", saved_model()[:-3], b"\x12\x7f"])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidModel, match="not a SavedModel"):
        read(Artifact.from_bytes(data, Format.SAVED_MODEL))


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_the_file_says_the_signature_that_the_engine_reads() -> None:
    import tensorflow_models  # noqa: PLC0415 - the package is optional
    from penstock.engines.tensorflow import TensorFlowEngine  # noqa: PLC0415

    for artifact in (tensorflow_models.linear(), tensorflow_models.fixed_batch()):
        signature, found = TensorFlowEngine().load(artifact, {}).signature, read(artifact).signature
        assert found is not None
        assert found.inputs == signature.inputs
