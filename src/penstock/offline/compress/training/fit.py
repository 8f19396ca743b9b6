"""The training loop: the same arguments, seed and number of threads give the same weights, bit for bit, on one machine.

Whatever is drawn at random is a function of (seed, step), so that a run which was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any, Literal, Unpack

import msgspec
import numpy as np

from penstock.artifact import sha256
from penstock.clock import SystemClock
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.checkpoint import read_checkpoint, write_checkpoint
from penstock.offline.compress.training.batches import TrainingBatches
from penstock.offline.compress.training.options import FitOptions, FitReport, Hooks, Loss, learning_rate
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.tensor import Array

__all__ = ["FitOptions", "FitReport", "Hooks", "Loss", "fit", "reproducible"]

_CHECKPOINT_S = 5.0
"""Seconds between two checkpoints, at least."""
_LOWEST = -sys.float_info.max


def fit(model: TrainableModel, data: Dataset, loss: Loss, options: FitOptions, **hooks: Unpack[Hooks]) -> FitReport:
    """Train ``model`` in place. Whatever ends it early, the model is left in its last good state: the best that was validated,
    or without validation the end of the last epoch.

    Raises InvalidConfig, InvalidData if options or data make no sense, or loss or weights become NaN or infinite;
    InvalidArgument for a checkpoint of another run or a damaged one; Unsupported if there is nothing to train.
    """
    options.check()
    with reproducible(options.threads):
        return _Run(model, data, loss, options, hooks).run()


@contextlib.contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Run torch with ``threads`` threads, deterministic operators and a separate random state; restore its settings afterwards."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=warn_only)


class _Progress(msgspec.Struct):
    """The part of a run's state that is plain data."""

    step: int = 0
    losses: list[tuple[int, float]] = []
    scores: list[tuple[int, float]] = []
    best_step: int = 0
    waited: int = 0
    """Validations since the best one."""
    running: list[float] = []
    """Losses of the steps since the last entry of ``losses``."""
    seconds: float = 0.0
    stopped: Literal["", "finished", "patience", "time"] = ""


class _Checkpoint(msgspec.Struct):
    """The state of a run. ``optimizer`` is by the number of the parameter, then by name."""

    origin: dict[str, Any]
    progress: _Progress
    now: list[Array]
    kept: list[Array]
    optimizer: dict[int, dict[str, Array]]


