"""Model configuration: the given fields, the completed fields, and the scheduler's settings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.check import parse
from penstock.online.repository.triton.schema import to_json
from penstock.online.scheduler.batching_config import QueuePolicy, TimeoutAction
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import DOUBLER

TEXT = Signature((TensorSpec("t", DataType.BYTES, (3, 4)),), (TensorSpec("n", DataType.BF16, (3,)),))


def whole(settings: Any, rows: int | None = 8) -> Any:
    return complete(parse("m", settings), "m", "onnxruntime_onnx", DOUBLER, rows, 2)


def test_nothing_given_is_filled_in_from_the_model() -> None:
    shown = to_json(whole({}))
    assert shown["name"] == "m"
    assert shown["platform"] == "onnxruntime_onnx"
    assert shown["backend"] == "onnxruntime"
    assert shown["max_batch_size"] == 8
    assert shown["version_policy"] == {"latest": {"num_versions": 1}}
    assert shown["input"][0] | {"format": "FORMAT_NONE"} == shown["input"][0]
    assert (shown["input"][0]["name"], shown["input"][0]["data_type"], shown["input"][0]["dims"]) == (
        "x",
        "TYPE_FP32",
        [2],
    )
    assert shown["instance_group"][0] | {"name": "m_0", "count": 2, "kind": "KIND_CPU"} == shown["instance_group"][0]
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert shown["batch_input"] == []


def test_a_model_that_cannot_be_batched_shows_all_its_dimensions() -> None:
    shown = to_json(complete(parse("t", {}), "t", "openvino", TEXT, None, 1))
    assert shown["max_batch_size"] == 0
    assert "dynamic_batching" not in shown
    assert [(one["data_type"], one["dims"]) for one in shown["input"] + shown["output"]] == [
        ("TYPE_STRING", [3, 4]),
        ("TYPE_BF16", [3]),
    ]


def test_what_is_given_holds_and_64_bit_integers_are_numbers() -> None:
    shown = to_json(
        whole(
            {
                "dynamic_batching": {
                    "preferred_batch_size": [4, 8],
                    "max_queue_delay_microseconds": 100,
                    "priority_levels": 2,
                    "default_priority_level": 1,
                    "priority_queue_policy": {"2": {"max_queue_size": 3, "default_timeout_microseconds": 2**40}},
                },
                "response_cache": {"enable": True},
                "parameters": {"a": {"string_value": "b"}},
                "output": [{"name": "y", "label_filename": "labels.txt"}],
            }
        )
    )
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert shown["dynamic_batching"]["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 2**40
    assert shown["response_cache"] == {"enable": True}
    assert shown["parameters"] == {"a": {"string_value": "b"}}
    assert shown["output"][0]["label_filename"] == "labels.txt"


def test_the_scheduler_gets_what_was_configured() -> None:
    config = batching(
        whole(
            {
                "dynamic_batching": {
                    "preferred_batch_size": [8, 4],
                    "priority_levels": 2,
                    "default_priority_level": 2,
                    "default_queue_policy": {"timeout_action": "DELAY", "default_timeout_microseconds": 5},
                    "priority_queue_policy": {"1": {"allow_timeout_override": True}},
                }
            }
        ),
        100,
    )
    assert (config.batchable, config.max_batch, config.max_queue, config.instances) == (True, 8, 100, 2)
    assert config.preferred_batch_size == (4, 8)
    assert config.policies == [
        QueuePolicy(allow_timeout_override=True),
        QueuePolicy(TimeoutAction.DELAY, default_timeout_microseconds=5),
    ]


def test_a_model_that_cannot_be_batched_runs_each_request_alone() -> None:
    config = batching(complete(parse("t", {}), "t", "openvino", TEXT, None, 1), 5)
    assert (config.batchable, config.max_rows) == (False, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dynamic_batchin": {}}, "model 'm': there is no field 'dynamic_batchin' .did you mean 'dynamic_batching'"),
        ({"dynamic_batching": {"max_delay": 1}}, "no field 'dynamic_batching.max_delay'.*max_queue_delay_microseconds"),
        ({"dynamic_batching": {"preferred_batch_size": "many"}}, "model 'm': 'dynamic_batching': .*many"),
        ({"dynamic_batching": {"preferred_batch_size": [9]}}, "model 'm': .*preferred size must be <= max batch size"),
        (
            {"dynamic_batching": {"priority_levels": 2}},
            "model 'm': 'dynamic_batching' is invalid: default priority level",
        ),
        (3, r"settings of model 'm' are not a table.*below \[models.m\]"),
        ({"max_batch_size": -1}, "model 'm': 'max_batch_size' is -1, but must not be negative"),
        ({"instance_group": [{"count": -1}]}, r"model 'm': 'instance_group\[0\].count' is -1, but must be at least 1"),
        ({"dynamic_batching": {"default_queue_policy": {"timeout_action": 7}}}, "timeout_action' is 7.*REJECT, DELAY"),
        ({"dynamic_batching": {"priority_levels": 2**63, "default_priority_level": 1}}, "levels must be at most 1000"),
        ({"output": [{"name": "y", "dims": [3]}]}, r"model 'm': 'output\[0\].data_type' is missing"),
        ({"instance_group": [{"kind": "KIND_CPU", "gpus": [0]}]}, r"'instance_group\[0\].gpus' names devices"),
        (
            {"output": [{"name": "z", "label_filename": "l"}]},
            r"'output\[0\].name' is 'z', but the model has no such output",
        ),
    ],
)
def test_what_is_wrong_is_named(settings: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        batching(whole(settings), 10)


def test_batching_is_refused_for_a_model_that_cannot_be_batched() -> None:
    with pytest.raises(InvalidConfig, match="cannot be batched"):
        whole({"dynamic_batching": {}}, rows=None)
