"""Rivals count only if they keep the contract, and run as they come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.compression import rivals
from benchmarks.compression.data import take
from benchmarks.compression.rivals import Case, Way
from benchmarks.compression.train import TASKS
from benchmarks.scenarios.rivals import PARTS
from penstock.artifact import Artifact
from penstock.offline.judge.contract import Contract
from penstock.resources import machine_facts


@pytest.fixture(scope="module")
def case() -> Case:
    model = TASKS["autoencoder"].make()
    data = take(TASKS["autoencoder"].data().test, 40)
    return Case(model, data, data, data, Contract())


def test_a_rival_that_answers_otherwise_does_not_count(case: Case) -> None:
    assert not rivals._objection(case, Way(case.original, "onnxruntime", {"threads": 1}))
    proto = onnx.load_model_from_string(case.original.data)
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(tensor), tensor.name))
    wrong = Artifact.from_bytes(proto.SerializeToString())
    assert rivals._objection(case, Way(wrong, "onnxruntime", {"threads": 1}))


def test_the_original_and_quantised_models_take_part(case: Case, tmp_path: Path) -> None:
    ways, missing = rivals.their_ways(case, tmp_path)
    assert {"ONNX Runtime", "OpenVINO", "quantize_static in onnxruntime", "quantize_dynamic in openvino"} <= set(ways)
    assert all(reason.startswith("NNCF: ModuleNotFoundError") for reason in missing)
    row = case.test.rows(0, 1)
    for way in ways.values():
        with way.loaded([row], True) as run:
            assert np.isfinite(run()[0]["output"]).all()  # type: ignore[index]


def test_rivals_run_without_our_exact_kernels() -> None:
    assert rivals._engine("onnxruntime", plain=True)._machine.has_integer_dot_product  # type: ignore[attr-defined]
    ours = rivals._engine("onnxruntime", plain=False)._machine  # type: ignore[attr-defined]
    assert ours.has_integer_dot_product is machine_facts().has_integer_dot_product


def test_there_are_at_least_twelve_networks_each_a_part() -> None:
    assert len(rivals.NAMES) >= 12
    assert set(rivals.NAMES) <= set(PARTS)
