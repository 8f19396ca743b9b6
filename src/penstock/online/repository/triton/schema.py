"""Converts configurations between Triton's schema, our ``ModelConfig``, and the JSON form of the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from penstock.online.repository import config as ours
from penstock.protocol.messages import POOL, Message, ModelConfig
from penstock.tensor import DataType

DATA_TYPES = POOL.FindEnumTypeByName("inference.DataType")
DATATYPES: Mapping[int, DataType] = {
    value.number: DataType("BYTES" if value.name == "TYPE_STRING" else value.name.removeprefix("TYPE_"))
    for value in DATA_TYPES.values
    if value.number
}
# A conversion at import time, because msgspec crashes if several threads use a type for the first time at once.
msgspec.json.Decoder(ours.ModelConfig)
_WORDS: Mapping[int, Any] = {value.number: value.name for value in DATA_TYPES.values}


def typed(message: Message) -> ours.ModelConfig:
    """Convert ``message``, a checked ``ModelConfig`` of Triton's schema, to our type."""
    policy, optimization = message.version_policy, message.optimization
    data = _plain(message, DATATYPES) | {
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
    return msgspec.convert(data, ours.ModelConfig, str_keys=True)


def to_message(config: ours.ModelConfig) -> Message:
    """``config`` in Triton's schema, with every field that the user set."""
    return ModelConfig.FromString(config.wire)


def to_json(config: ours.ModelConfig) -> dict[str, Any]:
    """``config`` in the protocol's JSON form: the schema's field names, with defaults, and 64-bit integers as numbers."""
    return _plain(to_message(config), _WORDS)


def with_instances(config: ours.ModelConfig, count: int) -> ours.ModelConfig:
    """The completed ``config`` with one group of ``count`` instances."""
    message = to_message(config)
    del message.instance_group[1:]
    message.instance_group[0].count = count
    return typed(message)


def with_parts(config: ours.ModelConfig, names: Sequence[str]) -> ours.ModelConfig:
    """A copy of ``config`` whose ensemble steps call the models ``names``, in order."""
    message = to_message(config)
    for step, name in zip(message.ensemble_scheduling.step, names, strict=True):
        step.model_name = name
    return typed(message)


def number_of(datatype: DataType) -> int:
    """The enumeration value of ``datatype`` in Triton's schema."""
    return next(number for number, known in DATATYPES.items() if known is datatype)


def _plain(message: Message, datatypes: Mapping[int, Any]) -> dict[str, Any]:
    """``message`` as plain data. ``datatypes`` maps datatypes to their new values. Values of other enumerations become their
    names. Omits unset fields without a default.
    """
    return {
        field.name: _plain_field(field, getattr(message, field.name), datatypes)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_field(field: FieldDescriptor, value: Any, datatypes: Mapping[int, Any]) -> Any:
    if hasattr(value, "items"):
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _plain_value(inner, one, datatypes) for key, one in value.items()}
    if field.is_repeated:
        return [_plain_value(field, one, datatypes) for one in value]
    return _plain_value(field, value, datatypes)


def _plain_value(field: FieldDescriptor, value: Any, datatypes: Mapping[int, Any]) -> Any:
    if field.message_type is not None:
        return _plain(value, datatypes)
    if field.enum_type is DATA_TYPES:
        return datatypes.get(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number
        return known[value].name if value in known else str(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return float(str(np.float32(value)))  # 0.1, not 0.10000000149011612
    return value


def _lasting(message: Message) -> Message:
    """``message`` without the fields that can be changed in place: the version policy, and the sizes of instance groups."""
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
