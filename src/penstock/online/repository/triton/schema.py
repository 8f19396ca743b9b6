"""Between Triton's schema and our ``ModelConfig``, and the forms that the protocol shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from penstock.online.repository import config as ours
from penstock.protocol.messages import POOL, Message, ModelConfig
from penstock.tensor import DataType

DATA_TYPES = POOL.FindEnumTypeByName("inference.DataType")
DATATYPES = {
    value.number: DataType("BYTES" if value.name == "TYPE_STRING" else value.name.removeprefix("TYPE_"))
    for value in DATA_TYPES.values
    if value.number
}
_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def typed(message: Message) -> ours.ModelConfig:
    """``message``, a ``ModelConfig`` of Triton's schema that has passed ``check``, as ours."""
    policy, optimization = message.version_policy, message.optimization
    data = _plain(message) | {
        "version_policy": {
            "latest": max(1, policy.latest.num_versions),
            "all": policy.HasField("all"),
            "specific": tuple(policy.specific.versions) if policy.HasField("specific") else None,
        },
        "parameters": {name: one.string_value for name, one in message.parameters.items()},
        "decoupled": message.model_transaction_policy.decoupled,
        "response_cache": message.response_cache.enable,
        "lasting": _lasting(message).SerializeToString(deterministic=True),
        "wire": message.SerializeToString(deterministic=True),
    }
    if message.HasField("optimization"):
        accelerators = [one.name for one in optimization.execution_accelerators.cpu_execution_accelerator]
        data["optimization"] = {"graph_level": optimization.graph.level, "accelerators": accelerators}
    return msgspec.convert(data, ours.ModelConfig)


def to_message(config: ours.ModelConfig) -> Message:
    """``config`` in Triton's schema, with all that was given in it."""
    return ModelConfig.FromString(config.wire)


def to_json(config: ours.ModelConfig) -> dict[str, Any]:
    """As plain data in the protocol's JSON form: the schema's field names, defaults written out, 64-bit integers as numbers."""
    message = to_message(config)
    data: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _use_numbers(data, message)
    return data


def with_instances(config: ours.ModelConfig, count: int) -> ours.ModelConfig:
    """``config``, a completed one, with one group of ``count`` instances."""
    message = to_message(config)
    del message.instance_group[1:]
    message.instance_group[0].count = count
    return typed(message)


def with_parts(config: ours.ModelConfig, names: Sequence[str]) -> ours.ModelConfig:
    """``config`` with its ensemble's steps naming the models ``names``, in order."""
    message = to_message(config)
    for step, name in zip(message.ensemble_scheduling.step, names, strict=True):
        step.model_name = name
    return typed(message)


def number_of(datatype: DataType) -> int:
    """In the schema."""
    name = "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"
    number: int = DATA_TYPES.values_by_name[name].number
    return number


def _plain(message: Message) -> dict[str, Any]:
    """The fields of ``message`` that are set, as plain data: enumerations by name, datatypes as ours."""
    return {field.name: _plain_field(field, value) for field, value in message.ListFields()}


def _plain_field(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _plain_value(inner, one) for key, one in value.items()}
    return [_plain_value(field, one) for one in value] if field.is_repeated else _plain_value(field, value)


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _plain(value)
    if field.enum_type is None:
        return value
    if field.enum_type is DATA_TYPES:
        return DATATYPES.get(value)
    known = field.enum_type.values_by_number
    return known[value].name if value in known else str(value)


def _lasting(message: Message) -> Message:
    """``message`` without the fields that can be changed in place: of groups of instances, only their number."""
    rest = ModelConfig()
    rest.CopyFrom(message)
    rest.ClearField("version_policy")
    for group in rest.instance_group:
        group.ClearField("count")
        group.ClearField("name")
    groups = {group.SerializeToString(deterministic=True): group for group in rest.instance_group}
    kept = [groups[key] for key in sorted(groups)]
    del rest.instance_group[:]
    rest.instance_group.extend(kept)
    return rest


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
