"""Creates the ordered steps of a plan from the table of methods, and chooses the models for the tuner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.evidence import Attempt
from penstock.offline.compress.explained import check_explained
from penstock.offline.compress.method import Method, StepContext
from penstock.offline.compress.table import METHODS, Kind, MethodEntry, PlannedStep, Target


class KeptModel(msgspec.Struct, frozen=True):
    """A model that a plan kept."""

    name: str
    """The steps that made it, joined by ``+``."""
    model: Artifact
    precision: str
    attempt: Attempt


class Move(msgspec.Struct, frozen=True):
    """One possible step of a plan."""

    name: str
    kind: Kind
    make: Callable[[Artifact, StepContext], Artifact]
    precision: str = ""
    """The precision of the result; empty if the step does not change it."""
    cures: Literal["", "inaccurate"] = ""
    """Try this step only if an earlier step of the stage ended with this result. Empty: always."""


Result = Literal["kept", "inaccurate", "useless", "failed"]
"""The result of a step: ``inaccurate`` and ``useless`` models were rejected; ``failed`` steps produced no model."""


class Stage(msgspec.Struct, frozen=True):
    """Steps from one model, tried in order. ``descend`` ends when a model is rejected, ``first`` when a model is kept."""

    moves: tuple[Move, ...]
    order: Literal["descend", "first"]
    then: tuple[Stage, ...] = ()
    """Stages that start from each model as soon as it is kept, so that a complete result exists even if time runs out."""
    until: float = 1.0
    """Steps of this stage may start until this fraction of the time is used up. The remaining time is for later stages."""


def stages(target: Target) -> tuple[Stage, ...]:
    """The steps to try for ``target``, fast steps first. Steps start only from FP32 models without shared weights."""
    integers, shared = _stages("precision", target), _stages("sharing", target)
    structures = _stages("structure", target)
    if target == "size":
        sparse = tuple(msgspec.structs.replace(stage, then=shared, until=0.6) for stage in _stages("sparsity", target))
        late = tuple(msgspec.structs.replace(stage, until=0.9) for stage in sparse)
        narrow = (msgspec.structs.replace(stage, then=(*shared, *late), until=0.8) for stage in structures)
        return *shared, *sparse, *integers, *narrow
    following: tuple[Stage, ...] = ()
    for stage in reversed(structures):
        until = 0.8 if following else 0.9
        following = (msgspec.structs.replace(stage, then=(*integers, *following), until=until), *following)
    return *integers, *following


def _stages(kind: Kind, target: Target) -> tuple[Stage, ...]:
    """One stage for each method of ``kind``. Methods that change the precision are alternatives, so they share one stage."""
    found = []
    for entry in METHODS.values():
        moves = tuple(_move(entry, step) for step in entry.steps if entry.kind == kind and target in step.targets)
        if moves:
            found.append(Stage(moves, entry.order))
    if kind == "precision" and found:
        return (Stage(tuple(move for stage in found for move in stage.moves), "first"),)
    return tuple(found)


def _move(entry: MethodEntry, step: PlannedStep) -> Move:
    def make(model: Artifact, context: StepContext) -> Artifact:
        method: type[Method] = entry.load()
        common = {name: value for name, value in context.options.items() if name in method.__struct_fields__}
        made = method.make({**common, **step.options}).run(model, context).model
        assert made is not None
        check_explained(model, made, context.fitted)
        return made

    return Move(step.name, entry.kind, make, "int8" if entry.kind == "precision" else "", step.cures)


def next_move(stage: Stage, done: Sequence[tuple[str, Result]]) -> Move | None:
    """The step of ``stage`` that follows the steps ``done``; None if no step is left."""
    results = [result for _, result in done]
    if "kept" in results if stage.order == "first" else set(results) - {"kept"}:
        return None
    taken = {name for name, _ in done}
    left = (move for move in stage.moves if move.name not in taken)
    return next((move for move in left if not move.cures or move.cures in results), None)


T = TypeVar("T")


def worthwhile(found: Sequence[T], rank: Callable[[T], float], error: Callable[[T], float], most: int) -> list[T]:
    """At most ``most`` of ``found``, sorted by ``rank``. One half has the lowest ranks. Of the remaining models, those with the lowest
    ``error`` form the other half, in case the evaluation data reject the first half.
    """
    ranked = sorted(found, key=rank)
    if len(ranked) <= most:
        return ranked
    best, rest = ranked[: most - most // 2], ranked[most - most // 2 :]
    return sorted([*best, *sorted(rest, key=error)[: most // 2]], key=rank)


def smoothly(state: KeptModel) -> float:
    """The relative error of a model's outputs. Unlike accuracy on few samples, it is continuous."""
    return state.attempt.accuracy.relative_error if state.attempt.accuracy else 0.0
