from __future__ import annotations

from math import inf
from pathlib import Path

import msgspec
import onnx
import pytest

import models
from penstock.artifact import Artifact, Format
from penstock.offline.convert.certificate import (
    METADATA_KEY,
    Certificate,
    Divergence,
    attach,
    certificate_of,
    stored_certificate,
)

HOLDS = Certificate(
    True, 12, 1e-7, 2e-6, format="keras", framework="tensorflow 2.20", exporter="tf2onnx 1.17", opset=21
)
FAILS = Certificate(False, 3, inf, 1e-6, Divergence("Conv_3", "conv2d", inf, "net.py:12", "mean 1", "mean 2"))


@pytest.mark.parametrize("certificate", [HOLDS, FAILS])
def test_a_certificate_is_read_back(certificate: Certificate) -> None:
    made = attach(models.linear(3, 2), certificate)
    found = certificate_of(made)
    assert found is not None
    assert msgspec.structs.replace(found, graph_digest="") == certificate
    onnx.checker.check_model(onnx.load_model_from_string(made.data))


def test_a_later_certificate_replaces_an_earlier_one() -> None:
    made = attach(attach(models.linear(3, 2), FAILS), HOLDS)
    (entry,) = onnx.load_model_from_string(made.data).metadata_props
    assert entry.key == METADATA_KEY
    assert certificate_of(made).holds  # type: ignore[union-attr]


def test_other_metadata_stays_and_is_not_certified() -> None:
    proto = onnx.load_model_from_string(models.linear(3, 2).data)
    onnx.helper.set_model_props(proto, {"author": "me"})
    made = attach(Artifact.from_bytes(proto.SerializeToString()), HOLDS)
    proto = onnx.load_model_from_string(made.data)
    assert {entry.key for entry in proto.metadata_props} == {"author", METADATA_KEY}
    proto.producer_name = "another tool"
    assert certificate_of(Artifact.from_bytes(proto.SerializeToString())) is not None


def test_a_changed_graph_has_no_certificate() -> None:
    proto = onnx.load_model_from_string(attach(models.linear(3, 2), HOLDS).data)
    proto.graph.initializer[0].raw_data = b"\0" * len(proto.graph.initializer[0].raw_data)
    changed = Artifact.from_bytes(proto.SerializeToString())
    assert certificate_of(changed) is None
    assert stored_certificate(changed) is not None


def test_external_weights_are_certified(tmp_path: Path) -> None:
    made = attach(Artifact.from_file(models.external_linear(tmp_path)), HOLDS)
    assert made.path is not None
    made.path.write_bytes(made.data)
    assert certificate_of(Artifact.from_file(made.path)) is not None
    weights = made.path.parent / made.beside[0].path
    weights.write_bytes(bytes(byte ^ 1 for byte in weights.read_bytes()))
    assert certificate_of(Artifact.from_file(made.path)) is None


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"x" * 100, b"\x72\x04\x0a\xff\x01\x02"])
def test_no_certificate_in_garbage(data: bytes) -> None:
    assert certificate_of(Artifact.from_bytes(data)) is None
    assert certificate_of(Artifact.from_bytes(data, Format.TFLITE)) is None


def test_every_flipped_byte_of_the_certificate_is_read_without_an_exception() -> None:
    plain = models.linear(3, 2).data
    made = attach(models.linear(3, 2), FAILS).data
    for position in range(len(plain), len(made)):
        changed = bytearray(made)
        changed[position] ^= 0x81
        stored_certificate(Artifact.from_bytes(bytes(changed)))
