"""What single fields of a model's configuration must be, as a table, and the walk over a configuration that asks it."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.engines.base import Finding, Severity
from penstock.errors import InvalidArgument
from penstock.online.repository.triton.device import ON_CPU
from penstock.online.repository.triton.schema import DATA_TYPES
from penstock.protocol.messages import Message
from penstock.tensor import element_count

_HISTOGRAM = "nv_inference_first_response_histogram_ms"

_Test = Callable[[Any, Message], Any]
_Row = tuple[str, _Test, str, str]
"""Of a field's value and the message that it is in: what is wrong, or something false."""


def error(path: str, reason: str, hint: str = "") -> Finding:
    """With this the model is not served."""
    return Finding(Severity.ERROR, f"'{path}' {reason}", hint)


def prefix(name: str, where: str) -> str:
    """What an error about the configuration of model ``name``, read from ``where`` if not empty, begins with."""
    return f"{where}: model '{name}': " if where else f"model '{name}': "


def check_fields(message: Message, path: str = "", kind: str = "") -> Iterator[Finding]:
    """Findings about each field by itself; ``kind`` is ``path`` without numbers and keys."""
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value, own, of_kind = getattr(message, field.name), f"{path}{field.name}", f"{kind}{field.name}"
        for test, reason, hint in _RULES.get(of_kind, ()):
            if wrong := test(value, message):
                yield error(own, reason.format(value, wrong), hint)
        if value and of_kind in _WITHOUT_EFFECT:
            yield Finding(Severity.WARNING, f"'{own}' changes nothing: {_WITHOUT_EFFECT[of_kind]}")
        items = value.items() if hasattr(value, "items") else enumerate(value) if field.is_repeated else [(None, value)]
        for key, one in items:
            at = own if key is None else f"{own}[{key}]"
            if hasattr(one, "DESCRIPTOR"):
                yield from check_fields(one, f"{at}.", f"{of_kind}.")
            elif field.enum_type is not None and one not in field.enum_type.values_by_number:
                yield error(
                    at, f"is {one}, which is none of its values", f"known: {', '.join(field.enum_type.values_by_name)}"
                )
            elif isinstance(one, float) and not math.isfinite(one):
                yield error(at, f"is {one}, and must be a finite number")


def _trunks(dims: Iterable[int]) -> list[int]:
    """The element counts between the free dimensions, which a reshape must keep."""
    counts = [1]
    for dim in dims:
        counts[-1] *= dim if dim != -1 else 1
        counts += [1] if dim == -1 else []
    return counts


def _is_missing(value: Any, _: Message) -> bool:
    return not value


def _is_given(value: Any, _: Message) -> bool:
    return bool(value)


def _is_negative(value: int, _: Message) -> bool:
    return value < 0


def _leads_out(value: str, _: Message) -> bool:
    """Of a file's path, which is relative to a folder of the model."""
    return "\0" in value or bool(re.search(r"^/|^[A-Za-z]:|\\|(^|/)\.\.(/|$)", value))


def _bad_dims(value: Iterable[int], _: Message) -> str:
    for dim in value:
        if dim < 1 and dim != -1:
            return f"holds {dim}: dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    try:
        element_count([abs(dim) for dim in value])
    except InvalidArgument as too_large:
        return f"cannot be: {too_large.message}"
    return ""


def _bad_sizes(value: Iterable[int], _: Message) -> str:
    return next((f"holds {dim}, and must hold sizes of at least 1" for dim in value if dim < 1), "")


def _twice(field: str = "") -> _Test:
    def test(value: Iterable[Any], _: Message) -> Any:
        counts = Counter(getattr(one, field) if field else one for one in value)
        return next((one for one, count in counts.items() if count > 1 and one != ""), None)

    return test


def _is_none_of(*names: str) -> _Test:
    numbers = [DATA_TYPES.values_by_name[name].number for name in names]
    return lambda value, _: value not in numbers


