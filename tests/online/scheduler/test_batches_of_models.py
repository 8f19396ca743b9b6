"""Real models whose requests are not simply merged by rows, from the configuration to the answers."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import models
from penstock.artifact import Artifact
from penstock.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeModel
from penstock.online.instances.instance import Instance
from penstock.online.repository.loading.input_check import InputCheck
from penstock.online.repository.loading.scheduling import batching, layout_of
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.scheduler.dynamic_batcher import DynamicBatcher
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.tensor import Array, Signature

_FP32, _INT32 = TensorProto.FLOAT, TensorProto.INT32


def answers(
    artifact: Artifact, settings: Mapping[str, Any], asked: list[dict[str, Array]]
) -> tuple[list[Outcome], int]:
    """The outcome of each of ``asked``, which all wait when the instance starts, and the number of batches."""

    async def main() -> tuple[list[Outcome], int]:
        model = OnnxRuntimeEngine().load(artifact, {"threads": 1})
        assert isinstance(model, OnnxRuntimeModel)
        signature = Signature(model.signature.inputs + model.optional_inputs, model.signature.outputs)
        config = complete(
            parse("m", settings), "m", "onnxruntime_onnx", signature, settings["max_batch_size"] or None, 1
        )
        loop = asyncio.get_running_loop()
        batcher = DynamicBatcher(batching(config, 100), loop, layout=layout_of(config))
        instance, check = Instance("i", model, batcher), InputCheck(config, 8)
        outcomes: list[Outcome] = []
        for inputs in asked:
            request = InferRequest("m", inputs)
            batcher.submit(request, *check(request), outcomes.append)
        loop.call_soon(instance.start)
        await asyncio.wait_for(batcher.drain(), 20)
        batcher.stop()
        await asyncio.to_thread(instance.join, 20)
        return outcomes, batcher.statistics.execution_count

    return asyncio.run(main())


def outputs(outcomes: list[Outcome]) -> list[Array]:
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, InferResponse), outcome
        found.append(outcome.outputs["y"])
    return found


def segment_sum() -> Artifact:
    """``y[i]`` is the sum of ``x`` from ``ends[i]`` to ``ends[i + 1]``."""
    return models.artifact(
        [
            ("CumSum", ["x", "axis"], ["sums"]),
            ("Pad", ["sums", "before"], ["all"]),
            ("Gather", ["all", "ends"], ["at"]),
            ("Slice", ["at", "one", "many"], ["upper"]),
            ("Slice", ["at", "nought", "last"], ["lower"]),
            ("Sub", ["upper", "lower"], ["flat"]),
            ("Unsqueeze", ["flat", "one"], ["y"]),
        ],
        [("x", _FP32, ["T"]), ("ends", _INT32, ["B"])],
        [("y", _FP32, ["R", 1])],
        {
            "axis": np.array(0, np.int64),
            "before": np.array([1, 0], np.int64),
            "one": np.array([1], np.int64),
            "many": np.array([2**31], np.int64),
            "nought": np.array([0], np.int64),
            "last": np.array([-1], np.int64),
        },
    )


def test_ragged_requests_run_together_and_each_gets_its_own_sum() -> None:
    settings = {
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
        "batch_input": [
            {
                "kind": "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
                "target_name": ["ends"],
                "data_type": "TYPE_INT32",
                "source_input": ["x"],
            }
        ],
    }
    asked = [{"x": np.arange(length, dtype=np.float32)[None]} for length in (3, 1, 5, 0, 4)]
    outcomes, runs = answers(segment_sum(), settings, asked)
    assert [array.tolist() for array in outputs(outcomes)] == [[[3]], [[0]], [[10]], [[0]], [[6]]]
    assert runs == 1


def scaled() -> Artifact:
    """``y = x * scale``, where ``scale`` is 3 unless it is given."""
    return models.artifact(
        [("Mul", ["x", "scale"], ["y"])],
        [("x", _FP32, ["N", 2]), ("scale", _FP32, ["N", 1])],
        [("y", _FP32, ["N", 2])],
        {"scale": np.array([[3]], np.float32)},
    )


def test_inputs_with_a_value_of_the_models_own_may_be_left_out_and_do_not_mix_with_those_that_are_given() -> None:
    settings = {
        "max_batch_size": 8,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "scale", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
        ],
    }
    x = np.ones((1, 2), np.float32)
    asked = [{"x": x}] * 2 + [{"x": x, "scale": np.full((1, 1), n, np.float32)} for n in (5, 7)]
    outcomes, runs = answers(scaled(), settings, asked)
    assert [array.tolist() for array in outputs(outcomes)] == [[[3, 3]], [[3, 3]], [[5, 5]], [[7, 7]]]
    assert runs == 2


@pytest.mark.parametrize("batched", [True, False])
def test_clients_see_the_shape_before_the_reshape(batched: bool) -> None:
    wide = {"data_type": "TYPE_FP32", "dims": [4, 1], "reshape": {"shape": [2, 2]}}
    artifact = models.artifact(
        [("Transpose", ["x"], ["y"])] if not batched else [("Relu", ["x"], ["y"])],
        [("x", _FP32, ["N", 2, 2] if batched else [2, 2])],
        [("y", _FP32, ["N", 2, 2] if batched else [2, 2])],
    )
    settings = {
        "max_batch_size": 4 if batched else 0,
        "input": [{"name": "x", **wide}],
        "output": [{"name": "y", **wide}],
    }
    x = np.arange(4, dtype=np.float32).reshape((1, 4, 1) if batched else (4, 1))
    # Transposed, four in a column change places.
    expected = x if batched else x[[0, 2, 1, 3]]
    outcomes, runs = answers(artifact, settings, [{"x": x}] * 3)
    for array in outputs(outcomes):
        np.testing.assert_array_equal(array, expected)
    assert runs == (1 if batched else 3)
