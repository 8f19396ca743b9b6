"""The training loop. On one machine, the same arguments, seed and number of threads give the same weights, bit for bit.

Every random number is a function of (seed, step), so an interrupted run continues to the same result.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any, Unpack

import msgspec
import numpy as np

from penstock.artifact import sha256
from penstock.clock import SystemClock
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument, InvalidData, Unsupported
from penstock.offline.compress.checkpoint import read_checkpoint, write_checkpoint
from penstock.offline.compress.taps import no_progress
from penstock.offline.compress.training.batches import TrainingBatches
from penstock.offline.compress.training.options import FitOptions, FitReport, Hooks, Loss, learning_rate
from penstock.offline.compress.training.torch import Tensor, nn, torch
from penstock.offline.compress.training.trainable import TrainableModel
from penstock.tensor import Array

__all__ = ["FitOptions", "FitReport", "Hooks", "Loss", "fit", "reproducible"]

_CHECKPOINT_S = 5.0
"""Minimum time between two checkpoints, in seconds."""
_LOWEST = -sys.float_info.max


def fit(model: TrainableModel, data: Dataset, loss: Loss, options: FitOptions, **hooks: Unpack[Hooks]) -> FitReport:
    """Train ``model`` in place. Afterwards, even if an error is raised, the model has the parameters with the best validation score
    or, without validation, the parameters after the last full epoch.

    Raises InvalidConfig if the options are invalid; InvalidData if the data do not fit, or if the loss or the weights become NaN or
    infinite; InvalidArgument if the checkpoint is damaged or belongs to another run; Unsupported if there is nothing to train.
    """
    options.check()
    with reproducible(options.threads):
        return _Run(model, data, loss, options, hooks).run()


@contextlib.contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Run torch with ``threads`` threads, deterministic operators and a separate random state. Afterwards, restore its settings."""
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


class _Checkpoint(msgspec.Struct):
    """The state of a run. ``optimizer`` holds the optimiser's state, by number of the parameter and name of the entry."""

    origin: dict[str, Any]
    report: FitReport
    now: list[Array]
    kept: list[Array]
    optimizer: dict[int, dict[str, Array]]


