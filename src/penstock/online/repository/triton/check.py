"""Checks a configuration without its model: finds invalid fields, and fields without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.engines.base import Finding, Severity
from penstock.errors import InvalidConfig
from penstock.online.repository import config as ours
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.triton.rules import check_fields, error, prefix
from penstock.online.repository.triton.schema import typed
from penstock.online.repository.triton.text import parse_settings
from penstock.protocol.messages import Message, ModelConfig


def parse(name: str, settings: Mapping[str, Any]) -> ours.ModelConfig:
    """A configuration that sets only ``settings``. Their names are the field names of the schema. Raises InvalidConfig."""
    if not isinstance(settings, Mapping):
        raise InvalidConfig(f"the settings of model '{name}' are not a table", f"write them below [models.{name}]")
    given = parse_settings(settings, f"model '{name}'")
    check(given, name)
    return typed(given)


def check(given: Message, name: str, where: str = "") -> list[Finding]:
    """The warnings about ``given``, the configuration of model ``name`` from the file ``where``.

    Raises InvalidConfig for the first invalid field, with the model, the field and the reason.
    """
    warnings = []
    for finding in examine(given, name):
        if finding.severity is Severity.ERROR:
            raise InvalidConfig(prefix(name, where) + finding.message, finding.hint)
        warnings.append(finding)
    return warnings


def examine(given: Message, name: str) -> Iterator[Finding]:
    """All findings about ``given``, the configuration of model ``name``. Each finding begins with the path of the field."""
    if given.name and given.name != name:
        yield error("name", f"is '{given.name}', but the model is called '{name}'", f"write '{name}', or remove it")
    for number, step in enumerate(given.ensemble_scheduling.step):
        if step.model_name == name:
            yield error(f"ensemble_scheduling.step[{number}].model_name", "is the ensemble itself")
    yield from check_fields(given)
    # If ``max_batch_size`` is not configured, the model determines it, and the model is not loaded yet.
    size = given.max_batch_size if given.HasField("max_batch_size") else 2**31 - 1
    wanted = given.dynamic_batching
    if given.HasField("dynamic_batching") and size >= 0 and not any(check_fields(wanted, kind="dynamic_batching.")):
        try:
            batching(typed(ModelConfig(max_batch_size=size, dynamic_batching=wanted)), 1)
        except InvalidConfig as wrong:
            yield error("dynamic_batching", f"is invalid: {wrong.message.removeprefix(prefix(''))}", wrong.hint)
