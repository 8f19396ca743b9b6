"""The timeline of a run: when each step ran, on which thread, for which items. Exported as a Chrome trace, an SVG or text."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence

import msgspec

_WIDTH, _ROW, _LABEL = 1000, 18, 140
_COLOURS = (
    "#4878d0",
    "#ee854a",
    "#6acc64",
    "#d65f5f",
    "#956cb4",
    "#8c613c",
    "#dc7ec0",
    "#797979",
    "#d5bb67",
    "#82c6e2",
)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Span(msgspec.Struct, frozen=True):
    """One call of a step, for one item or a batch of items. Times are ``time.perf_counter_ns``."""

    step: str
    items: tuple[int, ...]
    lane: str
    """Name of the thread, or of the process or server that ran the step."""
    start_ns: int
    end_ns: int


class Timeline:
    """Collects spans. ``add`` may be called from any thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, step: str, items: Iterable[int], lane: str, start_ns: int, end_ns: int | None = None) -> None:
        """Record a call. ``end_ns`` defaults to now."""
        end_ns = time.perf_counter_ns() if end_ns is None else end_ns
        self.spans.append(Span(step, tuple(items), lane, start_ns, end_ns))

    @property
    def steps(self) -> list[str]:
        """Names of the steps, in the order in which they first started."""
        return list(dict.fromkeys(span.step for span in self._sorted()))

    @property
    def wall_ns(self) -> int:
        """Time from the first start to the last end."""
        return max((one.end_ns for one in self.spans), default=0) - min((one.start_ns for one in self.spans), default=0)

    def busy_ns(self) -> dict[str, int]:
        """Total time of each step."""
        totals = dict.fromkeys(self.steps, 0)
        for span in self.spans:
            totals[span.step] += span.end_ns - span.start_ns
        return totals

    def chrome_trace(self) -> bytes:
        """JSON for ``chrome://tracing`` and Perfetto: one row for each thread, and the items and batch size of each call."""
        lanes = self.lanes
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}}
            for number, lane in enumerate(lanes)
        ]
        for span in self._sorted():
            start_us, length_us = span.start_ns / 1e3, (span.end_ns - span.start_ns) / 1e3
            more = {"items": span.items, "batch": len(span.items)}
            place = {"pid": 1, "tid": lanes.index(span.lane), "ts": start_us, "dur": length_us}
            events.append({"name": span.step, "ph": "X", **place, "args": more})
        return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})

    def _sorted(self) -> list[Span]:
        return sorted(self.spans, key=lambda span: span.start_ns)

    @property
    def lanes(self) -> list[str]:
        return sorted({span.lane for span in self.spans})


def text_chart(timeline: Timeline, width: int = 72) -> str:
    """The timeline as lines of text: a row of letters for each thread, one letter a step, ``.`` while the thread is idle."""
    if not timeline.spans:
        return "no step has run"
    letters = {step: _LETTERS[number % len(_LETTERS)] for number, step in enumerate(timeline.steps)}
    begin, wall_ns = min(span.start_ns for span in timeline.spans), max(1, timeline.wall_ns)
    lanes = timeline.lanes
    label = max(map(len, lanes))
    lines = []
    for lane in lanes:
        columns = _columns([span for span in timeline.spans if span.lane == lane], begin, wall_ns / width, width)
        lines.append(f"{lane:<{label}} |{''.join('.' if step is None else letters[step] for step in columns)}|")
    for step, busy_ns in timeline.busy_ns().items():
        lines.append(
            f"{letters[step]} {step}: {busy_ns / 1e6:.1f} ms, {100 * busy_ns / wall_ns:.0f} % of {wall_ns / 1e6:.1f} ms"
        )
    return "\n".join(lines)


def _columns(spans: Sequence[Span], begin: int, column_ns: float, width: int) -> list[str | None]:
    """For each column, the step that was busy for most of it; None if the thread was idle for most of it."""
    busy: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        first, last = (span.start_ns - begin) / column_ns, (span.end_ns - begin) / column_ns
        for column in range(int(first), min(width, int(last) + 1)):
            share = min(last, column + 1) - max(first, column)
            busy[column][span.step] = busy[column].get(span.step, 0.0) + share
    found: list[str | None] = []
    for shares in busy:
        step = max(shares, key=shares.__getitem__, default=None)
        found.append(step if sum(shares.values()) >= 0.5 else None)
    return found


def svg_chart(charts: Sequence[tuple[str, Timeline]]) -> str:
    """Timelines below each other in one SVG, on one scale of time, such as before and after. Each has a title."""
    longest_ns = max((timeline.wall_ns for _, timeline in charts), default=0) or 1
    steps = list(dict.fromkeys(step for _, timeline in charts for step in timeline.steps))
    colours = {step: _COLOURS[number % len(_COLOURS)] for number, step in enumerate(steps)}
    parts, top = [], 0
    for title, timeline in charts:
        shown = f"{html.escape(title)}: {timeline.wall_ns / 1e6:.1f} ms"
        parts.append(f'<text x="4" y="{top + 14}" font-weight="bold">{shown}</text>')
        top += _ROW + 4
        begin = min((span.start_ns for span in timeline.spans), default=0)
        for row, lane in enumerate(timeline.lanes):
            parts.append(f'<text x="4" y="{top + row * _ROW + 13}">{html.escape(lane)}</text>')
        rows = {lane: row for row, lane in enumerate(timeline.lanes)}
        for span in timeline.spans:
            left = _LABEL + (span.start_ns - begin) * _WIDTH / longest_ns
            width = max(0.3, (span.end_ns - span.start_ns) * _WIDTH / longest_ns)
            y, colour = top + rows[span.lane] * _ROW + 1, colours[span.step]
            told = html.escape(f"{span.step}, {len(span.items)} items, {(span.end_ns - span.start_ns) / 1e6:.2f} ms")
            box = f'x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 2}" fill="{colour}"'
            parts.append(f"<rect {box}><title>{told}</title></rect>")
        top += len(rows) * _ROW + 12
    for number, step in enumerate(steps):
        y = top + number * _ROW
        parts.append(f'<rect x="4" y="{y}" width="12" height="12" fill="{colours[step]}"/>')
        parts.append(f'<text x="22" y="{y + 11}">{html.escape(step)}</text>')
    size = f'width="{_LABEL + _WIDTH + 10}" height="{top + len(steps) * _ROW + 6}"'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'
