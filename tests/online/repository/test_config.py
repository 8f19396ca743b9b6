from __future__ import annotations

import pytest

from penstock.online.repository.config import (
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    SequenceControl,
    TensorConfig,
    TensorReshape,
)
from penstock.tensor import DataType

IMAGE = TensorConfig("image", DataType.FP32, (3, -1), reshape=TensorReshape((-1, 3)))
SCORE = TensorConfig("score", DataType.FP32, (10,))


@pytest.mark.parametrize(("max_batch_size", "batch"), [(8, (-1,)), (0, ()), (None, ())])
def test_signatures_have_the_batch_dimension_if_requests_are_merged(
    max_batch_size: int | None, batch: tuple[int, ...]
) -> None:
    config = ModelConfig(max_batch_size=max_batch_size, input=(IMAGE,), output=(SCORE,))
    assert config.client_signature.inputs[0].shape == (*batch, 3, -1)
    assert config.model_signature.inputs[0].shape == (*batch, -1, 3)
    assert config.model_signature.outputs == config.client_signature.outputs


@pytest.mark.parametrize(("max_batch_size", "rows"), [(8, 8), (1, 1), (0, 1), (None, 1)])
def test_a_batch_has_at_least_one_row(max_batch_size: int | None, rows: int) -> None:
    assert ModelConfig(max_batch_size=max_batch_size).max_rows == rows


def test_a_group_without_a_count_has_one_instance() -> None:
    assert ModelConfig().instances == 0
    assert ModelConfig(instance_group=(InstanceGroup(), InstanceGroup(3))).instances == 4


@pytest.mark.parametrize(
    ("control", "values"),
    [
        (SequenceControl(int32_false_true=(0, 7)), (DataType.INT32, 0, 7)),
        (SequenceControl(fp32_false_true=(0.5, 2)), (DataType.FP32, 0.5, 2)),
        (SequenceControl(bool_false_true=(False, True)), (DataType.BOOL, False, True)),
        (SequenceControl(data_type=DataType.UINT64), (DataType.UINT64, 0, 1)),
    ],
)
def test_a_control_has_the_values_of_its_pair(control: SequenceControl, values: tuple[DataType, float, float]) -> None:
    assert control.values == values


@pytest.mark.parametrize(
    ("step", "key"),
    [
        (EnsembleStep("m"), ("m", "")),
        (EnsembleStep("m", -1), ("m", "")),
        (EnsembleStep("m", 3), ("m", "3")),
        (EnsembleStep("m", 3, "vision"), ("vision/m", "3")),
    ],
)
def test_the_model_of_a_step(step: EnsembleStep, key: tuple[str, str]) -> None:
    assert step.key == key
