"""Charts as SVG text: a scatter of accuracy by latency with its Pareto front, and throughput by batch. No script, no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from penstock.bundle.evidence import CandidateRecord, Evidence, LatencyPoint

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 24, 46
_ACROSS, _UP = (_LEFT, _WIDTH - _RIGHT), (_HEIGHT - _BOTTOM, _TOP)
_COLORS = {"fp32": "#2563eb", "bf16": "#d97706", "int8": "#059669"}
_SERIES_COLORS = ("#64748b", "#059669")


class _Axis:
    """Maps values to pixels, linearly or by their logarithm, with a margin at both ends; ``form`` writes a tick."""

    def __init__(
        self, values: Sequence[float], pixels: tuple[float, float], title: str, form: str, *, log: bool
    ) -> None:
        self.title, self.form = title, form
        self._log = log
        start, end = pixels
        low, high = (math.log(v) if log else v for v in (min(values), max(values)))
        margin = 0.08 * (high - low) or abs(low) * 0.05 or 0.5
        self._low, self._high, self._start, self._end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        share = ((math.log(value) if self._log else value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range."""
        low, high = (math.exp(self._low), math.exp(self._high)) if self._log else (self._low, self._high)
        if self._log and high / low > 5:
            steps = [
                m * 10.0**e
                for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
                for m in (1, 2, 5)
            ]
        else:
            raw = (high - low) / count
            unit = 10.0 ** math.floor(math.log10(raw))
            step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
            steps = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [value for value in steps if low <= value <= high]


def pareto(records: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    """The measured records that no other one beats in both latency and accuracy, by rising latency."""
    front: list[CandidateRecord] = []
    for record in sorted(_measured(records), key=lambda r: (r.latency_ms or 0.0, -_value(r))):
        if not front or _value(record) > _value(front[-1]):
            front.append(record)
    return front


def pareto_chart(evidence: Evidence) -> str:
    """Every candidate by latency (logarithmic) and accuracy, the Pareto front, and the least accuracy allowed."""
    records = _measured((evidence.baseline, *evidence.candidates))
    floor = _value(evidence.baseline) - evidence.max_accuracy_loss
    metric = evidence.baseline.accuracy.metric if evidence.baseline.accuracy else "accuracy"
    title = "p50 latency of one call, ms (logarithmic)"
    x = _Axis([record.latency_ms or 1.0 for record in records], _ACROSS, title, "{:.4g}", log=True)
    y = _Axis([floor, *(_value(record) for record in records)], _UP, metric, "{:.2%}", log=False)
    parts = _frame(x, y)
    parts.append(f'<line class="floor" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(floor):.1f}" y2="{y(floor):.1f}"/>')
    parts.append(
        f'<text class="note" x="{_WIDTH - _RIGHT - 4}" y="{y(floor) - 5:.1f}" text-anchor="end">least allowed</text>'
    )
    front = pareto(records)
    path = " ".join(f"{x(r.latency_ms or 1.0):.1f},{y(_value(r)):.1f}" for r in front)
    parts.append(f'<polyline class="front" points="{path}"/>')
    for record in records:
        parts.append(_point(record, x(record.latency_ms or 1.0), y(_value(record)), evidence))
    return _svg(parts, "Accuracy by latency of every candidate, with the Pareto front")


def throughput_chart(profiles: Mapping[str, Sequence[LatencyPoint]]) -> str:
    """Rows per second of one instance by batch size (both logarithmic), one line per profile."""
    rates = {name: [(p.batch, p.batch / p.p50_ms * 1e3) for p in points] for name, points in profiles.items() if points}
    x = _Axis(
        [b for points in rates.values() for b, _ in points], _ACROSS, "batch size (logarithmic)", "{:g}", log=True
    )
    y = _Axis([rate for points in rates.values() for _, rate in points], _UP, "rows/s", "{:,.0f}", log=True)
    parts = _frame(x, y)
    for (name, points), color in zip(rates.items(), _SERIES_COLORS, strict=False):
        path = " ".join(f"{x(batch):.1f},{y(rate):.1f}" for batch, rate in points)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        for batch, rate in points:
            label = f"{escape(name)}: {rate:,.0f} rows/s at batch {batch}"
            parts.append(
                f'<circle cx="{x(batch):.1f}" cy="{y(rate):.1f}" r="4" fill="{color}"><title>{label}</title></circle>'
            )
        batch, rate = points[-1]
        parts.append(
            f'<text x="{x(batch) - 8:.1f}" y="{y(rate) - 10:.1f}" text-anchor="end" style="fill:{color}">{escape(name)}</text>'
        )
    return _svg(parts, "Throughput by batch size")


def _point(record: CandidateRecord, x: float, y: float, evidence: Evidence) -> str:
    color = _COLORS.get(record.precision, "#64748b")
    fill = "none" if record.status in ("rejected", "failed") else color
    tip = f"{record.name}: {record.latency_ms:.4g} ms, {_value(record):.2%} — {record.status}: {record.reason}"
    mark = f'fill="{fill}" stroke="{color}" stroke-width="1.5"><title>{escape(tip)}</title>'
    if record.engine == "openvino":
        shape = f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" {mark}</rect>'
    else:
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" {mark}</circle>'
    if record.name not in (evidence.chosen, evidence.baseline.name):
        return shape
    is_chosen = record.name == evidence.chosen
    ring = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" fill="none" stroke="{color}" stroke-width="2"/>' if is_chosen else ""
    )
    label = f"{record.name} (chosen)" if is_chosen else record.name
    # One above and one below its mark, so that they do not meet where accuracies are equal.
    anchor, height = "end" if x > _WIDTH * 0.6 else "start", y + 28 if is_chosen else y - 14
    text = f'<text class="name" x="{x:.1f}" y="{height:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
    return ring + shape + text


def _frame(x: _Axis, y: _Axis) -> list[str]:
    """Grid, ticks and titles."""
    parts = []
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for value in x.ticks():
        at = f"{x(value):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{x.form.format(value)}</text>')
    for value in y.ticks():
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{y.form.format(value)}</text>')
    across, up = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<text class="title" x="{across:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{x.title}</text>')
    turn = f"translate(14 {up:.0f}) rotate(-90)"
    parts.append(f'<text class="title" transform="{turn}" text-anchor="middle">{y.title}</text>')
    return parts


def _svg(parts: Sequence[str], label: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + f"<style>{STYLE}</style>" + "".join(parts) + "</svg>"


STYLE = (
    "svg{font:12px system-ui,sans-serif;max-width:100%}text{fill:currentColor}.grid{stroke:currentColor;opacity:.12}"
    ".front{fill:none;stroke:currentColor;stroke-width:1.5;opacity:.45}.floor{stroke:#dc2626;stroke-dasharray:5 4}"
    ".title,.note{opacity:.7}.name{font-weight:600}"
)
"""Kept inside every chart, so that a chart copied out of the page still looks right."""


def _measured(records: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    return [record for record in records if record.latency_ms is not None and record.accuracy is not None]


def _value(record: CandidateRecord) -> float:
    return record.accuracy.value if record.accuracy else 0.0
