"""What the offline half decides by the CPU: weights of 8 bits with an integer dot product; without one, on x86, of 7 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import networks
import penstock
from brief_builds import build
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.engines.registry import get_engine
from penstock.offline.build import Recipe
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import PtqRecipe, quantize_with
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.compress.versions.versions import derived_versions
from penstock.offline.compress.versions.ways import IntegerChoice
from penstock.offline.judge.contract import Contract
from penstock.resources import INTEGER_DOT_PRODUCT, MachineFacts

DATA = make_dataset({"x": networks.images(64)}, None)


def largest_weight(artifact: Artifact) -> int:
    tensors = onnx.load_model_from_string(artifact.data).graph.initializer
    arrays = [numpy_helper.to_array(tensor) for tensor in tensors]
    return max(int(np.abs(array.astype(int)).max()) for array in arrays if array.dtype == np.int8 and array.ndim > 1)


def has_7_bits(machine: MachineFacts) -> bool:
    return machine.architecture.lower() in ("x86_64", "amd64") and not machine.has_integer_dot_product


def test_integer_versions_fit_the_cpu(any_cpu: MachineFacts) -> None:
    found, notes = derived_versions(networks.cnn(), DATA, IntegerChoice((RangeMethod.MIN_MAX,)), any_cpu)
    assert {largest_weight(one.artifact) for one in found} == {64 if has_7_bits(any_cpu) else 127}
    assert {one.requires for one in found} == {(INTEGER_DOT_PRODUCT,) if any_cpu.has_integer_dot_product else ()}
    assert ("weights of 7 bits" in notes[0]) is has_7_bits(any_cpu)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_quantised_models_answer_alike_everywhere(any_cpu: MachineFacts, engine: str) -> None:
    fp32 = networks.cnn()
    int8 = quantize_with(PtqRecipe(), fp32, DATA, integer_scheme(any_cpu))
    wanted, found = (get_engine(engine).load(one, {"threads": 1}).forward(DATA.inputs)["y"] for one in (fp32, int8))
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted)


def test_a_build_says_which_bits_and_why(any_cpu: MachineFacts, tmp_path: Path) -> None:
    recipe = Recipe(
        Contract(metric="fidelity"),
        engines=("onnxruntime",),
        threads=(1,),
        methods=(RangeMethod.MSE,),
        careful=False,
        timing_s=0.2,
    )
    source = tmp_path / "net.onnx"
    source.write_bytes(networks.cnn().data)
    built = build(source, tmp_path / "net.bundle", dict(DATA.inputs), dict(DATA.inputs), recipe)
    assert built.manifest.machine is not None
    assert built.manifest.machine.isa == any_cpu.isa
    assert any("weights of 7 bits" in note for note in built.evidence.notes) is has_7_bits(any_cpu)
    with penstock.open(built.bundle) as model:
        assert model.infer(DATA.rows(0, 2))["y"].shape[0] == 2
