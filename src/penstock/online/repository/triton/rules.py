"""A table of rules for the fields of a model's configuration, and the function that applies them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.config import did_you_mean
from penstock.engines.base import Finding, Severity
from penstock.errors import InvalidArgument, InvalidConfig
from penstock.online.repository.triton.schema import DATA_TYPES
from penstock.protocol.messages import Message, ModelInstanceGroup, ModelSequenceBatching
from penstock.tensor import element_count

ON_CPU = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL)
"""Kinds of instance groups that always run on the CPU. A group of KIND_AUTO runs on the CPU if it names no GPU."""
_HISTOGRAM = "nv_inference_first_response_histogram_ms"
_CORRID = ModelSequenceBatching.Control.Kind.Value("CONTROL_SEQUENCE_CORRID")
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")

_Test = Callable[..., Any]
"""A test of a field. Takes the field's value, and the messages that enclose the field, from the innermost to the whole
configuration. Returns the fault, or a false value if there is none."""
_Row = tuple[str, _Test, str, str]
"""A field (``[]`` stands for each of its entries), the field's test, and the reason and hint of the error. In both texts, {0} is
the field's value and {1} is the test's result."""


def error(path: str, reason: str, hint: str = "") -> Finding:
    """A finding that prevents the model from being served."""
    return Finding(Severity.ERROR, f"'{path}' {reason}", hint)


def prefix(name: str, where: str = "") -> str:
    """The beginning of an error message about the configuration of model ``name``. ``where`` is its file."""
    return f"{where}: model '{name}': " if where else f"model '{name}': "


@contextmanager
def prefixed(begin: str) -> Iterator[None]:
    """If the block raises InvalidConfig, put ``begin`` in front of its message."""
    try:
        yield
    except InvalidConfig as wrong:
        raise InvalidConfig(begin + wrong.message, wrong.hint) from None


def check_fields(message: Message, *around: Message, path: str = "", kind: str = "") -> Iterator[Finding]:
    """Apply the rules to ``message``, which is nested in the messages ``around``. ``kind`` is ``path`` without numbers and keys."""
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value, own, of_kind = getattr(message, field.name), f"{path}{field.name}", f"{kind}{field.name}"
        yield from _apply(of_kind, own, value, message, *around)
        if value and of_kind in _WITHOUT_EFFECT:
            yield Finding(Severity.WARNING, f"'{own}' has no effect: {_WITHOUT_EFFECT[of_kind]}")
        items = value.items() if hasattr(value, "items") else enumerate(value) if field.is_repeated else [(None, value)]
        for key, one in items:
            at = own if key is None else f"{own}[{key}]"
            if key is not None:
                yield from _apply(f"{of_kind}[]", at, one, message, *around)
            if hasattr(one, "DESCRIPTOR"):
                yield from check_fields(one, message, *around, path=f"{at}.", kind=f"{of_kind}.")
            elif field.enum_type is not None and one not in field.enum_type.values_by_number:
                known = ", ".join(field.enum_type.values_by_name)
                yield error(at, f"is {one}, which is not one of its values", f"use one of {known}")
            elif isinstance(one, float) and not math.isfinite(one):
                yield error(at, f"is {one}, but must be a finite number")


def _apply(kind: str, path: str, value: Any, *around: Message) -> Iterator[Finding]:
    for test, reason, hint in _RULES.get(kind, ()):
        if wrong := test(value, *around):
            yield error(path, reason.format(value, wrong), hint.format(value, wrong))


def gpu_of(groups: Iterable[Message], gpus: int) -> int | None:
    """The number of the GPU on which the instances of ``groups`` run; None for the CPU. ``gpus``: the engine's number of GPUs.

    A group of KIND_GPU without GPU numbers runs on the first GPU. Raises InvalidConfig with a message that begins with the field.
    """
    wanted: set[int | None] = set()
    for number, group in enumerate(groups):
        path = f"'instance_group[{number}]"
        if group.kind != ModelInstanceGroup.KIND_GPU and (group.kind in ON_CPU or not group.gpus):
            wanted.add(None)
            continue
        if not gpus:
            field = "gpus' names devices" if group.gpus else "kind' is KIND_GPU"
            raise InvalidConfig(f"{path}.{field}, but instances run on the CPU only", "write KIND_CPU, or remove it")
        for gpu in group.gpus or [0]:
            if not 0 <= gpu < gpus:
                raise InvalidConfig(
                    f"{path}.gpus' names GPU {gpu}, but there are {gpus} GPUs", "the first GPU has number 0"
                )
            wanted.add(gpu)
    if len(wanted) > 1:
        raise InvalidConfig("'instance_group' names several devices", "all instances of a model run on one device")
    return next(iter(wanted), None)


def _trunks(dims: Iterable[int]) -> list[int]:
    """The products of the fixed dimensions between the free dimensions. A reshape must keep these products."""
    counts = [1]
    for dim in dims:
        counts[-1] *= dim if dim != -1 else 1
        counts += [1] if dim == -1 else []
    return counts


def _is_missing(value: Any, *_: Message) -> bool:
    return not value


def _is_given(value: Any, *_: Message) -> bool:
    return bool(value)


def _is_negative(value: int, *_: Message) -> bool:
    return value < 0


def _leads_out(value: str, *_: Message) -> bool:
    """True unless ``value`` is a relative path that stays inside the model's folder."""
    return "\0" in value or bool(re.search(r"^/|^[A-Za-z]:|\\|(^|/)\.\.(/|$)", value))


