"""Configurations that must be rejected, each for a model ``y = x @ w`` in ``1/model.onnx``: x FP32 (N, 3), y FP32 (N, 2)."""

from __future__ import annotations

from typing import NamedTuple


class Broken(NamedTuple):
    """A configuration, and the expected parts of its error: the field, and words of the reason."""

    name: str
    """Name of the model: the error must also contain ``<name>/config.pbtxt``."""
    text: str
    field: str
    reason: str


_X = 'name: "x" data_type: TYPE_FP32 dims: 3'
_START = "kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1]"
_STATE = 'input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: 2'
_ENDS = 'input { name: "a" data_type: TYPE_FP32 dims: 3 } output { name: "b" data_type: TYPE_FP32 dims: 2 }'
_STEP = 'model_name: "p" input_map { key: "x" value: "a" } output_map { key: "y" value: "b" }'


def _warm(inputs: str, more: str = "") -> str:
    return f'model_warmup {{ name: "w" {more} inputs {{ key: "x" value {{ {inputs} }} }} }}'


def _sequence(control: str) -> str:
    return f'sequence_batching {{ control_input {{ name: "s" control {{ {control} }} }} }}'


def _state(more: str) -> str:
    return f"sequence_batching {{ state {{ {_STATE} {more} }} }}"


def _ensemble(steps: str) -> str:
    return f"{_ENDS} ensemble_scheduling {{ {steps} }}"


