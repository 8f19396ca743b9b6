"""The table of a build's candidates in HTML: grouped by outcome, each with its reason, and sortable by a click on a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.bundle.titles import title, verdict
from penstock.perf.conclusion import is_too_slow, size_words

_GROUPS: tuple[tuple[str, Callable[[CandidateRecord], bool]], ...] = (
    ("Chosen", lambda one: one.status == "chosen"),
    ("The original", lambda one: one.status == "baseline"),
    ("Accurate enough, but not the best choice", lambda one: one.status == "outrun"),
    ("Rejected: less accurate than allowed", lambda one: one.status == "rejected" and not is_too_slow(one)),
    ("Rejected: slower than allowed", is_too_slow),
    ("Failed", lambda one: one.status == "failed"),
)
_HEADS = (("Candidate", 1), ("Speed", -1), ("One call", 1), ("Accuracy", -1), ("Size", 1))
"""The columns, each with the direction of the first sort: 1 for ascending."""

STYLE = """
.group th{text-align:left;color:var(--ink);background:var(--card);padding-top:.6rem}
.candidates small{display:block} .candidates td+td{white-space:nowrap} .candidates tr.chosen td{font-weight:600}
.candidates tr.chosen small{font-weight:400}
th button{all:unset;cursor:pointer;color:var(--link)} th button:focus-visible{outline:2px solid var(--link)}
th[aria-sort=ascending] button::after{content:" ▲"} th[aria-sort=descending] button::after{content:" ▼"}
@media screen and (max-width:40rem){.candidates,.candidates tbody,.candidates tr,.candidates td{display:block}
.candidates thead tr{display:flex;flex-wrap:wrap;gap:.2rem 1rem} .candidates thead th,.candidates .group th{display:block;border:0}
.candidates thead th{padding:.35rem 0}
.candidates tr{border-bottom:1px solid var(--line);padding:.3rem 0} .candidates td{border:0;text-align:left;padding:.1rem .5rem}
.candidates td+td{display:grid;grid-template-columns:5.5rem 1fr;white-space:normal}
.candidates td+td::before{content:attr(data-head);color:var(--dim)}}
@media print{.candidates{font-size:9pt} .candidates small{font-size:8pt} .group{break-after:avoid}}
"""
"""Style of the table. On a small screen, each candidate is a block of lines."""

SCRIPT = """
for (const table of document.querySelectorAll("table.candidates")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.key;
  const compare = (one, other, way) => {
    if (one === "" || other === "") return (one === "") - (other === "");
    return way * (isNaN(one) || isNaN(other) ? one.localeCompare(other) : one - other);
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const way = before ? (before === "ascending" ? -1 : 1) : Number(head.dataset.way);
      for (const each of heads) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      for (const body of table.tBodies) {
        const rows = [...body.rows].slice(1);
        rows.sort((one, other) => compare(value(one, column), value(other, column), way));
        body.append(...rows);
      }
    });
  });
}
"""
"""Turns the heads of the table into buttons that sort the rows of each group. Without it, the table is complete but not sortable."""


def groups(evidence: Evidence) -> list[tuple[str, list[CandidateRecord]]]:
    """All candidates and originals by outcome, the fastest of each group first. Groups without candidates are left out."""
    records = (evidence.baseline, *evidence.candidates)
    ranked = sorted(records, key=lambda one: math.inf if one.latency_ms is None else one.latency_ms)
    found = [(name, [one for one in ranked if belongs(one)]) for name, belongs in _GROUPS]
    return [(name, members) for name, members in found if members]


def candidate_table(evidence: Evidence) -> str:
    """The table of all candidates."""
    heads = "".join(f'<th scope="col" data-way="{way}">{name}</th>' for name, way in _HEADS)
    bodies = "".join(_body(name, members, evidence) for name, members in groups(evidence))
    return f'<table class="candidates"><thead><tr>{heads}</tr></thead>{bodies}</table>'


def _body(name: str, members: Sequence[CandidateRecord], evidence: Evidence) -> str:
    head = f'<tr class="group"><th colspan="{len(_HEADS)}" scope="rowgroup">{name} ({len(members)})</th></tr>'
    return f"<tbody>{head}{''.join(_row(one, evidence) for one in members)}</tbody>"


def _row(record: CandidateRecord, evidence: Evidence) -> str:
    speed, accuracy, latency = record.speedup, record.accuracy, record.latency_ms
    busy = busy_mark(evidence.disturbance(record))
    what = f"{escape(title(record))}<small>{escape(verdict(record))}</small><small><code>{escape(record.name)}</code></small>"
    pace = f"{speed.value:.2f}×<small>{speed.low:.2f} to {speed.high:.2f}</small>{busy}" if speed else "–"
    p99 = f"<small>p99 {record.p99_ms:.3g} ms</small>" if record.p99_ms is not None else ""
    time = f"{latency:.3g} ms{p99}{'' if speed else busy}" if latency is not None else "–"
    quality = accuracy.shown if accuracy else "–"
    if accuracy is not None and record.speedup is not None:
        loss, error = accuracy.loss, accuracy.relative_error
        quality += f"<small>loss {loss.value:+.2%}</small><small>{loss.low:+.2%} to {loss.high:+.2%}</small>"
        quality += f"<small>output error {error:.2g}</small>"
    cells = (
        (title(record), what),
        (speed.value if speed else None, pace),
        (latency, time),
        (accuracy.level if accuracy else None, quality),
        (record.disk_bytes or None, size_words(record.disk_bytes) if record.disk_bytes else "–"),
    )
    row = "".join(_cell(head, key, shown) for (head, _), (key, shown) in zip(_HEADS, cells, strict=True))
    return f'<tr class="{escape(record.status)}">{row}</tr>'


def _cell(head: str, key: str | float | None, shown: str) -> str:
    """A cell, and the value by which it is sorted. Cells without a value come last."""
    return f'<td data-head="{head}" data-key="{escape("" if key is None else str(key))}"><span>{shown}</span></td>'


def busy_mark(disturbance: str) -> str:
    """A visible mark for a figure that was measured on a busy machine; empty if ``disturbance`` is empty."""
    return f'<span class="busy" title="{escape(disturbance)}">machine busy</span>' if disturbance else ""
