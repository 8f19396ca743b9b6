"""Charts as SVG text without scripts: lines, bars, accuracy by latency with the Pareto front, and the steps of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from penstock.bundle import titles
from penstock.bundle.evidence import Attempt, CandidateRecord, Evidence
from penstock.measurement import LatencyPoint

WIDTH, NARROW = 760, 380
"""Width of a chart in pixels: the default, and one for small screens."""
_HEIGHT = 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 24, 46
_UP = (_HEIGHT - _BOTTOM, _TOP)
_COLORS = {"fp32": "#2563eb", "bf16": "#d97706", "int8": "#059669"}
_SERIES_COLORS = ("#64748b", "#059669", "#2563eb", "#d97706", "#7c3aed", "#dc2626", "#0891b2", "#be185d")
_LINE = 15
"""Height of a line of text in pixels."""
_TITLE, _GAP = 22, 6
"""Width of a title at the left, and distance between neighbouring ticks, in pixels."""
_BAR, _NAMES, _LONGEST_NAME, _COLUMN_GAP = 20, 210, 28, 60
"""Height of a row of bars, width of the column of names, maximum length of a name (in characters), gap between columns; in pixels."""
_TICKS = 5


class Scale(NamedTuple):
    """Title, number format and kind of an axis. An axis in per cent stays within 0 and 100 %, unless a value lies outside."""

    title: str
    form: str = "{:g}"
    log: bool = False

    @property
    def is_share(self) -> bool:
        return self.form.endswith("%}")


class _Axis:
    """Maps values to pixels, with a margin at both ends, and finds round values for the ticks."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], scale: Scale) -> None:
        self.title = escape(scale.title + " (logarithmic)" * scale.log)
        self.form, self._log = scale.form, scale.log
        self.start, self.end = pixels
        values = values or [1.0]
        low, high = (math.log(v) if scale.log else v for v in (min(values), max(values)))
        margin = 0.08 * (high - low) or (0.01 if scale.is_share else abs(low) * 0.05 or 0.5)
        self._low, self._high = low - margin, high + margin
        if scale.is_share and not scale.log:
            self._low = max(self._low, min(0.0, low))
            self._high = min(self._high, max(1.0, high))

    def __call__(self, value: float) -> float:
        share = ((math.log(value) if self._log else value) - self._low) / (self._high - self._low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = _TICKS) -> list[float]:
        """About ``count`` round values in the range. On a long logarithmic axis, a smaller ``count`` gives fewer ticks per decade."""
        low, high = (math.exp(self._low), math.exp(self._high)) if self._log else (self._low, self._high)
        if self._log and high / low > 5:
            mantissas = (1, 2, 5) if count == _TICKS else (1,)
            every = max(1, _TICKS - count)
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, every)
            steps = [mantissa * 10.0**decade for decade in decades for mantissa in mantissas]
        else:
            raw = (high - low) / count
            unit = 10.0 ** math.floor(math.log10(raw))
            step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
            steps = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [value for value in steps if low <= value <= high]

    def ticks_across(self) -> list[float]:
        """As many ticks as fit side by side."""
        return next(
            (ticks for count in range(_TICKS, 1, -1) if self._fit(ticks := self.ticks(count))), self.ticks(1)[:1]
        )

    def width(self, value: float) -> float:
        """Width of ``value`` as text, in pixels."""
        return _text_width(self.form.format(value))

    def _fit(self, ticks: Sequence[float]) -> bool:
        halves = ((self.width(left) + self.width(right)) / 2 for left, right in pairwise(ticks))
        return all(
            self(right) - self(left) >= half + 2 * _GAP
            for (left, right), half in zip(pairwise(ticks), halves, strict=True)
        )


def _text_width(text: str) -> float:
    """Width of a number in the chart's font: a digit has seven pixels, a per cent sign twelve, a point or comma four."""
    return sum(12 if letter == "%" else 4 if letter in ".," else 7 for letter in text)