_TEXTS: list[tuple[str, str, str, str]] = [
    # what is no text of the schema
    ("unknown-field", 'nmae: "m"', "nmae", "did you mean 'name'"),
    ("unknown-inner-field", "dynamic_batching { max_delay: 1 }", "dynamic_batching.max_delay", "no field"),
    ("unknown-field-in-list", "input [ { nam: 'x' } ]", "input.nam", "did you mean 'name'"),
    ("unknown-field-in-map", 'parameters { key: "a" value { text: "b" } }', "parameters.value.text", "string_value"),
    ("field-by-number", "4: 8", "4", "no field"),
    ("extension", "[foo.bar] {}", "foo", "extensions"),
    ("text-for-number", 'max_batch_size: "8"', "max_batch_size", '"8"'),
    ("fraction-for-number", "max_batch_size: 1.5", "max_batch_size", "1.5"),
    ("number-too-large", "max_batch_size: 99999999999", "max_batch_size", "out of range"),
    ("number-of-5000-digits", f"max_batch_size: {'9' * 5000}", "max_batch_size", "999"),
    ("word-for-text", "name: linear", "name", "Expected string"),
    ("word-for-flag", "model_transaction_policy { decoupled: maybe }", "model_transaction_policy.decoupled", "true"),
    ("negative-unsigned", "version_policy { latest { num_versions: -1 } }", "latest.num_versions", "out of range"),
    ("unknown-value", 'input { name: "x" data_type: TYPE_FP3 }', "input.data_type", "did you mean 'TYPE_FP32'"),
    ("unknown-kind", "instance_group { kind: KIND_TPU }", "instance_group.kind", "KIND_"),
    ("unknown-number-of-a-value", 'input { name: "x" data_type: 99 dims: 3 }', "input[0].data_type", "is 99"),
    ("given-twice", "max_batch_size: 4\nmax_batch_size: 8", "max_batch_size", "given twice"),
    ("inner-given-twice", "response_cache { enable: true enable: false }", "response_cache.enable", "given twice"),
    ("two-schedulers", "dynamic_batching {}\nsequence_batching {}", "sequence_batching", "exclude each other"),
    ("two-policies", "version_policy { all {} latest {} }", "latest", "exclude each other"),
    ("two-strategies", "sequence_batching { direct {} oldest {} }", "oldest", "exclude each other"),
    ("open-brace", f"max_batch_size: 8\ninput {{ {_X}", "input", "opened in line 2, is not closed"),
    ("open-list", "input [ { name: 'x' }", "input", "Expected"),
    ("open-text", 'name: "x', "name", "ending quote"),
    ("brace-too-many", f"input {{ {_X} }} }}", "input", "}"),
    ("no-colon", "max_batch_size 8", "max_batch_size", "Expected"),
    ("no-value", "max_batch_size:", "max_batch_size", "integer"),
    ("list-with-a-hole", 'input { name: "x" dims: [ 1, ] }', "input.dims", "integer"),
    ("message-for-number", "max_batch_size { }", "max_batch_size", "Expected"),
    ("number-for-message", "dynamic_batching: 3", "dynamic_batching", "Expected"),
    ("bytes-that-are-no-text", 'name: "\\xff"', "name", "utf-8"),
    ("json", '{"max_batch_size": 8}', "config.pbtxt:1:1", "{"),
    ("deep", "input { " * 200, "input.input", "no field"),
    # the model itself
    ("other-name", 'name: "else"', "name", "is 'else'"),
    ("negative-batch", "max_batch_size: -1", "max_batch_size", "negative"),
    ("no-versions", "version_policy { latest { num_versions: 0 } }", "latest.num_versions", "at least 1"),
    ("no-specific-version", "version_policy { specific { } }", "specific.versions", "names no version"),
    ("version-zero", "version_policy { specific { versions: [0] } }", "specific.versions", "holds 0"),
    ("version-twice", "version_policy { specific { versions: [1, 1] } }", "specific.versions", "version 1 twice"),
    ("unknown-backend", 'backend: "onnxruntim"', "backend", "did you mean 'onnxruntime'"),
    ("unknown-platform", 'platform: "onnx"', "platform", "'onnx'"),
    ("tensorrt", 'backend: "tensorrt"', "backend", "serve the ONNX model"),
    ("backend-against-platform", 'backend: "python" platform: "onnxruntime_onnx"', "platform", "contradict each other"),
    ("backend-without-file", 'backend: "python"', "model.py", "contains no"),
    ("filename-missing", 'default_model_filename: "net.onnx"', "net.onnx", "contains no"),
    ("filename-elsewhere", 'default_model_filename: "../1/model.onnx"', "default_model_filename", "not the name"),
    ("filename-absolute", 'default_model_filename: "/etc/passwd"', "default_model_filename", "not the name"),
    ("thread-count", 'parameters { key: "intra_op_thread_count" value { string_value: "two" } }',
     "parameters[intra_op_thread_count]", "must be a number"),
    ("libraries", 'model_operations { op_library_filename: "a.so" }', "model_operations.op_library_filename", "not loaded"),
    ("agents", 'model_repository_agents { agents { name: "checksum" } }', "model_repository_agents.agents", "are not"),
    ("tag-that-is-no-label", 'metric_tags { key: "a b" value: "c" }', "metric_tags", "'a b'"),
    ("tag-that-is-taken", 'metric_tags { key: "version" value: "c" }', "metric_tags", "'version'"),
    ("metric-family", 'model_metrics { metric_control { metric_identifier { family: "nv_x" } } }', "family", "nv_x"),
    ("metric-buckets", ("model_metrics { metric_control { metric_identifier { family: "
     '"nv_inference_first_response_histogram_ms" } histogram_options { buckets: [2, 1] } } }'), "buckets", "ascending"),
    # inputs and outputs
    ("input-without-name", "input { data_type: TYPE_FP32 dims: 3 }", "input[0].name", "missing"),
    ("input-twice", f"input [ {{ {_X} }}, {{ {_X} }} ]", "input", "two entries named 'x'"),
    ("output-twice", 'output [ { name: "y" }, { name: "y" } ]', "output", "two entries named 'y'"),
    ("no-type", 'input { name: "x" dims: 3 }', "input[0].data_type", "missing"),
    ("dim-zero", 'input { name: "x" data_type: TYPE_FP32 dims: 0 }', "input[0].dims", "holds 0"),
    ("dim-negative", 'output { name: "y" data_type: TYPE_FP32 dims: -2 }', "output[0].dims", "holds -2"),
    ("dims-beyond-memory", 'input { name: "x" data_type: TYPE_FP32 dims: [4294967296, 4294967296] }', "input[0].dims", "large"),
    ("dims-by-the-hundred", f'input {{ name: "x" data_type: TYPE_FP32 dims: [{"1, " * 99}1] }}', "input[0].dims", "100 dim"),
    ("format", f"input {{ {_X} format: FORMAT_NCHW }}", "input[0].format", "three dimensions"),
    ("shape-tensor", f"input {{ {_X} is_shape_tensor: true }}", "input[0].is_shape_tensor", "TensorRT"),
    ("non-linear", 'output { name: "y" is_non_linear_format_io: true }', "is_non_linear_format_io", "TensorRT"),
    ("reshape-size", f"input {{ {_X} reshape {{ shape: [2, 2] }} }}", "input[0].reshape", "different size"),
    ("reshape-free", f"input {{ {_X} reshape {{ shape: [-1] }} }}", "input[0].reshape", "different size"),
    ("reshape-zero", f"input {{ {_X} reshape {{ shape: [0] }} }}", "input[0].reshape", "different size"),
    ("reshape-to-nothing", 'max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { } }',
     "input", "scalars"),
    ("labels-elsewhere", 'output { name: "y" label_filename: "../secret" }', "output[0].label_filename", "is outside"),
    ("labels-absolute", 'output { name: "y" label_filename: "/etc/passwd" }', "output[0].label_filename", "is outside"),
    ("ragged-without-batch", f"max_batch_size: 0 input {{ {_X} allow_ragged_batch: true }}", "allow_ragged_batch", "batches"),
    ("batch-input-source", 'batch_input { target_name: "n" data_type: TYPE_FP32 }', "batch_input[0].source_input", "one"),
    ("batch-input-unknown", 'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: "q" }',
     "batch_input[0].source_input", "'q'"),
    ("batch-input-type", f'input {{ {_X} }} batch_input {{ target_name: "n" source_input: "x" data_type: TYPE_FP16 }}',
     "batch_input[0].data_type", "TYPE_INT32"),
    ("batch-input-target", f'input {{ {_X} }} batch_input {{ source_input: "x" data_type: TYPE_FP32 }}',
     "batch_input[0].target_name", "missing"),
    ("batch-input-of-clients", f'input {{ {_X} }} batch_input {{ target_name: "x" source_input: "x" data_type: TYPE_FP32 }}',
     "batch_input[0].target_name", "clients"),
    ("batch-input-of-no-model", f'input {{ {_X} }} batch_input {{ target_name: "n" source_input: "x" data_type: TYPE_FP32 }}',
     "batch_input", "'n'"),
    ("batch-output-target", f'input {{ {_X} }} batch_output {{ target_name: "z" source_input: "x" }}',
     "batch_output[0].target_name", "'z'"),
    ("batch-output-without-batch", (f'max_batch_size: 0 input {{ {_X} }} output {{ name: "y" }} '
     'batch_output { target_name: "y" source_input: "x" }'), "batch_output", "needs batches"),
    # against the model
    ("input-unknown", 'input { name: "xx" data_type: TYPE_FP32 dims: 3 }', "input[0].name", "did you mean 'x'"),
    ("output-unknown", 'output { name: "z" label_filename: "labels" }', "output[0].name", "'z'"),
    ("input-type", 'input { name: "x" data_type: TYPE_INT64 dims: 3 }', "input[0].data_type", "TYPE_FP32"),
    ("output-type", 'output { name: "y" data_type: TYPE_STRING dims: 2 }', "output[0].data_type", "TYPE_FP32"),
    ("input-dims", 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 4 }', "input[0].dims", "[3]"),
    ("batch-dim-twice", 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }', "input[0].dims", "omit the batch"),
    ("batch-dim-left-out", f"max_batch_size: 0 input {{ {_X} }}", "input[0].dims", "[-1, 3]"),
    ("output-rank", 'max_batch_size: 8 output { name: "y" data_type: TYPE_FP32 dims: [2, 1] }', "output[0].dims", "[2]"),
    ("reshape-of-another-model", 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [2, 2] } }',
     "input[0].reshape.shape", "[3]"),
    ("decoupled", "model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled", "one response"),
    # instances
    ("count-negative", "instance_group { count: -1 }", "instance_group[0].count", "at least 1"),
    ("count-too-large", "instance_group { count: 2000000000 }", "instance_group", "1024"),
    ("gpu", "instance_group { kind: KIND_GPU }", "instance_group[0].kind", "CPU only"),
    ("gpus", "instance_group [ { count: 1 }, { kind: KIND_CPU gpus: [0] } ]", "instance_group[1].gpus", "CPU only"),
    ("secondary-devices", "instance_group { secondary_devices { device_id: 0 } }", "secondary_devices", "CPU only"),
    ("profile", 'instance_group { profile: "1" }', "instance_group[0].profile", "TensorRT"),
    ("all-passive", "instance_group { passive: true }", "instance_group", "passive"),
    ("resource-without-name", "instance_group { rate_limiter { resources { count: 1 } } }", "resources[0].name", "missing"),
    ("resource-without-count", 'instance_group { rate_limiter { resources { name: "r" } } }', "resources[0].count", "least 1"),
    ("resource-twice", 'instance_group { rate_limiter { resources [ { name: "r" count: 1 }, { name: "r" count: 2 } ] } }',
     "rate_limiter.resources", "two entries named 'r'"),
    # dynamic batching
    ("preferred-size", "max_batch_size: 4 dynamic_batching { preferred_batch_size: [8] }", "dynamic_batching", "max batch size"),
    ("preferred-zero", "dynamic_batching { preferred_batch_size: [0] }", "dynamic_batching", "positive"),
    ("default-level", "dynamic_batching { priority_levels: 2 }", "dynamic_batching", "default priority level"),
    ("levels", "dynamic_batching { priority_levels: 100000 default_priority_level: 1 }", "dynamic_batching", "1000"),
    ("level-of-a-policy", ("dynamic_batching { priority_levels: 1 default_priority_level: 1 "
     "priority_queue_policy { key: 2 value { } } }"), "dynamic_batching", "priority queue policy"),
    ("ordered-levels", "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
     "dynamic_batching", "preserve_ordering"),
    ("ordered-delay", ("dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
     "default_timeout_microseconds: 1 } }"), "dynamic_batching", "DELAY"),
    # sequences
    ("control-without-name", f"sequence_batching {{ control_input {{ control {{ {_START} }} }} }}", "input[0].name", "missing"),
    ("control-without-kind", 'sequence_batching { control_input { name: "s" } }', "control_input[0].control", "one entry"),
    ("control-twice", (f'sequence_batching {{ control_input [ {{ name: "s" control {{ {_START} }} }}, '
     f'{{ name: "t" control {{ {_START} }} }} ] }}'), "sequence_batching.control_input", "CONTROL_SEQUENCE_START"),
    ("control-of-clients", f'input {{ {_X} }} sequence_batching {{ control_input {{ name: "x" control {{ {_START} }} }} }}',
     "control_input[0].name", "'x'"),
    ("control-of-no-model", _sequence(_START), "sequence_batching", "'s'"),
    ("control-without-values", _sequence("kind: CONTROL_SEQUENCE_END"), "control_input[0].control[0]", "but has none"),
    ("control-with-three", _sequence("fp32_false_true: [0, 1, 2]"), "fp32_false_true", "exactly 2"),
    ("control-of-two-types", _sequence("int32_false_true: [0, 1] fp32_false_true: [0, 1]"), "control[0]", "but has int32"),
    ("corrid-type", _sequence("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"), "control[0].data_type", "TYPE_UINT64"),
    ("corrid-values", _sequence("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 int32_false_true: [0, 1]"),
     "control[0].int32_false_true", "does not apply"),
    ("oldest-size", "max_batch_size: 4 sequence_batching { oldest { preferred_batch_size: 8 } }", "preferred_batch_size", "max batch"),
    ("oldest-candidates", "sequence_batching { oldest { max_candidate_sequences: -1 } }", "max_candidate_sequences", "negative"),
    ("slot-utilization", "sequence_batching { direct { minimum_slot_utilization: 1.5 } }", "minimum_slot_utilization", "range"),
    ("slot-utilization-nan", "sequence_batching { direct { minimum_slot_utilization: nan } }", "minimum_slot_utilization", "nan"),
    ("state-without-input", 'sequence_batching { state { output_name: "so" data_type: TYPE_FP32 dims: 2 } }', "input_name", "missing"),
    ("state-without-dims", _state("").replace("dims: 2", ""), "state[0].dims", "missing"),
    ("state-dims", _state("").replace("dims: 2", "dims: 0"), "state[0].dims", "holds 0"),
    ("state-without-start", _state("initial_state { data_type: TYPE_FP32 dims: 2 }"), "initial_state[0]", "zero_data"),
    ("state-start-type", _state("initial_state { data_type: TYPE_INT8 dims: 2 zero_data: true }"), "state[0].data_type", "state"),
    ("state-start-dims", _state("initial_state { data_type: TYPE_FP32 dims: 3 zero_data: true }"), "initial_state[0].dims", "[2]"),
    ("state-start-elsewhere", _state('initial_state { data_type: TYPE_FP32 dims: 2 data_file: "../x" }'),
     "initial_state[0].data_file", "is outside"),
    ("cache-of-sequences", "sequence_batching { } response_cache { enable: true }", "response_cache", "sequences"),
    ("cache-of-streams", "model_transaction_policy { decoupled: true } response_cache { enable: true }",
     "response_cache", "decoupled"),
    # ensembles
    ("ensemble-without-steps", f'platform: "ensemble" {_ENDS}', "ensemble_scheduling", "must be set"),
    ("ensemble-of-nothing", f"{_ENDS} ensemble_scheduling {{ }}", "ensemble_scheduling.step", "missing"),
    ("ensemble-without-input", f"ensemble_scheduling {{ step {{ {_STEP} }} }}", "input", "missing"),
    ("ensemble-with-backend", f'backend: "onnxruntime" {_ensemble(f"step {{ {_STEP} }}")}', "backend", "ensemble"),
    ("ensemble-with-platform", f'platform: "onnxruntime_onnx" {_ensemble(f"step {{ {_STEP} }}")}', "platform", "ensemble"),
    ("step-without-model", _ensemble(f"step {{ {_STEP} }}").replace('model_name: "p"', ""), "step[0].model_name", "missing"),
    ("step-of-itself", _ensemble(f"step {{ {_STEP} }}").replace('"p"', '"step-of-itself"'), "step[0].model_name", "itself"),
    ("step-version", _ensemble(f"step {{ {_STEP} model_version: -2 }}"), "step[0].model_version", "-2"),
    ("step-without-inputs", _ensemble('step { model_name: "p" output_map { key: "y" value: "b" } }'), "input_map", "missing"),
    ("output-of-no-step", _ensemble(f"step {{ {_STEP} }}").replace('value: "b"', 'value: "c"'), "output", "'b'"),
    # warm-up
    ("warm-up-of-nothing", 'model_warmup { name: "w" }', "model_warmup[0].inputs", "missing"),
    ("warm-up-type", _warm("dims: 3 zero_data: true"), "model_warmup[0].inputs[x].data_type", "missing"),
    ("warm-up-data", _warm("data_type: TYPE_FP32 dims: 3"), "model_warmup[0].inputs[x]", "random_data"),
    ("warm-up-two-data", _warm("data_type: TYPE_FP32 zero_data: true random_data: true"), "random_data", "exclude"),
    ("warm-up-dims", _warm("data_type: TYPE_FP32 dims: -1 zero_data: true"), "model_warmup[0].inputs[x].dims", "holds -1"),
    ("warm-up-file", _warm('data_type: TYPE_FP32 dims: 3 input_data_file: "/etc/passwd"'), "input_data_file", "is outside"),
    ("warm-up-rows", "max_batch_size: 4 " + _warm("data_type: TYPE_FP32 dims: 3 zero_data: true", "batch_size: 8"),
     "model_warmup[0].batch_size", "is 8"),
    ("warm-up-count", _warm("data_type: TYPE_FP32 dims: 3 zero_data: true", "count: 4000000000"), "model_warmup[0].count", "at most"),
    ("warm-up-input", f'input {{ {_X} }} ' + _warm("data_type: TYPE_FP32 zero_data: true").replace('key: "x"', 'key: "q"'),
     "model_warmup[0].inputs", "'q'"),
]  # fmt: skip

BROKEN = [Broken(*each) for each in _TEXTS]
