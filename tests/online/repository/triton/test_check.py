"""Valid configurations pass, and fields without effect cause a warning. ``test_broken_configs`` tests invalid ones."""

from __future__ import annotations

import pytest

from penstock.engines.base import Severity
from penstock.errors import InvalidConfig
from penstock.online.repository.triton.check import check, examine, parse
from penstock.online.repository.triton.text import parse_text


@pytest.mark.parametrize(
    "text",
    [
        "",
        'name: "m" max_batch_size: 0 dynamic_batching { default_queue_policy { max_queue_size: 4 } }',
        'input { name: "x" data_type: TYPE_FP32 dims: [2, -1, 6] reshape { shape: [1, 2, -1, 2, 3] } }',
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { } }',
        'output { name: "y" label_filename: "labels/of..y.txt" }',
        "version_policy { specific { versions: [3, 1] } }",
        'instance_group [ { count: 0 kind: KIND_AUTO }, { passive: true rate_limiter { resources { name: "r" count: 1 } } } ]',
        "sequence_batching { oldest { max_candidate_sequences: 4 preferred_batch_size: 8 } }",
        "sequence_batching { direct { minimum_slot_utilization: 0.5 } iterative_sequence: true }",
        (
            'sequence_batching { state { input_name: "i" output_name: "o" data_type: TYPE_FP32 dims: [-1] '
            "initial_state { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"
        ),
        'model_warmup { name: "w" batch_size: 8 count: 3 inputs { key: "x" value { data_type: TYPE_FP32 random_data: true } } }',
    ],
    ids=[
        "nothing",
        "queue without batches",
        "reshape",
        "scalar",
        "labels",
        "versions",
        "instances",
        "oldest",
        "direct",
        "state",
        "warm-up",
    ],
)
def test_is_right(text: str) -> None:
    assert check(parse_text(text.encode(), "f"), "m") == []


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("optimization { cuda { graphs: true } }", "optimization.cuda"),
        ("optimization { input_pinned_memory { enable: true } }", "optimization.input_pinned_memory.enable"),
        ("optimization { gather_kernel_buffer_threshold: 4 }", "optimization.gather_kernel_buffer_threshold"),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority"),
        ('instance_group { host_policy: "numa0" }', "instance_group[0].host_policy"),
        ('runtime: "onnxruntime"', "runtime"),
        (
            "optimization { execution_accelerators { gpu_execution_accelerator { name: 'tensorrt' } } }",
            "gpu_execution_accelerator",
        ),
    ],
)
def test_what_changes_nothing_is_told(text: str, field: str) -> None:
    (warning,) = check(parse_text(text.encode(), "f"), "m")
    assert warning.severity is Severity.WARNING
    assert field in warning.message
    assert "has no effect" in warning.message


def test_everything_that_is_wrong_is_found_at_once() -> None:
    given = parse_text(b'name: "n" max_batch_size: -1 input { dims: 0 } instance_group { count: -1 }', "f")
    found = "\n".join(finding.message for finding in examine(given, "m"))
    for field in ("'name'", "'max_batch_size'", "'input[0].name'", "'input[0].dims'", "'instance_group[0].count'"):
        assert field in found


def test_the_place_comes_first() -> None:
    with pytest.raises(InvalidConfig, match=r"^m/config.pbtxt: model 'm': 'max_batch_size' is -1"):
        check(parse_text(b"max_batch_size: -1", "f"), "m", "m/config.pbtxt")


def test_settings_of_a_file_are_of_the_same_schema() -> None:
    given = parse(
        "m", {"max_batch_size": 0, "sequence_batching": {"direct": {}}, "parameters": {"a": {"string_value": "b"}}}
    )
    assert given.max_batch_size == 0
    assert given.sequence_batching is not None
    assert given.sequence_batching.direct is not None
    with pytest.raises(InvalidConfig, match=r"^model 'm': there is no field 'sequence_batching.drect'"):
        parse("m", {"sequence_batching": {"drect": {}}})
