"""Choose the range method of each tensor by its effect on the model's outputs.

No method is best for all tensors: KL-entropy ignores the energy of clipped values, min-max makes every step coarse because of one
outlier, and MSE considers one tensor in isolation. So each tensor is rounded with every candidate range in an otherwise float model,
and the range with the least error of the outputs is kept. Ranges that are best for each tensor alone may not be best together. So at
the end, the quantised model with these ranges is compared with quantised models that use one method for all tensors.

To try a range, only the nodes after the tensor run again (``suffix.py``). The error of the outputs is called the harm of a range. For
class scores, the harm is the angle between the scores with and without rounding. The angle ignores the magnitude of the scores, which
does not affect their order. Otherwise, the few samples with the largest scores would dominate. For other outputs, the harm is the
relative error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.qdq_placement import FloatModel, QdqPlacement, float_model
from penstock.offline.compress.ptq.quantize import quantize
from penstock.offline.compress.ptq.ranges.histogram import Range, TensorStatistics
from penstock.offline.compress.ptq.ranges.probe import RangeProbe
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges, squared_error
from penstock.offline.compress.ptq.ranges.suffix import Suffix
from penstock.offline.compress.ptq.rounding import Rounding
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.offline.compress.taps import Progress, Taps, grouped, no_progress
from penstock.offline.judge.accuracy import answers_of, joined
from penstock.offline.judge.metrics import Outputs, sample_errors
from penstock.offline.model_store import remembered
from penstock.offline.sessions import call_rows, loaded, signature_of
from penstock.tensor import Array

CANDIDATES: dict[str, tuple[RangeMethod, float]] = {
    "min-max": (RangeMethod.MIN_MAX, 100.0),
    "percentile-99.999": (RangeMethod.PERCENTILE, 99.999),
    "percentile-99.99": (RangeMethod.PERCENTILE, 99.99),
    "percentile-99.9": (RangeMethod.PERCENTILE, 99.9),
    "mse": (RangeMethod.MSE, 100.0),
    "entropy": (RangeMethod.ENTROPY, 100.0),
}
"""Methods by name. If two methods give similar ranges, only the first is tried."""

_BATCH = 32
_TOGETHER = 4
"""Maximum number of tensors that share one suffix."""
_MEMORY_BYTES = 128 << 20
"""Bytes of memory for the input tensors of suffixes, on all rows."""
_ALIKE = 0.01
"""Two ranges are similar if their ends differ by less than this fraction of the wider range."""
_FEWEST_CLASSES = 3
"""Minimum number of classes for the angle: with two classes, scores minus their mean have only the angles 0 and 180°."""


class RangeChoiceOptions(msgspec.Struct, frozen=True):
    """Limits on the cost of the choice."""

    rows: int = 32
    """Number of calibration samples, evenly spaced, on which ranges are tried."""
    max_calls: int = 1000
    """Maximum number of passes over these samples. After this number, each remaining tensor gets the range with the least squared
    error of the tensor itself.
    """
    time_s: float | None = None
    """Time limit in seconds. When it is reached, the remaining tensors are handled as after ``max_calls``. The result then depends on
    the machine. None: no limit.
    """
    threads: int = 1
    """Engine threads while ranges are tried."""


class TriedRange(msgspec.Struct, frozen=True):
    """One candidate range of a tensor."""

    method: str
    range: Range
    error: float
    """Harm to the model's outputs if it was measured, otherwise the mean squared error of the tensor itself."""


class TensorChoice(msgspec.Struct, frozen=True):
    """The range that was chosen for one tensor, and its candidates."""

    method: str
    range: Range
    measured: bool
    """True if ``error`` is the harm to the outputs. False if there was only one candidate, if the tensor uses another tensor's range
    in this placement, or if the budget was used up.
    """
    tried: tuple[TriedRange, ...]


class RangeChoice(msgspec.Struct, frozen=True):
    """The ranges for quantisation, and the measurements behind them."""

    ranges: dict[str, Range]
    method: str
    """``per tensor``, or the name of one method if using that method for all tensors harmed the outputs less."""
    errors: dict[str, float]
    """For each method, including ``per tensor``, the harm to the outputs of the whole quantised model on the calibration rows."""
    tensors: dict[str, TensorChoice]


PER_TENSOR = "per tensor"


