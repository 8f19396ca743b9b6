"""Methods that need FP32 take models of other float types, and are judged against the model as it was given."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import penstock
from brief_builds import build
from networks import cnn, images, in_type, mlp
from penstock.artifact import Artifact
from penstock.dataset import make_dataset
from penstock.errors import WrongResult
from penstock.offline.build import Recipe
from penstock.offline.compress.fp32 import fp32
from penstock.offline.compress.fp32.fp32 import converted, in_fp32, optimized_in_fp32
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.model_store import keep_models
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

ROWS = {"x": np.random.default_rng(0).standard_normal((64, 16))}


def rows(dtype: type) -> dict[str, Array]:
    return {"x": ROWS["x"].astype(dtype)}


def operators(artifact: Artifact) -> set[str]:
    return {node.op_type for node in onnx.load_model_from_string(artifact.data).graph.node}


def test_the_fp32_version_is_made_once_per_build() -> None:
    model = in_type(mlp(), TensorProto.FLOAT16)
    with keep_models(1 << 30) as store:
        assert in_fp32(model) is in_fp32(model)
        assert store.made["fp32"] == 1
    assert optimized_in_fp32(mlp()).data == mlp().data


def test_a_wrong_fp32_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_type(mlp(), TensorProto.FLOAT16)
    right, notes = converted(model, model, make_dataset(rows(np.float16), None))
    assert right is not model
    assert not notes

    def wrong(*_: object) -> None:
        raise WrongResult("it is wrong", "none")

    monkeypatch.setattr(fp32, "check_explained", wrong)
    found, notes = converted(model, model, make_dataset(rows(np.float16), None))
    assert found is model
    assert notes == ("the model was not converted to FP32: it is wrong",)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_quantize_takes_other_float_types(kind: int) -> None:
    model = in_type(mlp(), kind)
    data = rows(onnx.helper.tensor_dtype_to_np_dtype(kind).type)
    outcome = penstock.compress.quantize(model, data, evaluate=data, placement="linear", budget_s=0.1)
    assert "QuantizeLinear" in operators(outcome.model)
    assert signature_of(outcome.model).inputs == signature_of(model).inputs
    assert outcome.comparison is not None
    assert outcome.comparison.accuracy.loss.value < 0.1
    dynamic = penstock.compress.quantize(model, data, precision="int8-dynamic")
    assert "MatMulInteger" in operators(dynamic.model)


def test_pruning_keeps_the_type() -> None:
    made = penstock.compress.prune(in_type(mlp(), TensorProto.FLOAT16), sparsity=0.5).model
    weights = onnx.load_model_from_string(made.data).graph.initializer
    assert {tensor.data_type for tensor in weights if len(tensor.dims) > 1} == {TensorProto.FLOAT16}


def test_low_rank_and_sensitivity_take_fp16() -> None:
    model, data = in_type(mlp(), TensorProto.FLOAT16), rows(np.float16)
    assert penstock.compress.low_rank(model, data, rank=4).model.size_bytes > 0
    assert penstock.compress.sensitivity(model, data, budget_s=0).made.table


def test_build_tries_fp32_and_int8_for_fp16(tmp_path: Path) -> None:
    model = in_type(cnn(), TensorProto.FLOAT16)
    x = images(64).astype(np.float16)
    recipe = Recipe(engines=("onnxruntime",), threads=(1,), methods=(RangeMethod.MSE,), careful=False, timing_s=0.2)
    result = build(model, tmp_path / "m.bundle", {"x": x}, {"x": x}, recipe)
    precisions = {(one.precision, one.compression) for one in result.evidence.candidates}
    assert precisions >= {("fp32", ""), ("fp32", "fp32"), ("int8", "")}
    assert result.manifest.signature.inputs[0].datatype.value == "FP16"
