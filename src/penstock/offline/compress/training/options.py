"""The options, callbacks and report of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np

from penstock.clock import Clock
from penstock.offline.compress.options import Count, NotNegative, Options, Positive
from penstock.offline.compress.training.torch import Tensor
from penstock.tensor import Array

Loss = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""(inputs, outputs and further tensors by name; the batch's row numbers in the data, int64 [n]) to a scalar, the mean over rows."""

_WARM_UP = 0.05
"""Share of the steps in which the learning rate rises to its full value."""


class FitOptions(Options, frozen=True):
    """How to train."""

    epochs: Positive = 20
    """Passes over the rows; parts of one count."""
    learning_rate: Positive = 2e-3
    """At its height."""
    batch_size: Count = 32
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD has Nesterov momentum of 0.9."""
    weight_decay: NotNegative = 0.0
    """Of parameters with two axes or more; biases, scales and normalisation have none."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on after the first 5 % of the steps, in which it rises."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient of all parameters together."""
    held_out: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Share of the rows, drawn by ``seed``, on which the loss is validated if there is no ``validate``; not trained on."""
    patience: Count | None = None
    """Validations in a row without a new best, after which to stop."""
    time_s: NotNegative | None = None
    """Seconds after which to stop; the result then depends on the machine's speed."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    threads: Count = 1
    """Sums in several threads are rounded differently: the result depends on their number."""


class FitReport(msgspec.Struct, frozen=True):
    """The course of a training."""

    losses: list[tuple[int, float]]
    """(steps done, mean loss since the entry before), once an epoch."""
    scores: list[tuple[int, float]]
    """(steps done, validation score), before the first step and once an epoch; empty without validation."""
    steps: int
    best_step: int
    """The step of the kept parameters: the one of the highest score, or without validation the last."""
    stopped: Literal["finished", "patience", "time"]
    seconds: float

    def facts(self) -> dict[str, Any]:
        """The facts for provenance: everything except the seconds, which differ from run to run."""
        best = max((score for _, score in self.scores), default=None)
        return {
            "steps": self.steps,
            "best_step": self.best_step,
            "stopped": self.stopped,
            "loss": [round(loss, 6) for _, loss in self.losses[:1] + self.losses[-1:]],
            "score": [] if best is None else [round(self.scores[0][1], 6), round(best, 6)],
        }


class Hooks(TypedDict, total=False):
    """Optional arguments of ``fit``."""

    parameters: Iterable[Any] | None
    """The parameters to train; by default all of the model's. The others are left as they are."""
    also: list[str]
    """Tensors inside the graph that the loss wants to see."""
    before_step: Callable[[int, int], None]
    """Called with (steps done, all steps) before each one."""
    after_step: Callable[[], None] | None
    """Called after each step: puts masks back."""
    validate: Callable[[], float] | None
    """A score, higher is better. The parameters of the best are kept, those before the first step included."""
    augment: Callable[[dict[str, Array], np.random.Generator], dict[str, Array]]
    """Changes a batch of inputs. The loss must then judge by the inputs it sees, not by what it knows of the row numbers."""
    checkpoint: Path | None
    """A file from which an interrupted run continues; after a finished run its result is returned at once. The file stays."""
    depends_on: str
    """Further inputs of the run, such as a teacher's digest: a checkpoint with others is refused."""
    on_progress: Callable[[int, int], None]
    """Called with (steps done, all steps)."""
    clock: Clock


def learning_rate(step: int, steps: int, options: FitOptions) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``."""
    warm_up = round(_WARM_UP * steps)
    rise = min(1.0, (step + 1) / (warm_up + 1))
    if options.schedule == "constant":
        return options.learning_rate * rise
    done = max(0, step - warm_up) / max(1, steps - warm_up)
    return options.learning_rate * rise * (1 + math.cos(math.pi * done)) / 2
