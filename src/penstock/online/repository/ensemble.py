"""An ensemble's configuration, held against the models that it is made of as they are served.

Beside Triton's schema two entries of ``parameters`` are understood: ``if.<step>``, a condition, for a step by its number or its
model's name, and ``optional_outputs``, names with commas between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, NotFound, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.repository.input_check import client_signature
from penstock.online.scheduler.ensemble import Ensemble, EnsembleScheduler, Part
from penstock.online.scheduler.layout import Reshape
from penstock.pipeline.condition import Condition
from penstock.pipeline.graph import Step, declare
from penstock.protocol.messages import Message, ModelConfig

Find = Callable[[str, str], Handle]

_CONDITION = "if."
_OPTIONAL = "optional_outputs"
_OF_MODELS = ("instance_group", "optimization", "model_warmup", "batch_input", "batch_output")
_MAX_DEPTH = 16


def read_ensemble(config: Message, find: Find) -> Ensemble:
    """What ``config``, an effective ``ModelConfig``, says.

    Raises InvalidConfig that names step and tensor, and Unavailable for models that ``find`` (see ``Models``) does not know.
    """
    try:
        return _read(config, find)
    except InvalidConfig as error:
        raise InvalidConfig(f"ensemble '{config.name}': {error.message}", error.hint) from None


def inherited_labels(config: Message, find: Find) -> dict[str, Sequence[str]]:
    """What the models of the steps call the classes of their outputs, by tensor of the ensemble."""
    labels: dict[str, Sequence[str]] = {}
    for step in config.ensemble_scheduling.step:
        known = find(*_key(step)).labels
        labels |= {tensor: known[own] for own, tensor in step.output_map.items() if own in known}
    return labels


def _read(config: Message, find: Find) -> Ensemble:
    set_fields = {field.name for field, _ in config.ListFields()}
    for field in _OF_MODELS:
        if field in set_fields:
            raise InvalidConfig(f"'{field}' should not be specified for an ensemble", "its models have their own")
    declared = config.ensemble_scheduling.step
    handles = _find_all(declared, find)
    models = [step.model_name for step in declared]
    names = [f"{model}[{n}]" if models.count(model) > 1 else model for n, model in enumerate(models)]
    conditions = _conditions(config, models)
    steps, parts, depth = [], {}, 1
    for number, (name, step, handle) in enumerate(zip(names, declared, handles, strict=True)):
        depth = max(depth, _check_part(config, name, handle))
        steps.append(_step(name, step, handle, conditions.get(number)))
        asked = tuple(one for one in handle.signature.output_names if one in step.output_map)
        ranks = {spec.name: len(spec.shape) for spec in handle.signature.inputs}
        parts[name] = Part(_key(step), () if len(asked) == len(handle.signature.outputs) else asked, ranks)
    outer, inner = client_signature(config), client_signature(_reshaped(config))
    listed = (
        config.parameters[_OPTIONAL].string_value if _OPTIONAL in config.parameters else ""
    )  # looking up would add it
    optional = frozenset(filter(None, map(str.strip, listed.split(","))))
    pairs = zip((*outer.inputs, *outer.outputs), (*inner.inputs, *inner.outputs), strict=True)
    return Ensemble(
        name=config.name,
        graph=declare(inner, steps, batchable=config.max_batch_size > 0, optional_outputs=optional),
        parts=parts,
        ranks={spec.name: len(spec.shape) for spec in inner.outputs},
        reshapes={one.name: Reshape(one.shape, other.shape) for one, other in pairs if one != other},
        max_inside=config.ensemble_scheduling.max_inflight_requests,
        depth=depth,
    )


def _key(step: Message) -> tuple[str, str]:
    """Name and version, as a model is found by. Models of one name in several repositories are known as ``repository/name``."""
    name = f"{step.model_namespace}/{step.model_name}" if step.model_namespace else step.model_name
    return name, str(step.model_version) if step.model_version > 0 else ""


def _find_all(declared: Sequence[Message], find: Find) -> list[Handle]:
    found, missing = [], []
    for step in declared:
        try:
            found.append(find(*_key(step)))
        except NotFound:
            name, version = _key(step)
            missing.append(f"'{name}' version {version}" if version else f"'{name}'")
    if missing:
        raise Unavailable(
            f"an ensemble needs models that are not served: {', '.join(dict.fromkeys(missing))}", "load them"
        )
    return found


def _check_part(config: Message, name: str, handle: Handle) -> int:
    """The depth to which the ensemble is nested by this step. Raises InvalidConfig."""
    if handle.decoupled:
        raise InvalidConfig(
            f"the model of step '{name}' is decoupled: it answers a request any number of times", "ask it directly"
        )
    most = handle.config.max_batch_size
    if 0 < most < config.max_batch_size:
        raise InvalidConfig(
            f"it allows maximum batch size {config.max_batch_size}, but it contains model '{handle.name}' "
            f"which only allows maximum batch size to be {most}"
        )
    if not isinstance(handle.scheduler, EnsembleScheduler):
        return 1
    if any(one.name == config.name for one in (handle, *handle.scheduler.resolve({}).values())):
        raise InvalidConfig(f"it is a part of itself, by way of step '{name}'")
    depth = handle.scheduler.ensemble.depth + 1
    if depth > _MAX_DEPTH:
        raise InvalidConfig(f"with step '{name}', ensembles are nested more than {_MAX_DEPTH} deep")
    return depth


def _step(name: str, step: Message, handle: Handle, condition: Condition | None) -> Step:
    return Step(
        name=name,
        inputs=dict(step.input_map),
        outputs=dict(step.output_map),
        condition=condition,
        optional=frozenset(tensor.name for tensor in handle.config.input if tensor.optional),
        signature=handle.signature,
        batchable=handle.config.max_batch_size > 0,
    )


def _conditions(config: Message, models: Sequence[str]) -> Mapping[int, Condition]:
    """By the step's number."""
    conditions: dict[int, Condition] = {}
    for key, parameter in config.parameters.items():
        if not key.startswith(_CONDITION):
            continue
        which = key.removeprefix(_CONDITION)
        meant = [number for number, model in enumerate(models) if which in (model, str(number))]
        if len(meant) != 1:
            hint = "name the step by its number" if meant else did_you_mean(which, models)
            raise InvalidConfig(f"parameter '{key}' means {len(meant)} steps", hint)
        if meant[0] in conditions:
            raise InvalidConfig(f"parameter '{key}' is a second condition of step {meant[0]}")
        conditions[meant[0]] = Condition.parse(parameter.string_value)
    return conditions


def _reshaped(config: Message) -> Message:
    """``config`` with its tensors in the shapes that the steps see."""
    inner = ModelConfig()
    inner.CopyFrom(config)
    for tensor in (*inner.input, *inner.output):
        if tensor.HasField("reshape"):
            tensor.dims[:] = tensor.reshape.shape
    return inner
