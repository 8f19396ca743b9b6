"""Accuracy of a candidate relative to the original model, by one metric on the same samples.

A candidate is compared in two ways. The loss compares the candidate's metric with the original's metric; the truth is the labels or,
without labels, the original's outputs. The deviation compares each output with the original's output, unless the loss already does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.dataset import Dataset, SampleCall, digest_of
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidData, PenstockError, ResourceExhausted, Unsupported
from penstock.measurement import Interval
from penstock.offline.judge.detect import Choice, choose_metric, has_class_scores
from penstock.offline.judge.intervals import (
    bounded_interval,
    jackknife_interval,
    loss_bound,
    loss_interval,
    mean_bound,
    tail,
)
from penstock.offline.judge.metric import AccuracyMetric
from penstock.offline.judge.metric_table import METRICS
from penstock.offline.judge.metrics import (
    Outputs,
    deviations,
    matched_pairs,
    mean_interval,
    output_errors,
    share_divergence,
)
from penstock.offline.judge.scoring.classes import classes_of, hits, is_float
from penstock.offline.sessions import loaded
from penstock.resources import usable_memory
from penstock.tensor import Array

_WORST = 1e6
_TINY = 1e-9
_MEMORY_SHARE = 0.5
"""Maximum fraction of the machine's memory for the outputs of one model."""


