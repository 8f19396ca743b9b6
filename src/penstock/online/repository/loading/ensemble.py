"""Reads an ensemble's configuration, and checks the configuration against the models that the ensemble calls.

Two entries of ``parameters`` extend Triton's schema: ``if.<step>`` is the condition of the step with this number or model name,
and ``optional_outputs`` is a comma-separated list of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig, NotFound, Unavailable
from penstock.online.repository.config import ModelConfig
from penstock.online.repository.handle import Handle
from penstock.online.repository.triton.rules import prefixed
from penstock.online.scheduler.ensemble import Ensemble, EnsembleScheduler
from penstock.online.scheduler.layout import Reshape
from penstock.pipeline.condition import Condition
from penstock.pipeline.graph import PipelineStep, declare

Find = Callable[[str, str], Handle]

_CONDITION = "if."
_OPTIONAL = "optional_outputs"
_OF_MODELS = ("instance_group", "optimization", "model_warmup", "batch_input", "batch_output")
_MAX_INSIDE = 16


def read_ensemble(config: ModelConfig, find: Find) -> Ensemble:
    """The ensemble of the completed ``config``.

    Raises InvalidConfig, which names the step and the tensor. Raises Unavailable if a model is not served.
    """
    try:
        with prefixed(begin := f"ensemble '{config.name}': "):
            return _read(config, find)
    except NotFound as error:
        raise Unavailable(begin + error.message, error.hint or "load it first") from None


class EnsembleLabels(Mapping[str, Sequence[str]]):
    """The class names of each output: the ensemble's ``own`` labels, and the labels of its steps' models. The models are looked up
    on each access, because they may be reloaded.
    """

    def __init__(self, own: Mapping[str, Sequence[str]], config: ModelConfig, find: Find) -> None:
        self._own = own
        self._steps = config.steps
        self._find = find

    def __getitem__(self, name: str) -> Sequence[str]:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> dict[str, Sequence[str]]:
        labels: dict[str, Sequence[str]] = {}
        for step in self._steps:
            with suppress(NotFound):  # the model has just been unloaded
                known = self._find(*step.key).labels
                labels |= {tensor: known[own] for own, tensor in step.output_map.items() if own in known}
        return {**labels, **self._own}


def _read(config: ModelConfig, find: Find) -> Ensemble:
    for field in _OF_MODELS:
        if getattr(config, field):
            raise InvalidConfig(f"'{field}' should not be specified for an ensemble", "its models have their own")
    declared = config.steps
    models = [step.model_name for step in declared]
    names = [f"{model}[{n}]" if models.count(model) > 1 else model for n, model in enumerate(models)]
    conditions, steps = _conditions(config, models), []
    for number, (step, handle) in enumerate(zip(declared, _find_all(config, find), strict=True)):
        _check_part(config, names[number], handle)
        optional = frozenset(tensor.name for tensor in handle.config.input if tensor.optional)
        wiring = step.input_map, step.output_map, conditions.get(number), optional
        steps.append(PipelineStep(names[number], *wiring, handle.signature, handle.config.batchable))
    listed = config.parameters.get(_OPTIONAL, "")
    optional = frozenset(filter(None, map(str.strip, listed.split(","))))
    outer, inner = config.client_signature, config.model_signature
    pairs = zip((*outer.inputs, *outer.outputs), (*inner.inputs, *inner.outputs), strict=True)
    return Ensemble(
        name=config.name,
        graph=declare(inner, steps, batchable=config.batchable, optional=optional),
        models=dict(zip(names, (one.key for one in declared), strict=True)),
        ranks={spec.name: len(spec.shape) for spec in inner.outputs},
        reshapes={one.name: Reshape(one.shape, other.shape) for one, other in pairs if one != other},
        max_inside=config.ensemble_scheduling.max_inflight_requests if config.ensemble_scheduling else 0,
    )


def _find_all(config: ModelConfig, find: Find) -> list[Handle]:
    found, missing = [], []
    for name, version in (step.key for step in config.steps):
        try:
            found.append(find(name, version))
        except NotFound:
            missing.append(f"'{name}' version {version}" if version else f"'{name}'")
    if missing:
        raise NotFound(f"it needs models that are not served: {', '.join(missing)}", "load them first")
    return found


def _check_part(config: ModelConfig, name: str, handle: Handle) -> None:
    if handle.decoupled:
        reason = f"the model of step '{name}' is decoupled: it may send any number of responses"
        raise InvalidConfig(reason, "call it directly")
    most = handle.config.max_batch_size or 0
    if 0 < most < config.max_rows:
        raise InvalidConfig(
            f"it allows maximum batch size {config.max_rows}, but it contains model '{handle.name}' "
            f"which only allows maximum batch size to be {most}"
        )
    inside = [handle]
    if isinstance(handle.scheduler, EnsembleScheduler):
        inside += handle.scheduler.resolve({}).values()
    if any(one.name == config.name for one in inside):
        raise InvalidConfig(f"step '{name}' contains the ensemble itself")
    if sum(isinstance(one.scheduler, EnsembleScheduler) for one in inside) > _MAX_INSIDE:
        raise InvalidConfig(f"step '{name}' contains more than {_MAX_INSIDE} ensembles")
    for one in inside:
        if config.response_cache and one.config.sequence_batching:
            reason = f"it contains model '{one.name}', whose responses within sequences cannot be cached"
            raise InvalidConfig(reason, "remove 'response_cache'")


def _conditions(config: ModelConfig, models: Sequence[str]) -> Mapping[int, Condition]:
    """The conditions, by step number."""
    conditions: dict[int, Condition] = {}
    for key in sorted(config.parameters):
        which = key.removeprefix(_CONDITION)
        if which == key:
            continue
        meant = [number for number, model in enumerate(models) if which in (model, str(number))]
        if len(meant) != 1 or meant[0] in conditions:
            hint = "name each step once, by its number" if meant else did_you_mean(which, models)
            raise InvalidConfig(f"parameter '{key}' does not name one step", hint)
        conditions[meant[0]] = Condition.parse(config.parameters[key])
    return conditions
