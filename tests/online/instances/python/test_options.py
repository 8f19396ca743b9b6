from __future__ import annotations

import pytest

from penstock.online.instances.python.options import PythonOptions, joined, specs_of
from penstock.tensor import DataType, Signature, TensorSpec


def spec(name: str, *shape: int, datatype: DataType = DataType.FP32) -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def test_parameters_are_texts() -> None:
    config = {"parameters": {"rate": {"string_value": "0.5"}, "empty": {}}}
    assert PythonOptions(config=config).parameters == {"rate": "0.5", "empty": ""}
    assert PythonOptions().parameters == {}


def test_tensors_of_a_configuration_have_their_batch_dimension() -> None:
    tensors = [
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["3", -1]},
        {"name": "t", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}},
    ]
    assert specs_of(tensors, batched=True) == (spec("x", -1, 3, -1), spec("t", -1, datatype=DataType.BYTES))
    assert specs_of(tensors[:1], batched=False) == (spec("x", 3, -1),)


@pytest.mark.parametrize(
    "tensor",
    [{"name": "x", "dims": [1]}, {"name": "x", "data_type": "TYPE_FP8", "dims": [1]}, {"data_type": "TYPE_FP32"}],
)
def test_a_tensor_that_is_none(tensor: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        specs_of([tensor], batched=True)


def test_what_only_the_configuration_declares_is_added_and_the_model_is_believed() -> None:
    options = PythonOptions(inputs=(spec("start", 1), spec("x", -1)), outputs=(spec("y", 2),))
    model = Signature((spec("x", -1, 3),), (spec("z", 1),))
    found = joined(options, model)
    assert found.inputs == (spec("start", 1), spec("x", -1, 3))
    assert found.outputs == (spec("y", 2), spec("z", 1))