def _bad_tag(value: Iterable[str], _: Message) -> str | None:
    """As Prometheus has it, without the labels that every metric has."""
    taken = ("model", "version", "reason", "le", "quantile")
    return next((tag for tag in value if tag in taken or not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", tag, re.ASCII)), None)


def _is_batchless(config: Message) -> bool:
    return bool(config.HasField("max_batch_size") and config.max_batch_size == 0)


_MISSING, _OUT, _OF_TENSORRT = (
    "is missing",
    "'{0}' leads out of the model's folder",
    "is for TensorRT, which does not run here",
)
_BATCH: list[_Row] = [
    ("", lambda value, config: value and _is_batchless(config), "needs batches, and 'max_batch_size' is 0", ""),
    (".source_input", lambda value, _: len(value) != 1, "must name one input", ""),
    (".target_name", _is_missing, _MISSING, ""),
    (".target_name", _twice(), "names '{1}' twice", ""),
]
_TENSOR: list[_Row] = [
    ("", _twice("name"), "has two called '{1}'", ""),
    ("", lambda value, config: _is_batchless(config) and any(one.HasField("reshape") and not one.reshape.shape for one in value),
     "has an empty 'reshape', and without batches there are no scalars", ""),
    ("", lambda value, config: config.HasField("ensemble_scheduling") and not value, "is missing: no model tells it", ""),
    (".name", _is_missing, _MISSING, ""),
    (".data_type", lambda value, tensor: tensor.dims and not value, _MISSING, ""),
    (".dims", _bad_dims, "{1}", ""),
    (".reshape.shape", _bad_dims, "{1}", ""),
    (".reshape", lambda value, tensor: tensor.dims and _trunks(tensor.dims) != _trunks(value.shape),
     "has different size for dims and reshape", ""),
    (".is_shape_tensor", _is_given, _OF_TENSORRT, "leave it out"),
    (".is_non_linear_format_io", _is_given, _OF_TENSORRT, "leave it out"),
]  # fmt: skip
_SEQUENCE, _STATE = "sequence_batching", "sequence_batching.state"
_TABLE: list[_Row] = [
    *((field + part, test, reason, hint) for field in ("input", "output") for part, test, reason, hint in _TENSOR),
    *((field + part, test, reason, hint) for field in ("batch_input", "batch_output") for part, test, reason, hint in _BATCH),
    ("input.format", lambda value, tensor: value and len(tensor.dims) != 3, "needs three dimensions in 'dims'", ""),
    ("output.label_filename", _leads_out, _OUT, ""),
    ("input", lambda value, config: _is_batchless(config) and any(one.allow_ragged_batch for one in value),
     "has 'allow_ragged_batch', which needs batches, and 'max_batch_size' is 0", ""),
    ("backend", lambda value, config: config.HasField("ensemble_scheduling") and value,
     "is '{0}', but an ensemble has none", "leave it out"),
    ("platform", lambda value, config: config.HasField("ensemble_scheduling") and value not in ("", "ensemble"),
     "is '{0}', but that of an ensemble is 'ensemble'", "leave it out"),
    ("platform", lambda value, config: value == "ensemble" and not config.HasField("ensemble_scheduling"),
     "is 'ensemble', so that 'ensemble_scheduling' must be set", ""),
    ("response_cache", lambda value, config: value.enable and config.HasField("sequence_batching"),
     "is enabled, but answers within sequences are not kept", "leave it out"),
    ("response_cache", lambda value, config: value.enable and config.model_transaction_policy.decoupled,
     "is enabled, but answers of a decoupled model are not kept", "leave it out"),
    ("max_batch_size", _is_negative, "is {0}, and must not be negative", "with 0, requests are not merged"),
    ("version_policy.latest.num_versions", _is_missing, "must be at least 1", ""),
    ("version_policy.specific.versions", _is_missing, "names no version", ""),
    ("version_policy.specific.versions", _bad_sizes, "{1}", ""),
    ("version_policy.specific.versions", _twice(), "names version {1} twice", ""),
    ("batch_input.data_type", _is_none_of("TYPE_INT32", "TYPE_FP32"), "must be TYPE_INT32 or TYPE_FP32", ""),
    ("instance_group", lambda value, _: sum(one.count for one in value) > 1024, "asks for more than 1024 instances", ""),
    ("instance_group", lambda value, _: value and all(one.passive for one in value), "has none that is not 'passive'", ""),
    ("instance_group.count", _is_negative, "is {0}, and must be at least 1", ""),
    ("instance_group.gpus", lambda value, group: value and group.kind in ON_CPU,
     "names devices, but the group's instances run on the CPU only", "leave it out"),
    ("instance_group.secondary_devices", _is_given, "names devices, but instances run on the CPU only", "leave it out"),
    ("instance_group.profile", _is_given, _OF_TENSORRT, "leave it out"),
    ("instance_group.rate_limiter.resources", _twice("name"), "has two called '{1}'", ""),
    ("instance_group.rate_limiter.resources.name", _is_missing, _MISSING, ""),
    ("instance_group.rate_limiter.resources.count", _is_missing, "must be at least 1", ""),
    ("default_model_filename", lambda value, _: _leads_out(value, _) or "/" in value or value == ".",
     "'{0}' is not the name of a file in the version's folder", ""),
    ("cc_model_filenames", lambda value, _: any(_leads_out(one, _) for one in value.values()), "leads out of the folder", ""),
    ("metric_tags", _bad_tag, "cannot have '{1}', which is no label that is free", "letters, digits and '_'"),
    ("model_operations.op_library_filename", _is_given, "names libraries of operators, which are not loaded", "leave it out"),
    ("model_repository_agents.agents", _is_given, "names agents, which there are not", "put the files here as they are loaded"),
    (f"{_SEQUENCE}.control_input", _twice("name"), "has two called '{1}'", ""),
    (f"{_SEQUENCE}.control_input.name", _is_missing, _MISSING, ""),
    (f"{_SEQUENCE}.control_input.control", lambda value, _: len(value) != 1, "must have one entry", ""),
    (f"{_SEQUENCE}.oldest.max_candidate_sequences", _is_negative, "is {0}, and must not be negative", ""),
    (f"{_SEQUENCE}.direct.minimum_slot_utilization", lambda value, _: not 0 <= value <= 1,
     "is {0}: sequence batching minimum slot utilization must be in range (0.0, 1.0]", ""),
    (_STATE, _twice("input_name"), "has two for the input '{1}'", ""),
    (_STATE, _twice("output_name"), "has two for the output '{1}'", ""),
    *((f"{_STATE}.{field}", _is_missing, _MISSING, "") for field in ("input_name", "output_name", "data_type", "dims")),
    (f"{_STATE}.dims", _bad_dims, "{1}", ""),
    (f"{_STATE}.initial_state", lambda value, _: len(value) > 1, "is given more than once", ""),
    (f"{_STATE}.initial_state.data_file", _leads_out, _OUT, ""),
    (f"{_STATE}.initial_state.dims", _bad_sizes, "{1}", ""),
    ("ensemble_scheduling.step", _is_missing, "is missing: an ensemble is made of other models", ""),
    ("ensemble_scheduling.step.model_name", _is_missing, _MISSING, ""),
    ("ensemble_scheduling.step.model_version", lambda value, _: value < -1, "is {0}", "-1: the server chooses"),
    ("ensemble_scheduling.step.input_map", _is_missing, _MISSING, ""),
    ("ensemble_scheduling.step.output_map", _is_missing, _MISSING, ""),
    ("model_warmup", _twice("name"), "has two called '{1}'", ""),
    ("model_warmup.count", lambda value, _: value > 1_000_000, "is {0}, and must be at most 1000000", ""),
    ("model_warmup.inputs", _is_missing, _MISSING, ""),
    ("model_warmup.inputs.data_type", _is_missing, _MISSING, ""),
    ("model_warmup.inputs.dims", _bad_sizes, "{1}", ""),
    ("model_warmup.inputs.input_data_file", _leads_out, _OUT, ""),
    ("model_metrics.metric_control.metric_identifier.family", lambda value, _: value != _HISTOGRAM, "is '{0}'", _HISTOGRAM),
    ("model_metrics.metric_control.histogram_options.buckets", lambda value, _: not value or sorted(set(value)) != value,
     "must be numbers that rise, at least one", ""),
]  # fmt: skip
_RULES: dict[str, list[tuple[_Test, str, str]]] = defaultdict(list)
for _kind, _test, _reason, _hint in _TABLE:
    _RULES[_kind].append((_test, _reason, _hint))

_WITHOUT_EFFECT = {
    "runtime": "the backend decides what runs a model",
    "cc_model_filenames": "there is no GPU",
    "instance_group.host_policy": "the server shares out the cores",
    "model_metrics": "the buckets of histograms are the same for all models",
    "optimization.cuda": "there is no GPU",
    "optimization.eager_batching": "batches are made when an instance is free",
    "optimization.execution_accelerators.gpu_execution_accelerator": "there is no GPU",
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered on the CPU",
    "optimization.input_pinned_memory.enable": "there is no GPU to copy to",
    "optimization.output_pinned_memory.enable": "there is no GPU to copy from",
    "optimization.priority": "instances run with the server's own priority",
}
"""Fields that are taken and change nothing, and why."""
