"""The order in which steps are tried, and what of the results is worth a tuner's time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from penstock.offline.compress.planner.moves import Move, State, Target, int8, mixed, share, trained

Result = Literal["kept", "inaccurate", "useless", "failed"]
"""What came of a step: rejected for its accuracy, or for what it gains, or nothing to measure."""


class Stage(msgspec.Struct, frozen=True):
    """Steps of one kind from one model, and how to go through them.

    ``descend``: until one is not kept. ``first``: until one is kept.
    """

    moves: tuple[Move, ...]
    order: Literal["descend", "first"]
    then: tuple[Stage, ...] = ()
    """What each model kept goes on to, at once: whenever time runs out, what was found is whole."""
    until: float = 1.0
    """Share of the time after which no step of this stage is begun: what comes then finds something left."""


def stages(target: Target) -> tuple[Stage, ...]:
    """What to try for ``target``, quick gains first. Only FP32 models that share no weights are gone on from."""
    integers = Stage(
        (
            Move("int8", "precision", int8, "int8"),
            Move("int8-mixed", "precision", mixed, "int8"),
            # Training integers makes them no faster.
            trained("int8-qat", "precision", "train_int8", "int8", cures="inaccurate"),
        ),
        "first",
    )
    shared = Stage(tuple(Move(f"share-{name}", "sharing", share(*most)) for name, most in _HARM.items()), "descend")
    if target == "size":
        sparse = Stage((trained("prune", "sparsity", "prune_weights"),), "first", (shared,), until=0.6)
        narrow = Stage((_shrink(1.5),), "first", (shared, msgspec.structs.replace(sparse, until=0.9)), until=0.8)
        return shared, sparse, integers, narrow
    thin = Stage((trained("low-rank", "structure", "split_layers"),), "first", (integers,), until=0.9)
    narrow = Stage(tuple(map(_shrink, (1.5, 2.0, 3.0, 5.0))), "descend", (integers, thin), until=0.8)
    return integers, narrow, thin


_HARM = {"fine": (0.03, 0.1), "medium": (0.1, 0.3), "coarse": (0.2, 0.6)}
"""What sharing the weights of one layer may do before training: relative error, and share of the accuracy that may be lost."""


def _shrink(speedup: float) -> Move:
    return trained(f"shrink-{speedup:g}x", "structure", "shrink_to", speedup=speedup)


def next_move(stage: Stage, done: Sequence[tuple[str, Result]]) -> Move | None:
    """The step of ``stage`` to take after those ``done``, by name; None if that is all."""
    results = [result for _, result in done]
    if "kept" in results if stage.order == "first" else set(results) - {"kept"}:
        return None
    taken = {name for name, _ in done}
    left = (move for move in stage.moves if move.name not in taken)
    return next((move for move in left if not move.cures or move.cures in results), None)


T = TypeVar("T")


def worthwhile(found: Sequence[T], rank: Callable[[T], float], error: Callable[[T], float], most: int) -> list[T]:
    """At most ``most`` of ``found``, by rising ``rank``, which is best where it is least: half of them the best, the others those
    of the rest of least ``error``, so that a judge who finds the best too bold has something left.
    """
    ranked = sorted(found, key=rank)
    if len(ranked) <= most:
        return ranked
    best, rest = ranked[: most - most // 2], ranked[most - most // 2 :]
    return sorted([*best, *sorted(rest, key=error)[: most // 2]], key=rank)


def smoothly(state: State) -> float:
    """How far a model's answers are from the original's: unlike accuracy on few samples, it moves smoothly."""
    return state.attempt.accuracy.relative_error if state.attempt.accuracy else 0.0