def _bad_dims(value: Iterable[int], *_: Message) -> str:
    for dim in value:
        if dim < 1 and dim != -1:
            return f"holds {dim}: dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
    try:
        element_count([abs(dim) for dim in value])
    except InvalidArgument as too_large:
        return f"is invalid: {too_large.message}"
    return ""


def _bad_sizes(value: Iterable[int], *_: Message) -> str:
    return next((f"holds {dim}, but sizes must be at least 1" for dim in value if dim < 1), "")


def _twice(field: str = "") -> _Test:
    def test(value: Iterable[Any], *_: Message) -> Any:
        counts = Counter(getattr(one, field) if field else one for one in value)
        return next((one for one, count in counts.items() if count > 1 and one != ""), None)

    return test


def _is_none_of(*names: str) -> _Test:
    numbers = [DATA_TYPES.values_by_name[name].number for name in names]
    return lambda value, *_: value not in numbers


def _bad_tag(value: Iterable[str], *_: Message) -> str | None:
    """The first name that Prometheus does not allow, or that the server already uses as a label."""
    taken = ("model", "version", "reason", "le", "quantile")
    return next((tag for tag in value if tag in taken or not re.fullmatch(r"(?!__)[a-zA-Z_]\w*", tag, re.ASCII)), None)


def _is_batchless(config: Message) -> bool:
    return bool(config.HasField("max_batch_size") and config.max_batch_size == 0)


def _is_ensemble(config: Message) -> bool:
    return bool(config.HasField("ensemble_scheduling"))


def _unknown(names: Iterable[str], known: Iterable[str]) -> tuple[str, str] | None:
    """The first of ``names`` that is not in ``known``, and a hint."""
    return next(((name, did_you_mean(name, list(known))) for name in names if name not in known), None)


def _names(tensors: Iterable[Message]) -> list[str]:
    return [tensor.name for tensor in tensors]


def _bad_preferred(size: int, *around: Message) -> str:
    config = around[-1]
    is_too_large = config.HasField("max_batch_size") and size > config.max_batch_size
    return "must be positive" if size < 1 else "must be <= max batch size" if is_too_large else ""


def _repeated_kind(tensors: Iterable[Message], *_: Message) -> str:
    counts = Counter(control.kind for tensor in tensors for control in tensor.control)
    twice = next((kind for kind, count in counts.items() if count > 1), None)
    return "" if twice is None else ModelSequenceBatching.Control.Kind.Name(twice)


def _bad_pairs(control: Message, *_: Message) -> str:
    given = [field for field in _FALSE_TRUE if getattr(control, field)]
    return "" if control.kind == _CORRID or len(given) == 1 else " and ".join(given) or "none"


def _misfit(dims: Sequence[int], _initial: Message, state: Message, *_: Message) -> str:
    fits = len(dims) == len(state.dims) and all(want in (-1, got) for want, got in zip(state.dims, dims, strict=True))
    return "" if fits else str(state.dims)


