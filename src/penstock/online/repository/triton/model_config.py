"""A model's whole configuration in Triton's schema (``ModelConfig``): the scheduler is set up from it, and the protocol shows it."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor

from penstock.errors import InvalidConfig
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy, TimeoutAction
from penstock.protocol.messages import Message

_ACTIONS = (TimeoutAction.REJECT, TimeoutAction.DELAY)
_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


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


def _policy(policy: Message) -> QueuePolicy:
    if not 0 <= policy.timeout_action < len(_ACTIONS):
        raise InvalidConfig(f"there is no 'timeout_action' {policy.timeout_action}", "REJECT or DELAY")
    return QueuePolicy(
        timeout_action=_ACTIONS[policy.timeout_action],
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


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
