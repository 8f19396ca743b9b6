from __future__ import annotations

import pytest

pytest.importorskip("openvino", reason="the extra penstock[openvino] is not installed")

import openvino_models
from penstock.artifact import Artifact, Format
from penstock.engines.openvino import OpenVinoEngine
from penstock.errors import InvalidModel
from penstock.offline.look.openvino import read
from penstock.tensor import DataType

KINDS = [kind for kind in DataType if kind not in (DataType.BYTES, DataType.UINT16)]


@pytest.mark.parametrize(
    "artifact",
    [
        *(openvino_models.identity(kind) for kind in (DataType.FP32, DataType.INT64, DataType.BOOL, DataType.UINT8)),
        openvino_models.linear(),
        openvino_models.fixed_batch(),
        openvino_models.dynamic_image(),
        openvino_models.sum_and_difference(),
        openvino_models.increment(DataType.INT32),
    ],
)
def test_the_file_says_the_signature_that_the_engine_reads(artifact: Artifact) -> None:
    assert read(artifact).signature == OpenVinoEngine().load(artifact, {"threads": 1}).signature


def test_operators_and_parameters() -> None:
    found = read(openvino_models.linear())
    assert found.operators == {"MatMul": 1}
    assert (found.parameters, found.weight_bytes) == (6, 24)
    assert found.quantised == ""


def test_a_model_that_the_engine_refuses_is_read() -> None:
    assert read(openvino_models.unknown_operator()).operators == {"Frobnicate": 1}


def test_entities_do_not_expand_without_limit() -> None:
    lines = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a0 "{"x" * 100}">{lines}]><net>&a11;</net>'
    with pytest.raises(InvalidModel, match="not an OpenVINO model"):
        read(Artifact.from_bytes(bomb.encode(), Format.OPENVINO_IR))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModel, match="not an OpenVINO model"):
        read(Artifact.from_bytes(b"<net", Format.OPENVINO_IR))