def _across(y: _Axis, width: int) -> tuple[float, float]:
    """Start and end of a horizontal axis beside the vertical axis ``y``, its ticks and its title."""
    return max(_LEFT, _TITLE + _GAP + max(map(y.width, y.ticks()), default=0)), width - _RIGHT


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x_scale: Scale,
    y_scale: Scale,
    marks: Sequence[tuple[str, float]] = (),
    width: int = WIDTH,
) -> str:
    """Draw a line chart: each of ``series`` is a line through points (x, y), and each of ``marks`` is a dashed horizontal line.

    Points that are not finite, or not positive on a logarithmic axis, are skipped.
    """
    drawn = {name: [point for point in points if _is_on(point, x_scale, y_scale)] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    levels = [(name, level) for name, level in marks if _is_on((1.0, level), x_scale, y_scale)]
    y = _Axis([y for points in drawn.values() for _, y in points] + [level for _, level in levels], _UP, y_scale)
    x = _Axis([x for points in drawn.values() for x, _ in points], _across(y, width), x_scale)
    parts = _frame(x, y, width)
    for name, level in levels:
        parts += _level(name, y(level), x)
    heights = _spread([y(points[-1][1]) - 10 for points in drawn.values()])
    for index, ((name, points), height) in enumerate(zip(drawn.items(), heights, strict=True)):
        color = _SERIES_COLORS[index % len(_SERIES_COLORS)]
        path = " ".join(f"{x(across):.1f},{y(up):.1f}" for across, up in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        for across, up in points:
            tip = f"{name}: {y.form.format(up)} {y_scale.title} at {x_scale.title} {x.form.format(across)}"
            parts.append(
                f'<circle cx="{x(across):.1f}" cy="{y(up):.1f}" r="4" fill="{color}"><title>{escape(tip)}</title></circle>'
            )
        parts.append(
            f'<text x="{x(points[-1][0]) - 8:.1f}" y="{height:.1f}" text-anchor="end" fill="{color}">{escape(name)}</text>'
        )
    return _svg(parts, title, width)


def bar_chart(rows: Sequence[tuple[str, *tuple[float, ...]]], title: str, *scales: Scale) -> str:
    """Draw a bar chart. A row has a name and, for each of ``scales``, one value; the value is drawn as a bar from zero.

    Values that are not finite are drawn as a dash. The length of a bar is always linear.
    """
    bottom = _TOP + _BAR * max(1, len(rows))
    room = (WIDTH - _NAMES - _RIGHT + _COLUMN_GAP / 2) / len(scales)
    parts = []
    for row, (name, *_) in enumerate(rows):
        short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
        middle = _TOP + _BAR * (row + 0.5) + 4
        parts.append(f'<text x="{_NAMES - 8}" y="{middle:.1f}" text-anchor="end">{escape(short)}</text>')
    for column, scale in enumerate(scales):
        start, end = _NAMES + room * column, _NAMES + room * (column + 1) - _COLUMN_GAP
        values = [float(values[column]) for _, *values in rows]
        x = _Axis([0.0, *(value for value in values if math.isfinite(value))], (start, end), scale._replace(log=False))
        parts += _grid_across(x, bottom, WIDTH)
        parts.append(
            f'<text class="title" x="{(start + end) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{x.title}</text>'
        )
        for row, ((name, *_), value) in enumerate(zip(rows, values, strict=True)):
            color = _SERIES_COLORS[(column + 1) % len(_SERIES_COLORS)]
            parts.append(_bar(f"{name}: {x.form.format(value)} {scale.title}", x, value, _TOP + _BAR * row, color))
    return _svg(parts, title, WIDTH, bottom + _BOTTOM)


def pareto(records: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    """The measured records that no other record beats in both latency and accuracy (the Pareto front), sorted by latency."""
    front: list[CandidateRecord] = []
    for record in sorted(_measured(records), key=lambda r: (r.latency_ms or 0.0, -_value(r))):
        if not front or _value(record) > _value(front[-1]):
            front.append(record)
    return front


def pareto_chart(evidence: Evidence, width: int = WIDTH) -> str:
    """Draw all candidates by latency (logarithmic) and accuracy, with the Pareto front and the minimum accuracy."""
    records = _measured((evidence.baseline, *evidence.candidates))
    floor = _value(evidence.baseline) - evidence.limit
    metric = evidence.baseline.accuracy.metric if evidence.baseline.accuracy else "accuracy"
    x_scale = Scale("p50 latency of one call, ms", "{:.4g}", log=True)
    y = _Axis([floor, *(_value(record) for record in records)], _UP, Scale(metric, "{:.2%}"))
    x = _Axis([record.latency_ms or 1.0 for record in records], _across(y, width), x_scale)
    parts = _frame(x, y, width) + _level("minimum", y(floor), x)
    front = pareto(records)
    path = " ".join(f"{x(r.latency_ms or 1.0):.1f},{y(_value(r)):.1f}" for r in front)
    parts.append(f'<polyline class="front" points="{path}"/>')
    for record in records:
        parts.append(_point(record, x(record.latency_ms or 1.0), y(_value(record)), evidence, width))
    return _svg(parts, "Accuracy by latency of every candidate, with the Pareto front", width)


def throughput_chart(profiles: Mapping[str, Sequence[LatencyPoint]], width: int = WIDTH) -> str:
    """Draw the throughput of one instance by batch size (both logarithmic), with one line per profile."""
    rates = {name: [(p.batch, p.batch / p.p50_ms * 1e3) for p in points] for name, points in profiles.items()}
    x_scale, y_scale = Scale("batch size", log=True), Scale("rows/s", "{:,.0f}", log=True)
    return line_chart(rates, "Throughput by batch size", x_scale, y_scale, width=width)


def attempts_chart(attempts: Sequence[Attempt], original_bytes: int, width: int = WIDTH) -> str:
    """Draw all models that a plan measured, by size (logarithmic) and accuracy. A line connects each model to its source.

    If the plan coded its models, sizes are sizes of coded files. Hollow points are models that the plan did not keep. Returns "" if
    nothing was measured.
    """
    measured = [(attempt, attempt.accuracy) for attempt in attempts if attempt.accuracy is not None]
    if not measured:
        return ""
    first = measured[0][1]
    original = first.level + first.loss.value
    sizes = [(attempt.stored_bytes or attempt.size_bytes) / 1024 for attempt, _ in measured]
    title = "KiB coded" if any(attempt.stored_bytes for attempt, _ in measured) else "KiB"
    y = _Axis([original, *(found.level for _, found in measured)], _UP, Scale(f"{first.metric}, held out", "{:.2%}"))
    x = _Axis([original_bytes / 1024, *sizes], _across(y, width), Scale(title, "{:,.4g}", log=True))
    places = {"original": (x(original_bytes / 1024), y(original))}
    lines, marks = [], [_mark("original", places["original"], "original", width)]
    for (attempt, found), size in zip(measured, sizes, strict=True):
        path = attempt.name if attempt.parent == "original" else f"{attempt.parent}+{attempt.name}"
        places[path] = (x(size), y(found.level))
        (left, top), (right, bottom) = places.get(attempt.parent, places["original"]), places[path]
        lines.append(f'<line class="step" x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>')
        name, outcome = titles.steps_title(path), f"{attempt.outcome}: {attempt.reason}"
        tip = f"{name}: {x.form.format(size)} KiB, {found.shown} — {outcome}"
        label = titles.steps_title(attempt.name) if attempt.outcome == "kept" else ""
        marks.append(_mark(tip, places[path], label, width))
    return _svg([*_frame(x, y, width), *lines, *marks], "Accuracy by size of every model that the plan made", width)


def _mark(tip: str, place: tuple[float, float], label: str, width: int) -> str:
    """A point, hollow if it has no label. The label is rotated, so that neighbours of similar accuracy do not overlap."""
    x, y = place
    fill = "#059669" if label else "none"
    shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="#059669"><title>{escape(tip)}</title></circle>'
    side, anchor = (-1, "end") if x > width * 0.6 else (1, "start")  # away from the nearer edge
    turn = f"translate({x + 6 * side:.1f} {y + 10:.1f}) rotate({35 * side})"
    return shape + f'<text class="note" transform="{turn}" text-anchor="{anchor}">{escape(label)}</text>' * bool(label)


def _point(record: CandidateRecord, x: float, y: float, evidence: Evidence, width: int) -> str:
    color = _COLORS.get(record.precision, "#64748b")
    fill = "none" if record.status in ("rejected", "failed") else color
    tip = f"{titles.title(record)}: {record.latency_ms:.4g} ms, {_value(record):.2%} — {titles.verdict(record)}"
    mark = f'fill="{fill}" stroke="{color}" stroke-width="1.5"><title>{escape(tip)}</title>'
    if record.engine != evidence.baseline.engine:
        shape = f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" {mark}</rect>'
    else:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" {mark}</circle>'
    is_original, is_chosen = record.name == evidence.baseline.name, record.name == evidence.chosen
    if not (is_original or is_chosen):
        return shape
    ring = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" fill="none" stroke="{color}" stroke-width="2"/>' if is_chosen else ""
    )
    label = ", ".join(["original"] * is_original + ["chosen"] * is_chosen)
    # One label is above its mark and one below, so that they do not overlap if accuracies are equal.
    anchor, height = "end" if x > width * 0.6 else "start", y + 28 if is_chosen else y - 14
    text = f'<text class="name" x="{x:.1f}" y="{height:.1f}" text-anchor="{anchor}">{label}</text>'
    return ring + shape + text


def _bar(tip: str, x: _Axis, value: float, top: float, color: str) -> str:
    note = f"<title>{escape(tip)}</title>"
    if not math.isfinite(value):
        return f'<text x="{x(0.0) + 4:.1f}" y="{top + _BAR / 2 + 4:.1f}">–{note}</text>'
    left, right = sorted((x(0.0), x(value)))
    size = f'width="{max(1.0, right - left):.1f}" height="{_BAR - 6}"'
    return f'<rect x="{left:.1f}" y="{top + 3:.1f}" {size} fill="{color}">{note}</rect>'


def _level(name: str, at: float, x: _Axis) -> list[str]:
    """A dashed horizontal line at height ``at``, with its name."""
    return [
        f'<line class="floor" x1="{x.start:.0f}" x2="{x.end:.0f}" y1="{at:.1f}" y2="{at:.1f}"/>',
        f'<text class="note" x="{x.end - 4:.0f}" y="{at - 5:.1f}" text-anchor="end">{escape(name)}</text>',
    ]


def _spread(heights: Sequence[float]) -> list[float]:
    """Move labels at ``heights`` down until they do not overlap. If the last label is then below the frame, move all labels up."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + _LINE)
    too_low = max(0.0, max(placed, default=0.0) - (_HEIGHT - _BOTTOM))
    return [height - too_low for height in placed]


def _is_on(point: tuple[float, float], *scales: Scale) -> bool:
    return all(math.isfinite(v) and (v > 0 or not scale.log) for v, scale in zip(point, scales, strict=True))


def _grid_across(x: _Axis, bottom: float, width: int) -> list[str]:
    """Vertical grid lines with ticks."""
    parts = []
    for value in x.ticks_across():
        at = f"{x(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
        middle = min(x(value), width - x.width(value) / 2)
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{x.form.format(value)}</text>')
    return parts


def _frame(x: _Axis, y: _Axis, width: int) -> list[str]:
    """Grid, ticks and titles."""
    left, right, bottom = x.start, x.end, _HEIGHT - _BOTTOM
    parts = _grid_across(x, bottom, width)
    for value in y.ticks():
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{left:.0f}" x2="{right:.0f}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text x="{left - _GAP:.0f}" y="{y(value) + 4:.1f}" text-anchor="end">{y.form.format(value)}</text>'
        )
    across, up = (left + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text class="title" x="{across:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{x.title}</text>')
    turn = f"translate(14 {up:.0f}) rotate(-90)"
    parts.append(f'<text class="title" transform="{turn}" text-anchor="middle">{y.title}</text>')
    return parts


def _svg(parts: Sequence[str], label: str, width: int, height: int = _HEIGHT) -> str:
    size, name = f'viewBox="0 0 {width} {height}" fill="currentColor"', f'role="img" aria-label="{escape(label)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {name}><style>{STYLE}</style>{"".join(parts)}</svg>'


STYLE = (
    "svg{font:12px system-ui,sans-serif;max-width:100%}.grid{stroke:currentColor;opacity:.12}"
    ".step{stroke:#059669;opacity:.35}"
    ".front{fill:none;stroke:currentColor;stroke-width:1.5;opacity:.45}.floor{stroke:#dc2626;stroke-dasharray:5 4}"
    ".title,.note{opacity:.7}.name{font-weight:600}"
)
"""Style sheet, included in every chart, so that a copied chart keeps its appearance."""


def _measured(records: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    return [record for record in records if record.latency_ms is not None and record.accuracy is not None]


def _value(record: CandidateRecord) -> float:
    return record.accuracy.level if record.accuracy else 0.0
