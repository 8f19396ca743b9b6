"""A configuration is compared with the model, and its missing fields are filled in."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engines.base import declared_signature
from penstock.errors import InvalidConfig
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.triton.auto_complete import complete, declared_tensors, made_inputs
from penstock.online.repository.triton.schema import to_message, typed
from penstock.online.repository.triton.text import parse_text
from penstock.tensor import DataType, Signature, TensorSpec


def signature(inputs: dict[str, tuple[int, ...]], outputs: dict[str, tuple[int, ...]]) -> Signature:
    parts = ([TensorSpec(name, DataType.FP32, shape) for name, shape in part.items()] for part in (inputs, outputs))
    return Signature(*(tuple(part) for part in parts))


ROWS = signature({"a": (-1, 3), "b": (-1, -1)}, {"y": (-1, 2)})
FIXED = signature({"a": (1, 3)}, {"y": (1, 2)})


def whole(text: str, model: Signature | None = ROWS, rows: int | None = 64, **more: Any) -> Any:
    return to_message(complete(typed(parse_text(text.encode(), "f")), "m", "onnxruntime_onnx", model, rows, 2, **more))


def tensors(config: Any) -> dict[str, list[int]]:
    return {tensor.name: list(tensor.dims) for tensor in [*config.input, *config.output]}


def test_nothing_given() -> None:
    config = whole("", backend="onnxruntime", filename="model.onnx")
    assert (config.name, config.platform, config.backend) == ("m", "onnxruntime_onnx", "onnxruntime")
    assert config.default_model_filename == "model.onnx"
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (64, True)
    assert tensors(config) == {"a": [3], "b": [-1], "y": [2]}
    assert (config.instance_group[0].name, config.instance_group[0].count) == ("m_0", 2)


def test_a_model_with_a_fixed_batch_is_not_batched() -> None:
    config = whole("", FIXED, None)
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    assert tensors(config) == {"a": [1, 3], "y": [1, 2]}


@pytest.mark.parametrize(
    ("text", "size", "dims"),
    [
        ("max_batch_size: 8", 8, {"a": [3], "b": [-1], "y": [2]}),
        ("max_batch_size: 0", 0, {"a": [-1, 3], "b": [-1, -1], "y": [-1, 2]}),
        ('input { name: "a" data_type: TYPE_FP32 dims: [3] }', 64, {"a": [3], "b": [-1], "y": [2]}),
        ('input { name: "a" data_type: TYPE_FP32 dims: [-1, 3] }', 0, {"a": [-1, 3], "b": [-1, -1], "y": [-1, 2]}),
        ('max_batch_size: 4 input { name: "b" data_type: TYPE_FP32 dims: 7 }', 4, {"b": [7], "a": [3], "y": [2]}),
        ('output { name: "y" label_filename: "l" }', 64, {"a": [3], "b": [-1], "y": [2]}),
    ],
    ids=["size", "none", "dims without batch", "dims with batch", "narrowed", "labels"],
)
def test_the_batch_dimension_follows_what_is_given(text: str, size: int, dims: dict[str, list[int]]) -> None:
    config = whole(text)
    assert (config.max_batch_size, tensors(config)) == (size, dims)
    assert config.HasField("dynamic_batching") == (size > 0)


def test_rows_that_depend_on_one_another_are_not_merged_whatever_is_given() -> None:
    config = whole('max_batch_size: 8 input { name: "a" data_type: TYPE_FP32 dims: 3 }', rows=None)
    assert (config.max_batch_size, tensors(config)["a"]) == (0, [-1, 3])


def test_a_reshape_is_what_the_model_sees() -> None:
    text = 'max_batch_size: 8 input { name: "a" data_type: TYPE_FP32 dims: [1, 3] reshape { shape: 3 } }'
    assert tensors(whole(text))["a"] == [1, 3]
    with pytest.raises(
        InvalidConfig, match=r"'input\[0\].reshape.shape' is \[1, 3\], but input 'a' of the model has \[3\]"
    ):
        whole(text.replace("shape: 3", "shape: [1, 3]"))


def test_a_batch_of_one_row_goes_with_a_fixed_one() -> None:
    config = whole("max_batch_size: 1", FIXED, None)
    assert tensors(config) == {"a": [1, 3], "y": [1, 2]}
    with pytest.raises(
        InvalidConfig, match="'max_batch_size' is 2, but input 'a' of the model.* no free first dimension"
    ):
        whole("max_batch_size: 2", FIXED, None)


def test_all_else_is_kept() -> None:
    text = """
    platform: "onnxruntime_onnx" version_policy { all { } } default_model_filename: "net.onnx"
    instance_group [ { count: 1 }, { name: "spare" count: 3 kind: KIND_MODEL } ]
    parameters { key: "mine" value { string_value: "kept" } } metric_tags { key: "team" value: "vision" }
    model_warmup { name: "w" inputs { key: "a" value { data_type: TYPE_FP32 dims: 3 zero_data: true } } }
    """
    config = whole(text)
    assert config.version_policy.HasField("all")
    assert [(one.name, one.count, one.kind) for one in config.instance_group] == [("m_0", 1, 2), ("spare", 3, 3)]
    assert (config.parameters["mine"].string_value, config.metric_tags["team"]) == ("kept", "vision")
    assert (config.model_warmup[0].name, config.default_model_filename) == ("w", "net.onnx")


SEQUENCE = """
max_batch_size: 4
input { name: "a" data_type: TYPE_FP32 dims: 3 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
sequence_batching {
  control_input [
    { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } },
    { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  ]
  state { input_name: "si" output_name: "so" data_type: TYPE_INT32 dims: [2] }
}
"""


def test_inputs_that_the_server_makes_are_none_of_the_clients() -> None:
    model = signature(
        {"a": (-1, 3), "start": (-1, 1), "id": (-1, 1), "si": (-1, 2)}, {"y": (-1, 2), "so": (-1, 2)}
    )  # fmt: skip
    config = whole(SEQUENCE, model, None)
    assert made_inputs(config) == {"start", "id", "si"}
    assert tensors(config) == {"a": [3], "y": [2]}
    assert (config.max_batch_size, config.sequence_batching.max_sequence_idle_microseconds) == (4, 1_000_000)
    assert not config.HasField("dynamic_batching")


def test_a_model_that_does_not_know_its_signature_is_told() -> None:
    inputs, outputs = declared_tensors(typed(parse_text(SEQUENCE.encode(), "f")))
    told = declared_signature({"inputs": inputs, "outputs": outputs})
    assert told == Signature(
        (
            TensorSpec("a", DataType.FP32, (-1, 3)),
            TensorSpec("start", DataType.FP32, (-1, 1)),
            TensorSpec("id", DataType.BYTES, (-1, 1)),
            TensorSpec("si", DataType.INT32, (-1, 2)),
        ),
        (TensorSpec("y", DataType.FP32, (-1, 2)), TensorSpec("so", DataType.INT32, (-1, 2))),
    )
    assert declared_tensors(ModelConfig()) == ([], [])
    with pytest.raises(InvalidConfig, match="'a' needs 'data_type' and 'dims'"):
        declared_tensors(typed(parse_text(b'input { name: "a" }', "f")))


def test_ragged_inputs_and_scattered_outputs_have_shapes_of_their_own() -> None:
    model = signature({"a": (-1,), "n": (-1,)}, {"y": (-1,)})
    text = """
    max_batch_size: 16
    input { name: "a" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
    output { name: "y" data_type: TYPE_FP32 dims: -1 }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "a" }
    batch_output { target_name: "y" source_input: "a" }
    """
    config = whole(text, model, None)
    assert (config.max_batch_size, tensors(config)) == (16, {"a": [-1], "y": [-1]})


def test_an_ensemble_has_no_model() -> None:
    text = 'input { name: "a" data_type: TYPE_FP32 dims: 3 } ensemble_scheduling { step { model_name: "p" } }'
    config = to_message(complete(typed(parse_text(text.encode(), "f")), "e", "ensemble", None, None, 0))
    assert (config.platform, config.backend, config.max_batch_size) == ("ensemble", "", 0)
    assert config.version_policy.latest.num_versions == 1
    assert not config.instance_group


def test_the_file_is_named() -> None:
    with pytest.raises(
        InvalidConfig, match=r"^m/config.pbtxt: model 'm': 'input\[0\].name' is 'z', but the model has no such input"
    ):
        whole('input { name: "z" }', where="m/config.pbtxt")
