"""What can be said of a model's configuration without its model: fields that cannot be, and fields that change nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.config import did_you_mean
from penstock.engines.base import Finding, Severity
from penstock.errors import InvalidConfig
from penstock.online.repository import config as ours
from penstock.online.repository.loading.scheduling import batching
from penstock.online.repository.triton.rules import check_fields, error, prefix
from penstock.online.repository.triton.schema import DATA_TYPES, typed
from penstock.online.repository.triton.text import parse_settings
from penstock.protocol.messages import Message, ModelConfig, ModelSequenceBatching

_KIND = ModelSequenceBatching.Control.Kind
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_FALSE_TRUE = ("int32_false_true", "fp32_false_true", "bool_false_true")


def parse(name: str, settings: Mapping[str, Any]) -> ours.ModelConfig:
    """The configuration that holds just ``settings``, the fields by their names in the schema. Raises InvalidConfig."""
    if not isinstance(settings, Mapping):
        raise InvalidConfig(f"the settings of model '{name}' are not a table", f"write them below [models.{name}]")
    given = parse_settings(settings, f"model '{name}'")
    check(given, name)
    return typed(given)


def check(given: Message, name: str, where: str = "") -> list[Finding]:
    """What is worth a warning in ``given``, the configuration of model ``name`` that was read from ``where``.

    Raises InvalidConfig with model, field and reason for the first field that cannot be.
    """
    warnings = []
    for finding in examine(given, name):
        if finding.severity is Severity.ERROR:
            raise InvalidConfig(prefix(name, where) + finding.message, finding.hint)
        warnings.append(finding)
    return warnings


def examine(given: Message, name: str) -> Iterator[Finding]:
    """All findings about ``given`` as the configuration of model ``name``; each begins with the path of the field."""
    if given.name and given.name != name:
        yield error("name", f"is '{given.name}', but the model is called '{name}'", "write the same, or leave it out")
    yield from check_fields(given)
    yield from _batches(given)
    if given.HasField("sequence_batching"):
        yield from _controls(given)
        yield from _states(given)
    yield from _ensemble(given, name)
    yield from _warm_up(given)


def _batches(given: Message) -> Iterator[Finding]:
    # Without a size given, the model's own is not known yet.
    size = given.max_batch_size if given.HasField("max_batch_size") else 2**31 - 1
    wanted = given.dynamic_batching
    if given.HasField("dynamic_batching") and size >= 0 and not any(check_fields(wanted, kind="dynamic_batching.")):
        try:
            batching(typed(ModelConfig(max_batch_size=size, dynamic_batching=wanted)), 1)
        except InvalidConfig as wrong:
            reason = wrong.message.removeprefix("model '': ")
            yield error("dynamic_batching", f"cannot be: {reason}", wrong.hint)
    for preferred in given.sequence_batching.oldest.preferred_batch_size:
        if not 0 < preferred <= size:
            reason = "must be positive" if preferred < 1 else "must be <= max batch size"
            path = "sequence_batching.oldest.preferred_batch_size"
            yield error(path, f"holds {preferred}: preferred batch size {reason}")
    inputs, outputs = [tensor.name for tensor in given.input], [tensor.name for tensor in given.output]
    for field in ("batch_input", "batch_output"):
        for number, one in enumerate(getattr(given, field)):
            path = f"{field}[{number}]"
            yield from _unknown(f"{path}.source_input", one.source_input, inputs)
            if field == "batch_output":
                yield from _unknown(f"{path}.target_name", one.target_name, outputs)
            for target in set(one.target_name) & set(inputs):
                yield error(f"{path}.target_name", f"names '{target}', which clients give")


def _unknown(path: str, names: Iterable[str], known: list[str]) -> Iterator[Finding]:
    for name in names:
        if name not in known:
            yield error(path, f"names '{name}', which is not given", did_you_mean(name, known))


def _controls(given: Message) -> Iterator[Finding]:
    inputs, seen = {tensor.name for tensor in given.input}, set()
    for number, tensor in enumerate(given.sequence_batching.control_input):
        path = f"sequence_batching.control_input[{number}]"
        if tensor.name in inputs:
            yield error(
                f"{path}.name", f"'{tensor.name}' is among 'input' too", "the server makes it: leave it out there"
            )
        for control in tensor.control:
            if control.kind in seen:
                yield error(f"{path}.control", f"{_KIND.Name(control.kind)} is the kind of another too")
            seen.add(control.kind)
            yield from _control(f"{path}.control[0]", control)


def _control(path: str, control: Message) -> Iterator[Finding]:
    given = [field for field in _FALSE_TRUE if getattr(control, field)]
    if control.kind == _KIND.Value("CONTROL_SEQUENCE_CORRID"):
        if given:
            yield error(f"{path}.{given[0]}", "has no meaning for CONTROL_SEQUENCE_CORRID", "leave it out")
        if control.data_type not in (DATA_TYPES.values_by_name[name].number for name in _CORRID_TYPES):
            yield error(f"{path}.data_type", f"must be one of {', '.join(_CORRID_TYPES)}")
    elif len(given) != 1:
        yield error(path, f"must have one of {', '.join(_FALSE_TRUE)}, and has {' and '.join(given) or 'none'}")
    elif len(getattr(control, given[0])) != 2:
        yield error(f"{path}.{given[0]}", "must have exactly 2 entries: the value for false and that for true")


def _states(given: Message) -> Iterator[Finding]:
    for number, state in enumerate(given.sequence_batching.state):
        path = f"sequence_batching.state[{number}]"
        if any(state.input_name == tensor.name for tensor in given.input):
            yield error(f"{path}.input_name", f"'{state.input_name}' is among 'input' too", "leave it out there")
        for initial in state.initial_state:
            at = f"{path}.initial_state[0]"
            if not initial.WhichOneof("state_data"):
                yield error(at, "must have 'zero_data' or 'data_file'")
            if initial.data_type != state.data_type:
                yield error(f"{at}.data_type", "must be that of the state")
            pairs = zip(state.dims, initial.dims, strict=False)
            if len(initial.dims) != len(state.dims) or any(want not in (-1, got) for want, got in pairs):
                yield error(f"{at}.dims", f"{list(initial.dims)} must fit those of the state, {list(state.dims)}")


def _ensemble(given: Message, name: str) -> Iterator[Finding]:
    """As far as it can be said without the other models."""
    if not given.HasField("ensemble_scheduling"):
        return
    made = {tensor.name for tensor in given.input}
    for number, step in enumerate(given.ensemble_scheduling.step):
        made.update(step.output_map.values())
        if step.model_name == name:
            yield error(f"ensemble_scheduling.step[{number}].model_name", "is the ensemble itself")
    for field in ("input", "output"):
        for number, tensor in enumerate(getattr(given, field)):
            if not tensor.data_type:
                yield error(f"{field}[{number}].data_type", "is missing: no model tells it")
    yield from _unknown("output", [tensor.name for tensor in given.output], list(made))


def _warm_up(given: Message) -> Iterator[Finding]:
    known = [tensor.name for tensor in given.input]
    for number, sample in enumerate(given.model_warmup):
        path = f"model_warmup[{number}]"
        if given.HasField("max_batch_size") and sample.batch_size > max(1, given.max_batch_size):
            yield error(f"{path}.batch_size", f"is {sample.batch_size}, and 'max_batch_size' {given.max_batch_size}")
        if known and not given.HasField("sequence_batching") and not given.batch_input:
            yield from _unknown(f"{path}.inputs", sample.inputs, known)
        for name, tensor in sample.inputs.items():
            if not tensor.WhichOneof("input_data_type"):
                yield error(f"{path}.inputs[{name}]", "must have 'zero_data', 'random_data' or 'input_data_file'")