def _unmade_outputs(outputs: Iterable[Message], config: Message) -> Any:
    made = {value for step in config.ensemble_scheduling.step for value in step.output_map.values()}
    return config.ensemble_scheduling.step and _unknown(_names(outputs), made.union(_names(config.input)))


def _unknown_samples(inputs: Iterable[str], _: Message, config: Message) -> Any:
    is_complete = config.input and not config.HasField("sequence_batching") and not config.batch_input
    return is_complete and _unknown(inputs, _names(config.input))


_MISSING, _OUT, _OF_TENSORRT = (
    "is missing",
    "'{0}' is outside the model's folder",
    "is for TensorRT, which is not supported",
)
_UNKNOWN, _MEANT = "names '{1[0]}', which the configuration does not define", "{1[1]}"
_BATCH: list[_Row] = [
    ("", lambda value, config: value and _is_batchless(config), "needs batches, but 'max_batch_size' is 0", ""),
    (".source_input", lambda value, *_: len(value) != 1, "must name one input", ""),
    (".source_input", lambda value, _, config: _unknown(value, _names(config.input)), _UNKNOWN, _MEANT),
    (".target_name", _is_missing, _MISSING, ""),
    (".target_name", _twice(), "names '{1}' twice", ""),
    (
        ".target_name[]",
        lambda value, _, config: value in _names(config.input),
        "is '{0}', an input that clients send",
        "",
    ),
]
_TENSOR: list[_Row] = [
    ("", _twice("name"), "has two entries named '{1}'", ""),
    ("", lambda value, config: _is_batchless(config) and any(one.HasField("reshape") and not one.reshape.shape for one in value),
     "has an empty 'reshape', but a model without batches has no scalars", ""),
    ("", lambda value, config: _is_ensemble(config) and not value, "is missing: an ensemble has no model to take it from", ""),
    (".name", _is_missing, _MISSING, ""),
    (".data_type", lambda value, tensor, config: (tensor.dims or _is_ensemble(config)) and not value, _MISSING, ""),
    (".dims", _bad_dims, "{1}", ""),
    (".reshape.shape", _bad_dims, "{1}", ""),
    (".reshape", lambda value, tensor, _: tensor.dims and _trunks(tensor.dims) != _trunks(value.shape),
     "has different size for dims and reshape", ""),
    (".is_shape_tensor", _is_given, _OF_TENSORRT, "remove it"),
    (".is_non_linear_format_io", _is_given, _OF_TENSORRT, "remove it"),
]  # fmt: skip
_SEQUENCE, _STATE = "sequence_batching", "sequence_batching.state"
_CONTROL, _INITIAL = f"{_SEQUENCE}.control_input.control", f"{_STATE}.initial_state"
_TABLE: list[_Row] = [
    *((field + part, test, reason, hint) for field in ("input", "output") for part, test, reason, hint in _TENSOR),
    *((field + part, test, reason, hint) for field in ("batch_input", "batch_output") for part, test, reason, hint in _BATCH),
    ("input.format", lambda value, tensor, _: value and len(tensor.dims) != 3, "needs three dimensions in 'dims'", ""),
    ("input", lambda value, config: _is_batchless(config) and any(one.allow_ragged_batch for one in value),
     "has 'allow_ragged_batch', which needs batches, but 'max_batch_size' is 0", ""),
    ("output", _unmade_outputs, _UNKNOWN, _MEANT),
    ("output.label_filename", _leads_out, _OUT, ""),
    ("backend", lambda value, config: _is_ensemble(config) and value, "is '{0}', but an ensemble has no backend", "remove it"),
    ("platform", lambda value, config: _is_ensemble(config) and value not in ("", "ensemble"),
     "is '{0}', but the platform of an ensemble is 'ensemble'", "remove it"),
    ("platform", lambda value, config: value == "ensemble" and not _is_ensemble(config),
     "is 'ensemble', so 'ensemble_scheduling' must be set", ""),
    ("response_cache", lambda value, config: value.enable and config.HasField("sequence_batching"),
     "is enabled, but responses within sequences cannot be cached", "remove it"),
    ("response_cache", lambda value, config: value.enable and config.model_transaction_policy.decoupled,
     "is enabled, but responses of a decoupled model cannot be cached", "remove it"),
    ("max_batch_size", _is_negative, "is {0}, but must not be negative", "with 0, requests are not merged"),
    ("version_policy.latest.num_versions", _is_missing, "must be at least 1", ""),
    ("version_policy.specific.versions", _is_missing, "names no version", ""),
    ("version_policy.specific.versions", _bad_sizes, "{1}", ""),
    ("version_policy.specific.versions", _twice(), "names version {1} twice", ""),
    ("batch_input.data_type", _is_none_of("TYPE_INT32", "TYPE_FP32"), "must be TYPE_INT32 or TYPE_FP32", ""),
    ("batch_output.target_name", lambda value, _, config: _unknown(value, _names(config.output)), _UNKNOWN, _MEANT),
    ("instance_group", lambda value, _: sum(one.count for one in value) > 1024, "requires more than 1024 instances", ""),
    ("instance_group", lambda value, _: value and all(one.passive for one in value), "has only 'passive' groups", ""),
    ("instance_group.count", _is_negative, "is {0}, but must be at least 1", ""),
    ("instance_group.gpus", lambda value, group, _: value and group.kind in ON_CPU,
     "names devices, but the group's instances run on the CPU only", "remove it"),
    ("instance_group.secondary_devices", _is_given, "names devices, but instances run on the CPU only", "remove it"),
    ("instance_group.profile", _is_given, _OF_TENSORRT, "remove it"),
    ("instance_group.rate_limiter.resources", _twice("name"), "has two entries named '{1}'", ""),
    ("instance_group.rate_limiter.resources.name", _is_missing, _MISSING, ""),
    ("instance_group.rate_limiter.resources.count", _is_missing, "must be at least 1", ""),
    ("default_model_filename", lambda value, _: _leads_out(value) or "/" in value or value == ".",
     "'{0}' is not the name of a file in the version's folder", ""),
    ("cc_model_filenames", lambda value, _: any(_leads_out(one) for one in value.values()), "is outside the folder", ""),
    ("metric_tags", _bad_tag, "has '{1}', which is not a valid label or is taken", "use letters, digits and '_'"),
    ("model_operations.op_library_filename", _is_given, "names operator libraries, which are not loaded", "remove it"),
    ("model_repository_agents.agents", _is_given, "names agents, which are not supported", "store the files in their final form"),
    (f"{_SEQUENCE}.oldest.max_candidate_sequences", _is_negative, "is {0}, but must not be negative", ""),
    (f"{_SEQUENCE}.oldest.preferred_batch_size[]", _bad_preferred, "is {0}: preferred batch size {1}", ""),
    (f"{_SEQUENCE}.direct.minimum_slot_utilization", lambda value, *_: not 0 <= value <= 1,
     "is {0}: sequence batching minimum slot utilization must be in range (0.0, 1.0]", ""),
    (f"{_SEQUENCE}.control_input", _twice("name"), "has two entries named '{1}'", ""),
    (f"{_SEQUENCE}.control_input", _repeated_kind, "has two controls of kind {1}", ""),
    (f"{_SEQUENCE}.control_input.name", _is_missing, _MISSING, ""),
    (f"{_SEQUENCE}.control_input.name", lambda value, *around: value in _names(around[-1].input),
     "'{0}' is also listed in 'input'", "remove it there: the server creates it"),
    (_CONTROL, lambda value, *_: len(value) != 1, "must have one entry", ""),
    (f"{_CONTROL}[]", _bad_pairs, f"must have one of {', '.join(_FALSE_TRUE)}, but has {{1}}", ""),
    (f"{_CONTROL}.data_type", lambda value, control, *_: control.kind == _CORRID and _is_none_of(*_CORRID_TYPES)(value),
     f"must be one of {', '.join(_CORRID_TYPES)}", ""),
    *((f"{_CONTROL}.{field}", lambda value, control, *_: value and control.kind == _CORRID,
       "does not apply to CONTROL_SEQUENCE_CORRID", "remove it") for field in _FALSE_TRUE),
    *((f"{_CONTROL}.{field}", lambda value, control, *_: control.kind != _CORRID and len(value) not in (0, 2),
       "must have exactly 2 entries: the value for false and the value for true", "") for field in _FALSE_TRUE),
    (_STATE, _twice("input_name"), "has two states for the input '{1}'", ""),
    (_STATE, _twice("output_name"), "has two states for the output '{1}'", ""),
    *((f"{_STATE}.{field}", _is_missing, _MISSING, "") for field in ("input_name", "output_name", "data_type", "dims")),
    (f"{_STATE}.input_name", lambda value, *around: value in _names(around[-1].input),
     "'{0}' is also listed in 'input'", "remove it there"),
    (f"{_STATE}.dims", _bad_dims, "{1}", ""),
    (_INITIAL, lambda value, *_: len(value) > 1, "is given more than once", ""),
    (f"{_INITIAL}[]", lambda value, *_: not value.WhichOneof("state_data"), "must have 'zero_data' or 'data_file'", ""),
    (f"{_INITIAL}.data_type", lambda value, _, state, *__: value != state.data_type, "must equal the data type of the state", ""),
    (f"{_INITIAL}.data_file", _leads_out, _OUT, ""),
    (f"{_INITIAL}.dims", _bad_sizes, "{1}", ""),
    (f"{_INITIAL}.dims", _misfit, "is {0}, but the state has dims {1}", ""),
    ("ensemble_scheduling.step", _is_missing, "is missing: an ensemble needs at least one step", ""),
    ("ensemble_scheduling.step.model_name", _is_missing, _MISSING, ""),
    ("ensemble_scheduling.step.model_version", lambda value, *_: value < -1, "is {0}", "-1: the server chooses"),
    ("ensemble_scheduling.step.input_map", _is_missing, _MISSING, ""),
    ("ensemble_scheduling.step.output_map", _is_missing, _MISSING, ""),
    ("model_warmup", _twice("name"), "has two entries named '{1}'", ""),
    ("model_warmup.batch_size", lambda value, _, config: config.HasField("max_batch_size") and value > max(1, config.max_batch_size),
     "is {0}, more than 'max_batch_size'", ""),
    ("model_warmup.count", lambda value, *_: value > 1_000_000, "is {0}, but must be at most 1000000", ""),
    ("model_warmup.inputs", _is_missing, _MISSING, ""),
    ("model_warmup.inputs", _unknown_samples, _UNKNOWN, _MEANT),
    ("model_warmup.inputs[]", lambda value, *_: not value.WhichOneof("input_data_type"),
     "must have 'zero_data', 'random_data' or 'input_data_file'", ""),
    ("model_warmup.inputs.data_type", _is_missing, _MISSING, ""),
    ("model_warmup.inputs.dims", _bad_sizes, "{1}", ""),
    ("model_warmup.inputs.input_data_file", _leads_out, _OUT, ""),
    ("model_metrics.metric_control.metric_identifier.family", lambda value, *_: value != _HISTOGRAM, "is '{0}'", f"use {_HISTOGRAM}"),
    ("model_metrics.metric_control.histogram_options.buckets", lambda value, *_: not value or sorted(set(value)) != value,
     "must be one or more numbers in ascending order", ""),
]  # fmt: skip
_RULES: dict[str, list[tuple[_Test, str, str]]] = defaultdict(list)
for _kind, _test, _reason, _hint in _TABLE:
    _RULES[_kind].append((_test, _reason, _hint))

_WITHOUT_EFFECT = {
    "runtime": "the backend alone determines how a model runs",
    "cc_model_filenames": "it applies to GPUs only",
    "instance_group.host_policy": "the server assigns cores to instances",
    "model_metrics": "the buckets of histograms are the same for all models",
    "optimization.cuda": "it applies to GPUs only",
    "optimization.eager_batching": "a batch is formed when an instance is free",
    "optimization.execution_accelerators.gpu_execution_accelerator": "it applies to GPUs only",
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered on the CPU",
    "optimization.input_pinned_memory.enable": "it applies to copies to a GPU only",
    "optimization.output_pinned_memory.enable": "it applies to copies from a GPU only",
    "optimization.priority": "all instances run with the priority of the server",
}
"""The reason why a field is accepted without effect, by field."""