class Reference(msgspec.Struct, frozen=True):
    """The original's outputs on the evaluation data, and the metric that compares candidates with them."""

    choice: Choice
    answers: Outputs
    labels: Array | None
    looks: int = 1
    """Number of candidates whose intervals must be valid together."""
    groups: Array | None = None
    """The number of each sample's sequence. The score of a sequence is the mean score of its samples, and sequences take the place of
    samples, because samples of one sequence are not independent."""

    @property
    def units(self) -> int:
        """The number of scores: of samples, or of sequences."""
        return len(self.answers[self.output]) if self.groups is None else int(self.groups.max()) + 1

    @property
    def metric(self) -> str:
        return self.choice.metric.name

    @property
    def output(self) -> str:
        """The first output that the metric judges."""
        return self.choice.outputs[0]

    @property
    def is_exact(self) -> bool:
        """True if the bound on the loss is valid for any number of samples; False if it is approximate."""
        return not self.choice.metric.unprovable

    @property
    def proxy(self) -> str:
        """Name of the measure that ``divergence`` returns."""
        return "KL divergence" if self._scored() else "relative error"

    def compare(self, outputs: Outputs) -> Accuracy:
        """The accuracy of a candidate with these ``outputs`` for the same samples.

        Raises PenstockError if shapes differ or the metric fails. Outputs with NaN or infinity get no score, and ``broken`` is set.
        """
        for name, array in self.answers.items():
            if outputs[name].shape != array.shape:
                raise PenstockError(
                    f"output '{name}' has shape {list(outputs[name].shape)}, the original's {list(array.shape)}"
                )
        samples, metric = self.units, self.choice.metric
        error = max(output_errors(self.answers, outputs).values())
        base = Accuracy(metric.name, 0.0, Interval(1.0, 0.0, 1.0), error, samples, looks=self.looks)
        if broken := not_finite(outputs):
            return msgspec.structs.replace(base, broken=broken, bound=1.0, is_share=metric.is_share)
        # If the truth is the original, the metric measures the deviation itself. But fidelity counts each sample's difference as at
        # most the spread, so a few large differences do not show in it.
        judged = self.choice.outputs if self._truth_is_original() and not self.is_fidelity else ()
        far = {name: self._deviation(name, outputs[name]) for name in self.answers if name not in judged}
        worst = max(far, key=lambda name: far[name], default="")
        return msgspec.structs.replace(
            self._with_loss(base, outputs),
            unjudged_output=worst,
            unjudged_error=far.get(worst, 0.0),
            is_share=metric.is_share,
        )

    def value(self, outputs: Outputs, labels: Array | None = None) -> float:
        """The metric's value for ``outputs`` and ``labels`` (default: the reference's). Raises PenstockError if the metric fails."""
        rows = self._rows(outputs, np.arange(self.units), labels)
        return float(np.mean(rows))

    def check_metric(self) -> None:
        """Raise InvalidData if the metric fails on the original's outputs. A user's function is called twice and must be
        deterministic.
        """
        every = np.arange(self.units)
        first = self._rows(self.answers, every)
        if self.metric in METRICS:
            return
        again = self._rows(self.answers, every)
        if first.shape != again.shape or not np.allclose(first, again, rtol=1e-6, atol=1e-9):
            raise InvalidData(
                f"the metric {self.metric} is not deterministic: for the same outputs it is {np.mean(first):.6g} at first, and "
                f"{np.mean(again):.6g} when it is called again",
                "seed its random numbers, and keep no state from call to call",
            )

    def scores(self, outputs: Outputs) -> Array:
        """One score per sample or sequence. The mean score is the metric's value or, if it is no mean, 1 minus the deviation."""
        if not_finite({name: outputs[name] for name in self.choice.outputs}):
            usable = np.logical_and.reduce([_finite_rows(outputs[name]) for name in self.choice.outputs])
            safe = {name: np.where(_spread(usable, array), array, _blank(array)) for name, array in outputs.items()}
            return np.where(self._grouped(usable) == 1, self.scores(safe), 0.0)
        if self.choice.metric.span is None:
            return np.asarray(1 - self.divergence_of(outputs).clip(max=1.0))
        return np.asarray(self._rows(outputs, np.arange(self.units)), np.float64)

    def divergence(self, outputs: Outputs) -> Array:
        """The distance of each sample's ``outputs`` from the original's, as float32. Unlike accuracy, it is continuous.

        The distance is the KL divergence, summed over judged outputs with class scores. Without class scores, the relative error.
        """
        if scored := self._scored():
            total = np.sum([share_divergence(self.answers[name], outputs[name]) for name in scored], axis=0)
            return self._grouped(total.clip(min=0.0)).astype(np.float32)
        return np.asarray(self.divergence_of(outputs), np.float32)

    def divergence_of(self, outputs: Outputs) -> Array:
        """The relative error of each sample: the maximum over the judged outputs."""
        return self._grouped(
            np.max([deviations(self.answers[name], outputs[name]) for name in self.choice.outputs], axis=0)
        )

    def interval(self, differences: Array) -> Interval:
        """The mean of ``differences`` between scores, with its approximate 95 % interval. Only the search among candidates uses it."""
        if not self._scored():
            return mean_interval(differences)
        differences = differences.astype(np.float64)
        return matched_pairs(len(differences), float(differences.sum()), float(differences @ differences))

    def original(self) -> Accuracy:
        """The accuracy of the original itself; its loss is 0 by definition."""
        samples, value = self.units, self.value(self.answers)
        return Accuracy(
            self.metric,
            value,
            Interval(0.0, 0.0, 0.0),
            0.0,
            samples,
            bound=0.0,
            looks=self.looks,
            is_share=self.choice.metric.is_share,
        )

    def _with_loss(self, base: Accuracy, outputs: Outputs) -> Accuracy:
        """``base`` with the metric, the loss with its interval and upper bound, and the changes of the samples."""
        metric, samples = self.choice.metric, self.units
        every = np.arange(samples)
        if metric.span is None:
            value, loss, bound = self._composite(outputs, every)
            return msgspec.structs.replace(base, value=value, loss=loss, bound=bound)
        before, after = (np.asarray(self._rows(one, every)) for one in (self.answers, outputs))
        lost = before - after
        value = float(after.mean())
        if metric.span == (0.0, 1.0) and np.isin(lost, (-1, 0, 1)).all() and np.isin(after, (0, 1)).all():
            down, up = int((lost > 0).sum()), int((lost < 0).sum())
            loss = loss_interval(samples, down, up, self.looks)
            bound = loss_bound(samples, down, up, tail(self.looks))
            return msgspec.structs.replace(base, value=value, loss=loss, bound=bound, lost=down, won=up)
        # Without labels, the score of the original is the highest possible.
        width = metric.span[1] - metric.span[0]
        least = 0.0 if self._truth_is_original() else -width
        lost = lost.clip(least, width)
        loss = bounded_interval(lost, self.looks, least, width)
        bound = mean_bound(lost, tail(self.looks), width)
        return msgspec.structs.replace(base, value=value, loss=loss, bound=bound, spread=float(lost.std()))

    def _composite(self, outputs: Outputs, every: Array) -> tuple[float, Interval, float]:
        metric = self.choice.metric
        sign = 1.0 if metric.higher else -1.0

        def loss(rows: Array) -> float:
            try:
                before, after = (float(np.mean(self._rows(one, rows))) for one in (self.answers, outputs))
            except InvalidData:
                if len(rows) == len(every):
                    raise
                return math.nan  # undefined without this group
            difference = sign * (before - after)
            return _bounded(difference / max(abs(before), _TINY) if metric.relative else difference)

        interval = jackknife_interval(loss, len(every), self.looks)
        return self.value(outputs), interval, interval.high

    def _rows(self, outputs: Outputs, units: Array, labels: Array | None = None) -> Array:
        """The scores of the samples or sequences ``units``, or a single score. If several outputs are judged, the worst counts for
        each sample.
        """
        rows = units if self.groups is None else np.flatnonzero(np.isin(self.groups, units))
        labels = self.labels if labels is None else labels
        found = []
        for name in self.choice.outputs:
            truth = labels
            if self._truth_is_original() and self.choice.metric.truth is not None:
                truth = self.choice.metric.truth(self.answers[name])
            found.append(_called(self.choice.metric, outputs[name][rows], None if truth is None else truth[rows]))
        worst = np.asarray(np.min(np.stack(found), axis=0))
        return self._grouped(worst, rows) if worst.ndim else worst

    def _grouped(self, values: Array, rows: Array | None = None) -> Array:
        """The values of the samples ``rows``, by default of all; the mean of each sequence if the samples form sequences."""
        if self.groups is None:
            return np.asarray(values)
        groups = self.groups if rows is None else self.groups[rows]
        totals, counts = np.bincount(groups, values), np.bincount(groups)
        return np.asarray(totals[counts > 0] / counts[counts > 0])

    @property
    def is_fidelity(self) -> bool:
        """True if the metric measures differences relative to the spread of the original's outputs."""
        return self.metric == "fidelity"

    def _truth_is_original(self) -> bool:
        metric = self.choice.metric
        return metric.truth is not None and (self.labels is None or not metric.labels)

    def _scored(self) -> list[str]:
        """The judged outputs that contain class scores."""
        is_classes = self.choice.metric.kind == "classes"
        names = [name for name in self.choice.outputs if is_classes or has_class_scores(name, self.answers[name], {})]
        return [
            name
            for name in names
            if is_float(self.answers[name]) and self.answers[name].ndim == 2 and self.answers[name].shape[1] >= 2
        ]

    def _deviation(self, name: str, output: Array) -> float:
        """The fraction of changed classes, the metric with the original's outputs as truth, or the relative error."""
        want, metric = self.answers[name], self.choice.metric
        if name in self.choice.outputs and metric.kind == "other" and metric.truth is not None:
            same = float(np.mean(_called(metric, output, metric.truth(want))))
            return 1 - same if metric.higher else same
        kind = metric.kind if name in self.choice.outputs else "numbers"
        by_class = kind == "classes" or has_class_scores(name, want, self.answers)
        if by_class and not (self.is_fidelity and name in self.choice.outputs):
            cut = self.choice.cut or 0.0
            return 1 - float(hits(output, classes_of(want, cut), cut).mean())
        return min(_WORST, float(np.sqrt((deviations(want, output) ** 2).mean())))


