from __future__ import annotations

from pathlib import Path

from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.triton.check import parse

STEP = {"input_map": {"x": "x"}, "output_map": {"y": "y"}, "model_version": -1}


def test_an_ensemble_names_each_of_its_models_once_in_order() -> None:
    steps = [{**STEP, "model_name": name} for name in ("b", "a", "b")]
    tensors = {
        field: [{"name": name, "data_type": "TYPE_FP32", "dims": [1]}]
        for field, name in (("input", "x"), ("output", "y"))
    }
    given = parse("e", {"platform": "ensemble", "ensemble_scheduling": {"step": steps}, **tensors})
    source = ModelSource("e", Path(), {}, given)
    assert source.is_ensemble
    assert source.parts == ["b", "a"]


def test_a_plain_model_has_no_parts() -> None:
    source = ModelSource("m", Path(), {"1": Path("m.onnx")}, parse("m", {"max_batch_size": 4}))
    assert not source.is_ensemble
    assert source.parts == []
