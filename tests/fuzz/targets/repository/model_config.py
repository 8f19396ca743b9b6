"""Fuzzes model configurations: the text of a ``config.pbtxt``, and JSON from clients, which begins with ``{``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.online.repository.config import ModelConfig
from penstock.online.repository.triton.check import check, examine
from penstock.online.repository.triton.schema import to_json, to_message, typed
from penstock.online.repository.triton.text import parse_json, parse_text, to_text
from tests.fuzz.mutator import Seed
from tests.fuzz.parts import tokens
from tests.fuzz.target import DecoderTarget

_MESSAGES = (
    b"""name: "m"
platform: "onnxruntime_onnx"  # a comment
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ ] } }]
output { name: "y" data_type: TYPE_STRING dims: 1 label_filename: "labels.txt" }
instance_group [{ count: 2 kind: KIND_CPU rate_limiter { resources [{ name: "R" count: 1 }] priority: 2 } }]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 2 default_priority_level: 1
  priority_queue_policy { key: 1 value: { timeout_action: DELAY max_queue_size: 3 } } }
version_policy: { specific: { versions: [1, 3] } }
parameters { key: "k" value: { string_value: "v\\n" } }
""",
    b"""sequence_batching { max_sequence_idle_microseconds: 5000 oldest { max_candidate_sequences: 4 }
  control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }] }]
  state [{ input_name: "i" output_name: "o" data_type: TYPE_INT32 dims: [ -1 ]
    initial_state: { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "s" } }] }
model_warmup [{ name: "w" batch_size: 1 inputs { key: "x" value: { data_type: TYPE_FP32 dims: 2 random_data: true } } }]
""",
    b"""ensemble_scheduling { step [{ model_name: "a" model_version: -1 input_map { key: "x" value: "t" }
  output_map { key: "y" value: "u" } }] }
response_cache { enable: true } model_transaction_policy { decoupled: true }
optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator [{ name: "openvino" }] } }
""",
    b'{"name": "m", "max_batch_size": 4, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["2"]}], "parameters": {}}',
    b'{"backend": "onnxruntime", "dynamic_batching": {"preferred_batch_size": [2]}, "version_policy": {"latest": {}}}',
)


class ModelConfigTarget(DecoderTarget):
    """See ``Target``."""

    tokens: Sequence[bytes] = (
        b"{" * 300,
        b"a { " * 300,
        b'"name":{' * 120,
        b"max_batch_size: 99999999999",
        b"max_batch_size: -1",
        b"count: -1",
        b"dims: [ 0 ]",
        b"priority_levels: 4000000000",
        b"TYPE_BF16",
        b"KIND_GPU",
        b"# x\n",
        b"'\\xff'",
        b"[google.protobuf.Any]",
        b"<",
        b"nan",
        b"1e999",
    )

    def __init__(self) -> None:
        super().__init__([tokens(message) for message in _MESSAGES])

    def split(self, data: bytes) -> Seed:
        return tokens(data)

    def decode(self, data: bytes) -> object:
        given = parse_json("m", data) if data.startswith(b"{") else parse_text(data, "m/config.pbtxt")
        assert all(finding.message for finding in examine(given, "m"))
        warnings = check(given, "m", "m/config.pbtxt")
        config = typed(given)
        assert isinstance(config, ModelConfig)
        text = to_text(to_message(config))
        again = parse_text(text.encode(), "m/config.pbtxt")
        assert to_text(again) == text, "the shown configuration means something else"
        return text, repr(to_json(config)), [finding.message for finding in warnings]