def choose_ranges(
    artifact: Artifact,
    statistics: Mapping[str, TensorStatistics],
    data: Dataset,
    scheme: IntegerScheme,
    placement: QdqPlacement = QdqPlacement.LINEAR,
    options: RangeChoiceOptions | None = None,
    progress: Progress = no_progress,
) -> RangeChoice:
    """Choose the range of every tensor in ``statistics`` by the method with the least harm to the outputs on ``data``.

    Deterministic unless ``options.time_s`` is given. Raises the errors of ``quantize``, and Unsupported if the outputs cannot be
    compared sample by sample.
    """
    options = options or RangeChoiceOptions()
    by_method = _by_method(statistics, scheme)
    trials = _Trials(artifact, _some(data, options.rows, artifact), scheme, placement, options)
    tensors: dict[str, TensorChoice] = {}
    # A limited budget is spent first on the tensors whose candidates differ most, since they can gain most.
    order = sorted(by_method["min-max"], key=lambda name: -_spread([found[name] for found in by_method.values()]))
    candidates = {name: distinct({method: found[name] for method, found in by_method.items()}) for name in order}
    for name, harms in trials.harms(candidates):
        tensors[name] = _best(candidates[name], harms, statistics[name], scheme)
        progress(len(tensors), len(order) + len(by_method) + 1)
    best = {name: tensors[name].range for name in statistics if name in tensors}
    errors: dict[str, float] = {}
    for name, found in {PER_TENSOR: best, **by_method}.items():
        errors[name] = trials.whole(found)
        progress(len(order) + len(errors), len(order) + len(by_method) + 1)
    winner = min(errors, key=lambda name: errors[name])
    chosen = best if winner == PER_TENSOR else by_method[winner]
    return RangeChoice(chosen, winner, errors, {name: tensors[name] for name in best})


def distinct(candidates: Mapping[str, Range]) -> dict[str, Range]:
    """``candidates`` without ranges that are similar to an earlier candidate."""
    kept: dict[str, Range] = {}
    for name, range in candidates.items():
        if all(_difference(range, other) >= _ALIKE for other in kept.values()):
            kept[name] = range
    return kept


class _Trials:
    """A float model in which one tensor at a time is rounded, on the same rows."""

    def __init__(
        self,
        artifact: Artifact,
        data: Dataset,
        scheme: IntegerScheme,
        placement: QdqPlacement,
        options: RangeChoiceOptions,
    ) -> None:
        self._scheme, self._data, self._options = scheme, data, options
        self._artifact, self._placement = artifact, placement
        self._probe: RangeProbe | None = None
        self._model = float_model(artifact)
        self._roundable = set(_roundable(self._model, placement))
        self._end = None if options.time_s is None else time.monotonic() + options.time_s
        signature = signature_of(artifact)
        self._taps = Taps(
            self._model.artifact(),
            data,
            batch_size=call_rows(signature, _BATCH),
            threads=options.threads,
            memory_bytes=_MEMORY_BYTES,
            signature=signature,
        )
        self._reference = answers_of(artifact, data, options.threads, as_written=True)
        self.calls = 1

    def harms(self, candidates: Mapping[str, Mapping[str, Range]]) -> Iterator[tuple[str, list[float] | None]]:
        """For each tensor, in order, the harm of each candidate. None if there is only one candidate or the budget is used up."""
        segments = self._segments(
            {name for name, tried in candidates.items() if len(tried) > 1 and name in self._roundable}
        )
        held = _Held(self._taps, segments)
        for name, tried in candidates.items():
            if name not in segments or not self._affords(len(tried)):
                yield name, None
                continue
            # The harms do not depend on the placement, so another placement can reuse them.
            key = self._artifact.digest, self._data.digest, self._scheme, name, tuple(tried.values())
            make = functools.partial(self._harms, segments[name], name, held, list(tried.values()))
            yield name, remembered("harms", key, make, 0)

    def whole(self, ranges: Mapping[str, Range]) -> float:
        """The harm to the outputs of the whole model quantised to ``ranges``."""
        if self._probe is None:
            self._probe = RangeProbe(quantize(self._artifact, ranges, self._scheme, self._placement), self._scheme)
        outputs = self._probe.answers(ranges, self._data, self._options.threads, _BATCH)
        return output_harm(self._reference, outputs)

    def _harms(self, suffix: Suffix, tensor: str, held: _Held, tried: Sequence[Range]) -> list[float]:
        found = []
        with loaded(suffix.artifact(self._scheme), self._options.threads) as model:
            for range in tried:
                calls = suffix.rounded(model, held.batches(suffix), tensor, range, self._scheme)
                found.append(output_harm(self._reference, {**self._reference, **joined(held.samples, calls)}))
        self.calls += len(tried)
        return found

    def _segments(self, tensors: Collection[str]) -> dict[str, Suffix]:
        """The suffix of each of ``tensors``. A few consecutive tensors share one."""
        written = (name for node in self._model.nodes for name in node.output)
        suffixes: list[Suffix] = []
        for name in (*self._model.input_names, *written):
            if name not in tensors:
                continue
            if not suffixes or len(suffixes[-1].tensors) == _TOGETHER or not suffixes[-1].take(name):
                suffixes.append(Suffix(self._model, name))
        return {name: suffix for suffix in suffixes for name in suffix.tensors}

    def _affords(self, calls: int) -> bool:
        in_time = self._end is None or time.monotonic() < self._end
        return in_time and self.calls + calls <= self._options.max_calls


