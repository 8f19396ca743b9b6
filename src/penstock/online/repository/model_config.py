"""A model's configuration in Triton's schema (``ModelConfig``): what a user says of a model, and the whole that holds.

Users say what differs from what the model itself and its bundle tell; the rest is filled in. The effective configuration
is one protobuf message, which the protocol shows and from which the scheduler is set up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy, TimeoutAction
from penstock.protocol.messages import Message, ModelConfig
from penstock.tensor import DataType, Signature, TensorSpec

SETTABLE = (
    "max_batch_size",
    "dynamic_batching",
    "instance_group",
    "response_cache",
    "parameters",
    "metric_tags",
    "output",
)
"""The fields that a user may set."""

_MERGED = ("dynamic_batching", "response_cache")
_ACTIONS = (TimeoutAction.REJECT, TimeoutAction.DELAY)
_KIND_GPU, _KIND_CPU = 1, 2
_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def parse(name: str, settings: Mapping[str, Any]) -> Message:
    """The message that holds just ``settings``, the fields by their names in the schema. Raises InvalidConfig."""
    if not isinstance(settings, Mapping):
        raise InvalidConfig(f"the settings of model '{name}' are not a table", f"write them below [models.{name}]")
    for field in settings:
        if field not in SETTABLE:
            raise InvalidConfig(f"model '{name}': '{field}' cannot be set", did_you_mean(field, SETTABLE))
    try:
        given = json_format.ParseDict(dict(settings), ModelConfig())
    except json_format.ParseError as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"the configuration of model '{name}' is wrong: {reason}") from None
    if given.max_batch_size < 1 and "max_batch_size" in settings:
        raise InvalidConfig(f"model '{name}': 'max_batch_size' must be at least 1", "with 1 every request runs alone")
    for group in given.instance_group:
        if group.count < 0:
            raise InvalidConfig(f"model '{name}': the 'count' of an 'instance_group' must be at least 1")
        if group.kind == _KIND_GPU:
            raise InvalidConfig(f"model '{name}': instances run on the CPU only", "leave out 'kind'")
        _refuse_others(name, "instance_group", group, ("name", "count", "kind"))
    for output in given.output:
        _refuse_others(name, "output", output, ("name", "label_filename"))
    return given


def _refuse_others(name: str, where: str, message: Message, known: Sequence[str]) -> None:
    """Nothing that is said shall be passed over."""
    for field, _ in message.ListFields():
        if field.name not in known:
            raise InvalidConfig(
                f"model '{name}': '{field.name}' of '{where}' cannot be set", f"known: {', '.join(known)}"
            )


def complete(
    given: Message,
    name: str,
    platform: str,
    signature: Signature,
    rows: int | None,
    instances: int,
    *,
    decoupled: bool = False,
) -> Message:
    """``given`` with all that it leaves open filled in; ``rows`` are the most that are merged, None if none can be.

    Raises InvalidConfig if it contradicts the model.
    """
    whole = ModelConfig(name=name, platform=platform, backend=platform.partition("_")[0], max_batch_size=rows or 0)
    whole.version_policy.latest.num_versions = 1
    for spec in signature.inputs:
        whole.input.add(**_describe(spec, rows))
    for spec in signature.outputs:
        whole.output.add(**_describe(spec, rows))
    whole.instance_group.add(name=f"{name}_0", count=instances, kind=_KIND_CPU)
    if decoupled:
        whole.model_transaction_policy.decoupled = True
        if given.response_cache.enable:
            raise InvalidConfig(
                f"model '{name}' is decoupled, and such answers are not kept", "leave out 'response_cache'"
            )
    if rows is not None:
        whole.dynamic_batching.SetInParent()
    elif given.HasField("dynamic_batching"):
        raise InvalidConfig(f"model '{name}' cannot be batched", "leave out 'dynamic_batching'")
    for field in _MERGED:
        if given.HasField(field):
            getattr(whole, field).MergeFrom(getattr(given, field))
    for key, value in given.parameters.items():
        whole.parameters[key].CopyFrom(value)
    whole.metric_tags.update(given.metric_tags)
    _take_labels(whole, given)
    return whole


def batching(config: Message, max_queue: int) -> BatchingConfig:
    """How the scheduler is to batch a model; ``max_queue`` bounds what it accepts and has not yet answered.

    Raises InvalidConfig.
    """
    wanted = config.dynamic_batching
    try:
        return BatchingConfig(
            batchable=config.max_batch_size > 0,
            max_batch=max(1, config.max_batch_size),
            max_queue=max_queue,
            preferred_batch_size=tuple(sorted(wanted.preferred_batch_size)),
            max_queue_delay_microseconds=wanted.max_queue_delay_microseconds,
            preserve_ordering=wanted.preserve_ordering,
            priority_levels=wanted.priority_levels,
            default_priority_level=wanted.default_priority_level,
            default_queue_policy=_policy(wanted.default_queue_policy),
            priority_queue_policy={level: _policy(one) for level, one in wanted.priority_queue_policy.items()},
            decoupled=config.model_transaction_policy.decoupled,
            instances=sum(group.count for group in config.instance_group),
        )
    except InvalidConfig as error:
        raise InvalidConfig(f"model '{config.name}': {error.message}", error.hint) from None


def to_json(config: Message) -> dict[str, Any]:
    """As plain data in the protocol's JSON form: the schema's field names, defaults written out, 64-bit integers as numbers."""
    data: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _use_numbers(data, config)
    return data


def _describe(spec: TensorSpec, rows: int | None) -> dict[str, Any]:
    """The schema knows no batch dimension where requests can be merged."""
    datatype = "TYPE_STRING" if spec.datatype is DataType.BYTES else f"TYPE_{spec.datatype.value}"
    return {"name": spec.name, "data_type": datatype, "dims": spec.shape if rows is None else spec.shape[1:]}


def _policy(policy: Message) -> QueuePolicy:
    if not 0 <= policy.timeout_action < len(_ACTIONS):
        raise InvalidConfig(f"there is no 'timeout_action' {policy.timeout_action}", "REJECT or DELAY")
    return QueuePolicy(
        timeout_action=_ACTIONS[policy.timeout_action],
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _take_labels(whole: Message, given: Message) -> None:
    outputs = {output.name: output for output in whole.output}
    for output in given.output:
        if output.name not in outputs:
            raise InvalidConfig(
                f"model '{whole.name}' has no output '{output.name}'", did_you_mean(output.name, outputs)
            )
        outputs[output.name].label_filename = output.label_filename


def _use_numbers(data: dict[str, Any], message: Message) -> None:
    """Make numbers of the 64-bit integers in ``data``, made from ``message``: the JSON form of protobuf writes them as text."""
    for name, value in data.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None:
            part = getattr(message, name)
            if field.message_type.GetOptions().map_entry:
                is_text = field.message_type.fields_by_name["key"].cpp_type == FieldDescriptor.CPPTYPE_STRING
                if field.message_type.fields_by_name["value"].message_type is not None:
                    for key, inner in value.items():
                        _use_numbers(inner, part[key if is_text else int(key)])
            elif isinstance(value, list):
                for inner, one in zip(value, part, strict=True):
                    _use_numbers(inner, one)
            else:
                _use_numbers(value, part)
        elif field.cpp_type in _LONG:
            data[name] = [int(one) for one in value] if isinstance(value, list) else int(value)