def make_reference(
    answers: Outputs,
    labels: Array | None,
    metric: str = "",
    output: str = "",
    looks: int = 1,
    cut: float | None = None,
    groups: Array | None = None,
) -> Reference:
    """Make the reference with the metric that ``choose_metric`` selects. Raises the errors of ``choose_metric``."""
    choice = choose_metric(answers, labels, metric, output, cut)
    return Reference(choice, answers, labels if choice.metric.labels else None, looks, groups)


def not_finite(outputs: Outputs) -> str:
    """Where ``outputs`` have NaN or infinity, as text; empty if all values are finite."""
    for name, array in outputs.items():
        bad = np.flatnonzero(~_finite_rows(array))
        if len(bad):
            return f"output '{name}' is NaN or infinite in {len(bad)} of {len(array)} samples, first in sample {bad[0]}"
    return ""


def answers(model: LoadedModel, data: Dataset, batch: int = 64) -> Outputs:
    """The outputs of ``model`` on all of ``data``, one row per sample. A call has ``batch`` rows at most, or the fixed batch size.

    Raises Unsupported if the outputs have no axis for samples, ResourceExhausted if they need more than half of the memory.
    """
    size = data.fitting(batch) if model.signature.batchable else model.signature.smallest_batch
    return joined(data.call_samples(size), (_answered(model, call, data) for call in data.calls(size)))