class _Held:
    """Holds the input tensors of suffixes on all rows, for as many suffixes at a time as fit in memory."""

    def __init__(self, taps: Taps, segments: Mapping[str, Suffix]) -> None:
        self._taps = taps
        self.samples = taps.batches.samples
        """The numbers of the samples in each batch."""
        self._suffixes = {suffix.tensors[0]: suffix for suffix in segments.values()}
        self._group: list[str] = []
        self._batches: list[dict[str, Array]] = []

    def batches(self, suffix: Suffix) -> list[dict[str, Array]]:
        """For each batch, the tensors that ``suffix`` reads, and possibly other tensors."""
        first = suffix.tensors[0]
        if first not in self._group:
            self._batches = []  # frees them before the next batches are read
            self._group = next(group for group in self._groups if first in group)
            read: dict[str, list[Array]] = {}
            for name, array in self._taps.run([name for one in self._group for name in self._suffixes[one].read]):
                read.setdefault(name, []).append(array)
            self._batches = [dict(zip(read, arrays, strict=True)) for arrays in zip(*read.values(), strict=True)]
        return self._batches

    @functools.cached_property
    def _groups(self) -> list[list[str]]:
        """The suffixes, by their first tensors, in groups that fit in memory."""
        sizes = self._taps.sizes([name for suffix in self._suffixes.values() for name in suffix.read])
        batches = self._taps.batches.count
        totals = {first: sum(sizes[name] for name in suffix.read) for first, suffix in self._suffixes.items()}
        return grouped({first: batches * total for first, total in totals.items()}, _MEMORY_BYTES)


def _by_method(statistics: Mapping[str, TensorStatistics], scheme: IntegerScheme) -> dict[str, dict[str, Range]]:
    """The range of every tensor by every method of ``CANDIDATES``."""

    def make() -> tuple[dict[str, dict[str, Range]], list[TensorStatistics]]:
        found = {name: ranges(statistics, method, scheme, percent) for name, (method, percent) in CANDIDATES.items()}
        return found, list(statistics.values())  # keeps the objects alive, because their identities are the key

    key = scheme, tuple((name, id(known)) for name, known in statistics.items())
    return remembered("ranges", key, make, 0)[0]


def output_harm(reference: Outputs, outputs: Outputs) -> float:
    """The harm to the outputs: the harm to each sample's worst output, averaged over samples; 0 for no change.

    Class scores have the shape [samples, classes], with at least three classes. Their harm is 1 minus the cosine between the centred
    scores. For other outputs, the harm is the relative error, at most 1. If rounding changes a shape (NonZero), the harm is 1.
    """
    if any(array.shape != outputs[name].shape for name, array in reference.items()):
        return 1.0
    if any(array.ndim != 2 or array.shape[1] < _FEWEST_CLASSES for array in reference.values()):
        return float(sample_errors(reference, outputs).mean())
    turned = [1 - _cosine(array, outputs[name]) for name, array in reference.items()]
    return float(np.max(turned, axis=0).mean())


def _cosine(scores: Array, others: Array) -> Array:
    """The cosine between rows minus their means; 0 if one of the rows is zero or not finite."""
    one, other = (array.astype(np.float64) for array in (scores, others))
    one, other = one - one.mean(axis=1, keepdims=True), other - other.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num((one * other).sum(axis=1) / norms, posinf=0.0, neginf=0.0))


def _best(
    candidates: Mapping[str, Range], harms: list[float] | None, known: TensorStatistics, scheme: IntegerScheme
) -> TensorChoice:
    """The candidate with the least harm or, if no harm was measured, with the least squared error of the tensor itself."""
    errors = _own_errors(known, list(candidates.values()), scheme) if harms is None else harms
    tried = tuple(TriedRange(*one) for one in zip(candidates, candidates.values(), errors, strict=True))
    best = min(tried, key=lambda one: one.error)
    return TensorChoice(best.method, best.range, harms is not None, tried)


def _roundable(model: FloatModel, placement: QdqPlacement) -> list[str]:
    """Tensors that have a range of their own in the integer model."""
    sources = Rounding(model, model.integer_nodes(placement), placement).sources
    return [name for name, source in sources.items() if name == source]


def _own_errors(known: TensorStatistics, candidates: Sequence[Range], scheme: IntegerScheme) -> list[float]:
    """The mean squared error of the tensor itself with each range."""
    histogram = known.histogram
    if len(candidates) < 2:
        return [0.0] * len(candidates)
    ends = np.array([[range.low for range in candidates], [range.high for range in candidates]])
    return [float(error) / histogram.count for error in squared_error(histogram, scheme)(*ends)]


def _some(data: Dataset, rows: int, artifact: Artifact) -> Dataset:
    """``rows`` evenly spaced samples of ``data``, rounded down to a multiple of the model's batch size."""
    if rows < 1:
        raise InvalidArgument(
            f"the number of samples for trying ranges must be at least 1, got {rows}", "give at least 1 row"
        )
    smallest = signature_of(artifact).smallest_batch
    return data.few(rows, smallest)


def _spread(candidates: Sequence[Range]) -> float:
    return max(_difference(candidates[0], other) for other in candidates)


def _difference(one: Range, other: Range) -> float:
    width = max(one.high - one.low, other.high - other.low)
    return max(abs(one.low - other.low), abs(one.high - other.high)) / width if width else 0.0
