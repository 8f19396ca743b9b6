from __future__ import annotations

import importlib.util

import pytest

from penstock.artifact import Artifact, FileEntry, Format
from penstock.errors import InvalidModel
from penstock.offline.look.facts import TensorFacts
from penstock.offline.look.tensorflow import read
from penstock.protocol.varint import write_varint


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a protobuf message."""
    if isinstance(value, int):
        return write_varint(number << 3) + write_varint(value % (1 << 64))
    data = value.encode() if isinstance(value, str) else value
    return write_varint(number << 3 | 2) + write_varint(len(data)) + data


def tensor(kind: int, *dims: int) -> bytes:
    return field(2, kind) + field(3, b"".join(field(2, field(1, size)) for size in dims))


def entry(name: str, value: bytes) -> bytes:
    return field(1, name) + field(2, value)


def saved_model() -> bytes:
    """A graph of a MatMul and a function with a Relu; inputs b FP32 (-1, 3) and a INT64 (2), output y of unknown rank."""
    signature = field(1, entry("b", tensor(1, -1, 3))) + field(1, entry("a", tensor(9, 2)))
    signature += field(2, entry("y", field(2, 19) + field(3, field(3, 1))))
    nodes = field(1, field(1, "m") + field(2, "MatMul")) + field(1, field(1, "p") + field(2, "Placeholder"))
    library = field(2, field(1, field(3, field(1, "r") + field(2, "Relu"))))
    meta = field(2, nodes + library) + field(5, entry("serving_default", signature)) + field(5, entry("train", b""))
    return field(1, 1) + field(2, meta)


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