def served_answers(model: LoadedModel, data: Dataset, batch: int = 64) -> Outputs:
    """The outputs of ``model`` as a server runs it. In sequences, a state is what ``model`` itself returned for the call before.

    The states among the outputs are then left out, unless there are no other outputs. Raises the errors of ``answers``.
    """
    if not data.states:
        return answers(model, data, batch)
    return joined(data.call_samples(1), _rolled_out(model, data))


def _rolled_out(model: LoadedModel, data: Dataset) -> Iterator[dict[str, Array]]:
    """The outputs of each sample of ``data``, in order."""
    states, kept = data.states, dict[str, Array]()
    names = [name for name in model.signature.output_names if name not in states.values()]
    for number, continues in enumerate(data.continues):
        found = _answered(
            model, SampleCall(np.array([number]), data.sample(number) | (kept if continues else {})), data
        )
        kept = {name: found[output] for name, output in states.items()}
        yield {name: found[name] for name in names or found}


def _answered(model: LoadedModel, call: SampleCall, data: Dataset) -> dict[str, Array]:
    """The outputs of a ``call`` with samples of ``data``. Raises PenstockError, which names the sample, and ResourceExhausted."""
    try:
        outputs = model.forward(call.inputs)
    except PenstockError as error:
        raise _located(error, model, call.samples, data) from None
    if call.samples[0] == 0:
        _check_room(sum(array.nbytes for array in outputs.values()) / len(call.samples), data.count)
    return outputs


def _located(error: PenstockError, model: LoadedModel, samples: Array, data: Dataset) -> PenstockError:
    """``error``, with the number of the sample that causes it, if the sample alone does."""
    for sample in samples if len(samples) > 1 and model.signature.smallest_batch == 1 else ():
        try:
            model.forward(data.sample(sample))
        except PenstockError as alone:
            return _located(alone, model, np.array([sample]), data)
    first, last = data.numbers[samples[0]], data.numbers[samples[-1]]
    where = f"sample {first}" if len(samples) == 1 else f"one of the samples {first} to {last}"
    error.message = f"{error.message} (in {where})"
    return error


def _check_room(sample_bytes: float, count: int) -> None:
    """Raise ResourceExhausted if the outputs for ``count`` samples need more than half of the memory."""
    needed, limit = sample_bytes * count, _MEMORY_SHARE * usable_memory()
    if limit and needed > limit:
        raise ResourceExhausted(
            f"the outputs for {count} samples need about {needed / 2**30:.1f} GiB of memory, but only {limit / 2**30:.1f} GiB may be "
            "used",
            f"evaluate on at most {int(limit / sample_bytes)} samples",
        )


