"""A chart of the KL search: the divergence against the threshold, and the threshold of each method."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from penstock.errors import InvalidArgument
from penstock.offline.compress.ptq.ranges.entropy import divergences
from penstock.offline.compress.ptq.ranges.histogram import BINS, Range, TensorStatistics
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod, ranges
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.perf.chart import Scale, line_chart
from penstock.tensor import Array

_LEAST_BINS = 128
_POINTS = 200


def range_chart(statistics: Mapping[str, TensorStatistics], scheme: IntegerScheme, tensor: str | None = None) -> str:
    """SVG chart of KL(P‖Q) against the threshold, for the quantised magnitudes of ``tensor`` (Migacz), with a point for each method.

    If ``tensor`` is None, the chart shows the tensor on which the methods differ most. Raises InvalidArgument if the name is unknown,
    or if no tensor has a range to choose.
    """
    found = {method: ranges(statistics, method, scheme) for method in RangeMethod}
    names = [name for name, known in statistics.items() if _has_choice(known)]
    name = max(names, key=lambda one: _disagreement([found[method][one] for method in RangeMethod]), default=tensor)
    name = tensor or name
    if name is None or name not in names:
        raise InvalidArgument(
            f"tensor '{name}' has no range to choose" if name else "no tensor of the model has a range to choose",
            f"choose from {names[:20]}" if names else "leave the chart out",
        )
    counts = _magnitudes(statistics[name])
    last = counts.size
    one_sided = statistics[name].histogram.min >= 0 or statistics[name].histogram.max <= 0
    levels = 256 if one_sided else 128
    highs = np.unique(np.linspace(_LEAST_BINS, last, _POINTS).round().astype(np.intp))
    series = {"KL divergence": list(zip((highs / last).tolist(), _curve(counts, highs, levels), strict=True))}
    width = statistics[name].histogram.bin_width
    for method in RangeMethod:
        threshold = max(-found[method][name].low, found[method][name].high) / width
        at = np.clip(np.array([round(threshold)]), _LEAST_BINS, last)
        series[method.value] = [(float(at[0]) / last, _curve(counts, at, levels)[0])]
    title = f"Divergence by threshold of {name}"
    return line_chart(
        series,
        title,
        Scale("threshold, as a fraction of the largest magnitude", "{:.0%}"),
        Scale("KL divergence", "{:.3g}"),
    )


def _curve(counts: Array, highs: Array, levels: int) -> list[float]:
    scores: list[float] = divergences(counts, 0, highs, levels).tolist()
    return scores


def _magnitudes(known: TensorStatistics) -> Array:
    """Counts of |x| by bin, up to the last bin that is not empty."""
    counts = known.histogram.counts[BINS:] + known.histogram.counts[BINS - 1 :: -1]
    filled = np.flatnonzero(counts)
    return np.asarray(counts[: int(filled[-1]) + 1 if filled.size else 0])


def _has_choice(known: TensorStatistics) -> bool:
    varies = known.histogram.count > 0 and not known.histogram.is_constant
    return known.fixed is None and known.clippable and varies and _magnitudes(known).size > _LEAST_BINS


def _disagreement(candidates: list[Range]) -> float:
    """The fraction of the widest range that the narrowest range excludes."""
    widths = [range.high - range.low for range in candidates]
    return 1 - min(widths) / max(widths) if max(widths) > 0 else 0.0