class _Run:
    """One training. ``kept`` are the parameters of the last good state."""

    def __init__(self, model: TrainableModel, data: Dataset, loss: Loss, options: FitOptions, hooks: Hooks) -> None:
        self.loss, self.options = loss, options
        # An absent callback may also be given as None.
        self.hooks: dict[str, Any] = {name: hook for name, hook in hooks.items() if hook is not None}
        self.batches = TrainingBatches(model, data)
        held_out = 0.0 if "validate" in self.hooks else options.held_out
        self.rows, self.held = self.batches.split(held_out, options.seed)
        self.validates = "validate" in self.hooks or len(self.held) > 0
        self.epoch: tuple[int, list[Array]] = (-1, [])
        """The number of the present epoch, and its batches of rows."""
        self.epoch_steps = len(self.batches.pieces(self.rows, options.batch_size))
        self.steps = max(1, round(options.epochs * self.epoch_steps))
        every = list(model.parameters())
        self.parameters = [p for p in dict.fromkeys(self.hooks.get("parameters", every)) if p.requires_grad]
        if not self.parameters:
            raise Unsupported("nothing to train: the model has no FP32 weights", "give a float model")
        self.frozen = [p for p in every if p.requires_grad and p not in set(self.parameters)]
        self.optimizer = _optimizer(self.parameters, options)
        self.progress = _Progress()
        self.kept = self._snapshot()
        self.origin = {
            # A longer time goes on where a shorter one ended.
            "options": msgspec.to_builtins(msgspec.structs.replace(options, time_s=None)),
            "model": model.artifact.digest,
            "data": data.digest,
            "weights": sha256(b"".join(tensor.numpy().tobytes() for tensor in self.kept)),
            "depends_on": self.hooks.get("depends_on", ""),
        }
        self.clock = self.hooks.get("clock", SystemClock())
        self.saved_at = self.clock.now()
        self.started = self.saved_at

    def run(self) -> FitReport:
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        try:
            self._resume()
            if self.progress.step == 0:
                self._validate()
            while not self.progress.stopped:
                self._advance()
        finally:
            _load(self.parameters, self.kept)
            for parameter in self.frozen:
                parameter.requires_grad_(True)
            for parameter in self.parameters:
                parameter.grad = None
        done = self.progress
        return FitReport(
            losses=done.losses,
            scores=done.scores,
            steps=done.step,
            best_step=done.best_step,
            stopped=done.stopped or "finished",
            seconds=done.seconds,
        )

    def _advance(self) -> None:
        """One step and its follow-up work; or the end, if time is up."""
        progress = self.progress
        if self.options.time_s is not None and self._seconds() >= self.options.time_s:
            # Saved before it is wound up, so that with more time it can go on.
            self._save(due=True)
            progress.stopped = "time"
            self._end_epoch()
        else:
            self._step()
            if progress.step == self.steps:
                progress.stopped = "finished"
            if progress.stopped or progress.step % self.epoch_steps == 0:
                self._end_epoch()
                self._save(due=bool(progress.stopped))
        progress.seconds = self._seconds()
        self.hooks.get("on_progress", _nothing)(progress.step, self.steps)

    def _step(self) -> None:
        progress, options = self.progress, self.options
        self.hooks.get("before_step", _nothing)(progress.step, self.steps)
        torch.manual_seed((options.seed << 32) + progress.step)
        rows = self._rows(progress.step)
        loss = self._loss(self._augmented(rows), rows)
        self._check_finite(loss, "loss")
        loss.backward()
        if options.clip_norm is not None:
            self._check_finite(nn.utils.clip_grad_norm_(self.parameters, options.clip_norm), "gradient")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress.step, self.steps, options)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.hooks.get("after_step", _nothing)()
        progress.step += 1
        progress.running.append(float(loss.detach()))

    def _rows(self, step: int) -> Array:
        epoch, place = divmod(step, self.epoch_steps)
        if self.epoch[0] != epoch:
            shuffled = np.random.default_rng((self.options.seed, 1, epoch)).permutation(self.rows)
            self.epoch = epoch, self.batches.pieces(shuffled, self.options.batch_size)
        return self.epoch[1][place]

    def _augmented(self, rows: Array) -> dict[str, Tensor]:
        if "augment" not in self.hooks:
            return self.batches.inputs(rows)
        generator = np.random.default_rng((self.options.seed, 2, self.progress.step))
        return self.batches.tensors(self.hooks["augment"](self.batches.arrays(rows), generator))

    def _loss(self, inputs: dict[str, Tensor], rows: Array) -> Tensor:
        return self.loss(self.batches.forward(inputs, self.hooks.get("also", ())), torch.from_numpy(rows))

    def _end_epoch(self) -> None:
        progress = self.progress
        for parameter in self.parameters:
            self._check_finite(parameter.detach(), "weights")
        if progress.running:
            progress.losses.append((progress.step, math.fsum(progress.running) / len(progress.running)))
            progress.running = []
            self._validate()
        if not self.validates:
            self.kept, progress.best_step = self._snapshot(), progress.step
        elif progress.waited >= (self.options.patience or math.inf) and not progress.stopped:
            progress.stopped = "patience"

    def _validate(self) -> None:
        if not self.validates:
            return
        progress = self.progress
        with torch.no_grad():
            score = float(self.hooks["validate"]()) if "validate" in self.hooks else -self._held_out_loss()
        score = score if math.isfinite(score) else _LOWEST
        if not progress.scores or score > max(score for _, score in progress.scores):
            self.kept, progress.best_step, progress.waited = self._snapshot(), progress.step, 0
        else:
            progress.waited += 1
        progress.scores.append((progress.step, score))

    def _held_out_loss(self) -> float:
        pieces = self.batches.pieces(self.held, self.options.batch_size)
        losses = [float(self._loss(self.batches.inputs(rows), rows)) * len(rows) for rows in pieces]
        return math.fsum(losses) / len(self.held)

    def _check_finite(self, tensor: Tensor, what: str) -> None:
        if not torch.isfinite(tensor).all():
            raise InvalidData(
                f"training diverged: the {what} became NaN or infinite in step {self.progress.step}",
                f"lower the learning rate (now {self.options.learning_rate:g}), or set clip_norm",
            )

    def _seconds(self) -> float:
        return float(self.clock.now() - self.started)

    def _snapshot(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def _save(self, due: bool) -> None:
        path = self.hooks.get("checkpoint")
        if path is None or not (due or self.clock.now() - self.saved_at >= _CHECKPOINT_S):
            return
        self.progress.seconds = self._seconds()
        optimizer = {
            number: {key: value.numpy() for key, value in state.items() if value is not None}
            for number, state in self.optimizer.state_dict()["state"].items()
        }
        now, kept = ([tensor.numpy() for tensor in tensors] for tensors in (self._snapshot(), self.kept))
        write_checkpoint(path, _Checkpoint(self.origin, self.progress, now, kept, optimizer))
        self.saved_at = self.clock.now()

    def _resume(self) -> None:
        path = self.hooks.get("checkpoint")
        found = None if path is None else read_checkpoint(path, _Checkpoint)
        if found is None:
            return
        if found.origin != msgspec.json.decode(msgspec.json.encode(self.origin)):
            raise InvalidArgument(
                f"the checkpoint '{path}' is of a run with other options, data or model", "delete it to start afresh"
            )
        self.progress = found.progress
        self.started -= self.progress.seconds
        state = {n: {key: torch.tensor(value) for key, value in entry.items()} for n, entry in found.optimizer.items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        _load(self.parameters, [torch.tensor(array) for array in found.now])
        self.kept = [torch.tensor(array) for array in found.kept]


def _optimizer(parameters: list[Any], options: FitOptions) -> Any:
    """No decay on parameters with fewer than two axes: biases, scales, normalisation."""
    # The order of the parameters stays that of ``parameters`` within each group; the optimiser numbers them through.
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=options.learning_rate)


def _load(parameters: list[Any], tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.copy_(tensor)


def _nothing(*_: object) -> None:
    pass