def joined(samples: Iterable[Array], calls: Iterable[Mapping[str, Array]]) -> Outputs:
    """Join the outputs of several calls to one row per sample. ``samples`` has the numbers of the samples in each call.

    If shapes differ from sample to sample, floats are padded with zeros at the end of each axis. A row with one axis gets another of
    size 1, so that its elements do not count as class scores. Other outputs are replaced by a digest, which is equal only if all
    elements are. Raises Unsupported if the first axis of an output is not the number of samples.
    """
    numbers: list[Array] = []
    parts: dict[str, list[Array]] = {}
    for chosen, outputs in zip(samples, calls, strict=True):
        numbers.append(chosen)
        for name, array in outputs.items():
            parts.setdefault(name, []).append(array)
    order = np.argsort(np.concatenate(numbers), kind="stable")
    is_sorted = bool((np.diff(order) == 1).all())
    found = {name: _rows_of(name, arrays, numbers) for name, arrays in parts.items()}
    return found if is_sorted else {name: array[order] for name, array in found.items()}


def _rows_of(name: str, arrays: list[Array], samples: list[Array]) -> Array:
    """One row per sample of the output ``name``, in the order of the calls."""
    counts = [len(chosen) for chosen in samples]
    if any(array.shape[:1] != (count,) for array, count in zip(arrays, counts, strict=True)):
        # If a model takes one sample, its outputs may lack a batch axis.
        if max(counts) > 1:
            raise Unsupported(
                f"output '{name}' has shape {list(arrays[0].shape)} for {counts[0]} samples: its first axis is not the number of "
                "samples",
                "export the model with a batch axis on every output",
            )
        arrays = [array[np.newaxis] for array in arrays]
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    rows = [row for array in arrays for row in array]
    if not is_float(arrays[0]):
        return np.array([digest_of({"": np.asarray(row)}) for row in rows], np.object_)
    if len({np.ndim(row) for row in rows}) > 1:
        raise Unsupported(f"output '{name}' differs in its number of dimensions from sample to sample")
    padded = np.zeros((len(rows), *np.max([row.shape for row in rows], axis=0)), arrays[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        target[tuple(map(slice, row.shape))] = row
    return padded[..., np.newaxis] if padded.ndim == 2 else padded


def answers_of(
    artifact: Artifact, data: Dataset, threads: int = 1, *, batch_size: int = 64, as_written: bool = False
) -> Outputs:
    """The outputs of ``artifact`` on all of ``data``. Raises the errors of ``answers`` and ``loaded``."""
    with loaded(artifact, threads, as_written=as_written) as model:
        return answers(model, data, batch_size)


def _called(metric: AccuracyMetric, output: Array, truth: Array | None) -> Array:
    """The metric's result, after checks of its shape and values."""
    try:
        found = np.asarray(metric.of(output, truth), np.float64)
    except (PenstockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a metric may raise SystemExit, or an exception of a test framework
        raise InvalidData(
            f"the metric {metric.name} failed: {type(error).__name__}: {error}",
            "check that the outputs and the labels are as the function expects",
        ) from error
    if found.shape not in ((), (len(output),)):
        raise InvalidData(
            f"the metric {metric.name} returned shape {list(found.shape)} for {len(output)} samples",
            "return one number, or one number per sample",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(found.mean())  # finite scores may have an infinite sum
    if not is_finite:
        raise InvalidData(f"the metric {metric.name} is NaN or infinite", "check the function and the labels")
    return found


def _bounded(loss: float) -> float:
    return max(-_WORST, min(_WORST, loss)) if math.isfinite(loss) else _WORST


def _finite_rows(array: Array) -> Array:
    """For each row, whether all its values are finite."""
    if array.dtype.kind in "OSUiub":
        return np.ones(len(array), np.bool_)
    return np.asarray(np.isfinite(array).all(axis=tuple(range(1, array.ndim))))


def _spread(rows: Array, array: Array) -> Array:
    return rows.reshape(-1, *[1] * (array.ndim - 1))


def _blank(array: Array) -> Array:
    return np.zeros(1, array.dtype)