class _Run:
    """One training run. ``kept`` holds the parameters of the last good state."""

    def __init__(self, model: TrainableModel, data: Dataset, loss: Loss, options: FitOptions, hooks: Hooks) -> None:
        self.loss, self.options = loss, options
        self.hooks: dict[str, Any] = {name: hook for name, hook in hooks.items() if hook is not None}
        self.batches = TrainingBatches(model, data)
        held_out = 0.0 if "validate" in self.hooks else options.held_out
        self.rows, self.held = self.batches.split(held_out, options.seed)
        self.validates = "validate" in self.hooks or len(self.held) > 0
        self.epoch: tuple[int, list[Array]] = (-1, [])
        """The number of the current epoch, and its batches of rows."""
        self.epoch_steps = len(self.batches.pieces(self.rows, options.batch_size))
        self.steps = max(1, round(options.epochs * self.epoch_steps))
        every = list(model.parameters())
        self.parameters = [p for p in dict.fromkeys(self.hooks.get("parameters", every)) if p.requires_grad]
        if not self.parameters:
            raise Unsupported("nothing to train: the model has no FP32 weights", "give a float model")
        self.frozen = [p for p in every if p.requires_grad and p not in set(self.parameters)]
        self.optimizer = _optimizer(self.parameters, options)
        self.report = FitReport()
        self.kept = self._snapshot()
        self.origin = {
            # The time limit is not part of the identity: a run that ran out of time may continue with more time.
            "options": msgspec.to_builtins(msgspec.structs.replace(options, time_s=None)),
            "model": model.artifact.digest,
            "data": data.digest,
            "weights": sha256(b"".join(tensor.numpy().tobytes() for tensor in self.kept)),
            "depends_on": self.hooks.get("depends_on", ""),
        }
        self.clock = self.hooks.get("clock", SystemClock())
        self.started = self.saved_at = self.clock.now()

    def run(self) -> FitReport:
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        try:
            self._resume()
            if self.report.steps == 0:
                self._validate()
            while not self.report.stopped:
                self._advance()
        finally:
            _load(self.parameters, self.kept)
            for parameter in self.frozen:
                parameter.requires_grad_(True)
            for parameter in self.parameters:
                parameter.grad = None
        return self.report

    def _advance(self) -> None:
        """Run one step. After the last step of an epoch, also validate and report. If time is up, end the run instead."""
        report = self.report
        if self.options.time_s is not None and self._seconds() >= self.options.time_s:
            # Save before the end of the epoch is processed, so that a run with more time can continue.
            self._save(due=True)
            report.stopped = "time"
            self._end_epoch()
        else:
            self._step()
            if report.steps == self.steps:
                report.stopped = "finished"
            if report.stopped or report.steps % self.epoch_steps == 0:
                self._end_epoch()
                self._save(due=bool(report.stopped))
        report.seconds = self._seconds()
        self.hooks.get("on_progress", no_progress)(report.steps, self.steps)

    def _step(self) -> None:
        report, options = self.report, self.options
        self.hooks.get("before_step", no_progress)(report.steps, self.steps)
        torch.manual_seed((options.seed << 32) + report.steps)
        rows = self._rows(report.steps)
        inputs = self.batches.arrays(rows)
        if "augment" in self.hooks:
            inputs = self.hooks["augment"](inputs, np.random.default_rng((options.seed, 2, report.steps)))
        loss = self._loss(self.batches.tensors(inputs), rows)
        self._check_finite(loss, "loss")
        loss.backward()
        if options.clip_norm is not None:
            self._check_finite(nn.utils.clip_grad_norm_(self.parameters, options.clip_norm), "gradient")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(report.steps, self.steps, options)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if "after_step" in self.hooks:
            self.hooks["after_step"]()
        report.steps += 1
        report.running.append(float(loss.detach()))

    def _rows(self, step: int) -> Array:
        epoch, place = divmod(step, self.epoch_steps)
        if self.epoch[0] != epoch:
            shuffled = np.random.default_rng((self.options.seed, 1, epoch)).permutation(self.rows)
            self.epoch = epoch, self.batches.pieces(shuffled, self.options.batch_size)
        return self.epoch[1][place]

    def _loss(self, inputs: dict[str, Tensor], rows: Array) -> Tensor:
        return self.loss(self.batches.forward(inputs, self.hooks.get("also", ())), torch.from_numpy(rows))

    def _end_epoch(self) -> None:
        report = self.report
        for parameter in self.parameters:
            self._check_finite(parameter.detach(), "weights")
        if report.running:
            report.losses.append((report.steps, math.fsum(report.running) / len(report.running)))
            report.running = []
            self._validate()
        if not self.validates:
            self.kept, report.best_step = self._snapshot(), report.steps
        elif report.waited >= (self.options.patience or math.inf) and not report.stopped:
            report.stopped = "patience"

    def _validate(self) -> None:
        if not self.validates:
            return
        report = self.report
        with torch.no_grad():
            score = float(self.hooks["validate"]()) if "validate" in self.hooks else -self._held_out_loss()
        score = score if math.isfinite(score) else _LOWEST
        if not report.scores or score > max(score for _, score in report.scores):
            self.kept, report.best_step, report.waited = self._snapshot(), report.steps, 0
        else:
            report.waited += 1
        report.scores.append((report.steps, score))

    def _held_out_loss(self) -> float:
        pieces = self.batches.pieces(self.held, self.options.batch_size)
        losses = [float(self._loss(self.batches.inputs(rows), rows)) * len(rows) for rows in pieces]
        return math.fsum(losses) / len(self.held)

    def _check_finite(self, tensor: Tensor, what: str) -> None:
        if not torch.isfinite(tensor).all():
            raise InvalidData(
                f"training diverged: the {what} became NaN or infinite in step {self.report.steps}",
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
        self.report.seconds = self._seconds()
        optimizer = {
            number: {key: value.numpy() for key, value in state.items() if value is not None}
            for number, state in self.optimizer.state_dict()["state"].items()
        }
        now, kept = ([tensor.numpy() for tensor in tensors] for tensors in (self._snapshot(), self.kept))
        write_checkpoint(path, _Checkpoint(self.origin, self.report, now, kept, optimizer))
        self.saved_at = self.clock.now()

    def _resume(self) -> None:
        path = self.hooks.get("checkpoint")
        found = None if path is None else read_checkpoint(path, _Checkpoint)
        if found is None:
            return
        if found.origin != msgspec.json.decode(msgspec.json.encode(self.origin)):
            raise InvalidArgument(
                f"the checkpoint '{path}' belongs to a run with other options, data or model",
                "delete it to start again",
            )
        self.report = found.report
        self.started -= self.report.seconds
        state = {n: {key: torch.tensor(value) for key, value in entry.items()} for n, entry in found.optimizer.items()}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        _load(self.parameters, [torch.tensor(array) for array in found.now])
        self.kept = [torch.tensor(array) for array in found.kept]


def _optimizer(parameters: list[Any], options: FitOptions) -> Any:
    """The optimiser, without weight decay on biases, scales and normalisation parameters."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    decays = (matrices, options.weight_decay), (vectors, 0.0)
    groups = [{"params": members, "weight_decay": decay} for members, decay in decays if members]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=options.learning_rate)


def _load(parameters: list[Any], tensors: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.copy_(tensor)
