"""Options, callbacks and report of training."""

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
"""Called with inputs, outputs and further tensors by name, and with the batch's row numbers (int64 [n]). Returns the mean loss."""

_WARM_UP = 0.05
"""Fraction of the steps during which the learning rate rises to its peak."""


class FitOptions(Options, frozen=True):
    """Options of a training run."""

    epochs: Positive = 20
    """Passes over the rows; may be a fraction."""
    learning_rate: Positive = 2e-3
    """Peak learning rate."""
    batch_size: Count = 32
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD uses Nesterov momentum of 0.9."""
    weight_decay: NotNegative = 0.0
    """Weight decay of parameters with at least two axes. It does not apply to biases, scales and normalisation parameters."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Schedule of the learning rate after the warm-up, which takes the first 5 % of the steps."""
    clip_norm: Positive | None = None
    """Clip the total norm of the gradient of all parameters to this value."""
    held_out: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Fraction of the rows to hold out for validation, drawn with ``seed``. Unused if a ``validate`` hook is given."""
    patience: Count | None = None
    """Stop after this many successive validations without a new best score."""
    time_s: NotNegative | None = None
    """Stop after this many seconds. The result then depends on the machine's speed."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    threads: Count = 1
    """Number of threads, which affects the order of summation and therefore the result."""


class FitReport(msgspec.Struct):
    """The progress of a training run."""

    losses: list[tuple[int, float]] = []
    """One pair per epoch: (steps done, mean loss since the previous pair)."""
    scores: list[tuple[int, float]] = []
    """One pair before the first step and one per epoch: (steps done, validation score). Empty without validation."""
    steps: int = 0
    best_step: int = 0
    """The step whose parameters were kept: the step with the highest score or, without validation, the last step."""
    stopped: Literal["", "finished", "patience", "time"] = ""
    """The reason why training ended; empty while training runs."""
    seconds: float = 0.0
    waited: int = 0
    """Number of validations since the best score."""
    running: list[float] = []
    """Losses of the steps after the last entry of ``losses``."""

    def facts(self) -> dict[str, Any]:
        """Facts for the provenance, without ``seconds``, which differs from run to run."""
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
    """The parameters to train; by default, all parameters of the model."""
    also: list[str]
    """Names of tensors inside the graph to pass to the loss."""
    before_step: Callable[[int, int], None]
    """Called with (steps done, total steps) before each step."""
    after_step: Callable[[], None] | None
    """Called after each step, for example to apply masks."""
    validate: Callable[[], float] | None
    """Returns a score. The parameters with the highest score are kept, including those before the first step."""
    augment: Callable[[dict[str, Array], np.random.Generator], dict[str, Array]]
    """Changes a batch of inputs, for augmentation. The loss must then be computed from these inputs, not from the row numbers."""
    checkpoint: Path | None
    """A file from which an interrupted run continues. A finished run returns its result immediately."""
    depends_on: str
    """Identifies other inputs of the run, such as a teacher. A checkpoint with a different text is rejected."""
    on_progress: Callable[[int, int], None]
    """Called with (steps done, all steps)."""
    clock: Clock


def learning_rate(step: int, steps: int, options: FitOptions) -> float:
    """The learning rate of step ``step``, counted from 0, of ``steps``."""
    warm_up = round(_WARM_UP * steps)
    rise = min(1.0, (step + 1) / (warm_up + 1))
    if options.schedule == "constant":
        return options.learning_rate * rise
    done = max(0, step - warm_up) / max(1, steps - warm_up)
    return options.learning_rate * rise * (1 + math.cos(math.pi * done)) / 2
