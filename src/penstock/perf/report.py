"""The build report as one self-contained HTML page: the conclusion, pictures, and all candidates with their reasons."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec

from penstock.bundle.evidence import Attempt, Evidence
from penstock.bundle.manifest import Manifest
from penstock.bundle.titles import steps_title
from penstock.errors import AlreadyExists
from penstock.measurement import LatencyPoint, times
from penstock.perf import candidate_table, chart
from penstock.perf.candidate_table import busy_mark
from penstock.perf.conclusion import conclude, headline, metric_words, size_words
from penstock.storage.atomic import write_whole
from penstock.web_page import GENERATOR, HEAD_BYTES, document

_CODE = re.compile(r"`([^`]+)`")

_STYLE = """
.headline{font-size:1.7rem;line-height:1.25;font-weight:700;text-wrap:balance;margin:.2rem 0 .8rem}
.conclusion span{display:block;margin:.35rem 0}
figure{margin:.5rem 0;overflow-x:auto} figure svg{display:block;width:100%;min-width:34rem} .small svg{min-width:0}
.small{display:none} body>table:not(.candidates){display:block;overflow-x:auto}
.fp32{color:#2563eb}.bf16{color:#d97706}.int8{color:#059669}
.pairs{display:grid;grid-template-columns:repeat(auto-fit,minmax(19rem,1fr));gap:.2rem 2rem}
.bar{display:grid;grid-template-columns:4.5rem 1fr 7rem;gap:.6rem;align-items:center;font-size:.9rem}
.bar b{text-align:right;font-weight:600} .bar:first-of-type rect{fill:#64748b} .bar rect{fill:#059669}
@media screen and (max-width:40rem){.large{display:none} .small{display:block} .headline{font-size:1.35rem}
.pairs{grid-template-columns:1fr}}
@media print{.fp32,.bf16,.int8,.bar,.busy{print-color-adjust:exact}}
"""


class ServedRow(msgspec.Struct, frozen=True):
    """One row of the table that compares the original and the built model under load."""

    what: str
    original: str
    built: str
    ratio: str


def write_report(path: Path, manifest: Manifest, served: Sequence[ServedRow] = (), bundle: str = "") -> None:
    """Write the report of ``manifest``'s build to ``path`` atomically. ``bundle`` is the bundle's file name, for a command.

    Raises AlreadyExists, ResourceExhausted.
    """
    check_report_target(path)
    write_whole(path, render(manifest, served, bundle).encode(), what="the report")


def check_report_target(path: Path) -> None:
    """Raise AlreadyExists if ``path`` is a file other than a build report."""
    if not path.exists() or path.is_dir():
        return  # a folder fails later, with a more precise error
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            if GENERATOR.encode() in file.read(HEAD_BYTES):
                return
    raise AlreadyExists(f"'{path}' exists and is not a Penstock build report", "choose another name for the report")


def render(manifest: Manifest, served: Sequence[ServedRow] = (), bundle: str = "") -> str:
    """The report's page as HTML text."""
    evidence = manifest.evidence
    body = [f"<h1>{escape(manifest.name)}: build report</h1>"]
    if evidence is None:
        body.append("<p>This bundle has no evidence, because it was packed without a build.</p>")
    else:
        body += [
            f'<p class="headline">{escape(headline(evidence))} {_busy(evidence)}</p>',
            f'<p class="conclusion">{"".join(_part(*part) for part in conclude(manifest, evidence, bundle))}</p>',
            *_before_and_after(manifest, evidence),
            *_by_size(evidence),
            *_served(served),
            *_accuracy_by_latency(evidence),
            *_throughput(manifest, evidence),
            "<h2>Every candidate</h2>",
            candidate_table.candidate_table(evidence),
            *_attempts(evidence),
            *_passes(evidence),
            *_method(manifest, evidence),
        ]
    return page(f"{manifest.name}: build report", [*body, _machine(manifest)])


def page(title: str, body: Sequence[str]) -> str:
    """An HTML page whose body is the concatenation of ``body``. ``check_report_target`` recognises such a page."""
    styles = (_STYLE, candidate_table.STYLE, chart.STYLE)
    return document(title, body, styles, candidate_table.SCRIPT)


def _part(label: str, text: str) -> str:
    return f"<span><b>{escape(label)}.</b> {_prose(text)}</span> "


def _prose(text: str) -> str:
    """``text`` as HTML, with code between backticks, and without line breaks before a per cent sign."""
    parts = enumerate(_CODE.split(escape(text)))
    return "".join(
        f"<code>{part}</code>" if number % 2 else part.replace(" %", "\N{NO-BREAK SPACE}%") for number, part in parts
    )


def _figure(draw: Callable[[int], str]) -> str:
    """A picture in two widths, of which the style shows the one that fits the screen."""
    large, small = draw(chart.WIDTH), draw(chart.NARROW)
    return f'<figure class="large">{large}</figure><figure class="small">{small}</figure>' if large else ""


def _before_and_after(manifest: Manifest, evidence: Evidence) -> list[str]:
    before, after = evidence.baseline, evidence.candidate(evidence.chosen)
    if before.name == after.name:
        return []
    busy = _busy(evidence)
    slow, fast = _most_rows(evidence.baseline_latency), _most_rows(manifest.serving.latency)
    pairs = [
        _pair("One call, median", before.latency_ms, after.latency_ms, "{:.3g} ms".format, busy),
        _pair("One call, 99th percentile", before.p99_ms, after.p99_ms, "{:.3g} ms".format, busy),
        _pair("Most rows per second, one instance", slow, fast, "{:,.0f}".format, busy),
    ]
    if before.accuracy is not None and after.accuracy is not None:
        name, show = metric_words(after.accuracy.metric), after.accuracy.show
        pairs.append(_pair(name[:1].upper() + name[1:], before.accuracy.value, after.accuracy.value, show))
    pairs.append(_pair("Size of the model", before.disk_bytes, after.disk_bytes, lambda size: size_words(int(size))))
    return ["<h2>Before and after</h2>", f'<div class="pairs">{"".join(pairs)}</div>']


def _by_size(evidence: Evidence) -> list[str]:
    """The latencies at each size of the samples, if there are several."""
    if not evidence.by_size:
        return []
    pairs = "".join(
        _pair(
            f"{gain.title}: {gain.share:.0%} of the samples, {times(gain.speedup)}",
            gain.original_ms,
            gain.chosen_ms,
            "{:.3g} ms".format,
            _busy(evidence),
        )
        for gain in evidence.by_size
    )
    note = '<p class="dim">All other latencies are means over these sizes, weighted by their samples. Each pair has its own scale.</p>'
    return ["<h2>Gain by size of a call</h2>", note, f'<div class="pairs">{pairs}</div>']


def _busy(evidence: Evidence) -> str:
    """The mark beside the times of the chosen candidate, which were measured in turns with those of the original."""
    return busy_mark(evidence.disturbance(evidence.candidate(evidence.chosen)))


def _most_rows(points: Sequence[LatencyPoint]) -> float | None:
    """The highest throughput of a profile, in rows per second; None if the profile is empty."""
    return max((point.batch / point.p50_ms * 1e3 for point in points), default=None)


def _pair(what: str, before: float | None, after: float | None, show: Callable[[float], str], mark: str = "") -> str:
    """Two bars on one scale; empty if a value is missing."""
    if before is None or after is None:
        return ""
    longest = max(abs(before), abs(after)) or 1.0
    bars = "".join(
        f'<div class="bar"><span>{name}</span><svg width="100%" height="14" aria-hidden="true">'
        f'<rect width="{100 * abs(value) / longest:.1f}%" height="14" rx="2"/></svg><b>{escape(show(value))}</b></div>'
        for name, value in (("original", before), ("chosen", after))
    )
    return f"<section><h3>{escape(what)} {mark}</h3>{bars}</section>"


def _served(rows: Sequence[ServedRow]) -> list[str]:
    if not rows:
        return []
    cells = [(row.what, row.original, row.built, row.ratio) for row in rows]
    return ["<h2>Served over HTTP, measured in turn</h2>", _table(("", "original", "built", "ratio"), cells)]


def _accuracy_by_latency(evidence: Evidence) -> list[str]:
    picture = _figure(lambda width: chart.pareto_chart(evidence, width))
    busy = busy_mark(evidence.conditions.disturbance)
    return [f"<h2>Accuracy by latency {busy}</h2>", _LEGEND, picture]


def _throughput(manifest: Manifest, evidence: Evidence) -> list[str]:
    is_kept = evidence.chosen == evidence.baseline.name
    profiles = {"original": evidence.baseline_latency} | ({} if is_kept else {"chosen": manifest.serving.latency})
    if not any(profiles.values()):
        return []
    busy = busy_mark(evidence.conditions.disturbance)
    picture = _figure(lambda width: chart.throughput_chart(profiles, width))
    return [f"<h2>Throughput by batch size, one instance {busy}</h2>", picture]


def _attempts(evidence: Evidence) -> list[str]:
    """The attempts of a compression plan, with a chart of their sizes and accuracies."""
    if not evidence.attempts:
        return []
    is_coded = any(attempt.stored_bytes for attempt in evidence.attempts)
    original = evidence.optimized or evidence.baseline
    size = original.disk_bytes if is_coded else original.size_bytes
    picture = _figure(lambda width: chart.attempts_chart(evidence.attempts, size, width))
    heads = ("step", "after", "speed", "loss", "KiB", "seconds", "result")
    return ["<h2>Compression steps</h2>", picture, _table(heads, map(_attempt, evidence.attempts))]


def _attempt(attempt: Attempt) -> tuple[str, ...]:
    size_bytes = attempt.stored_bytes or attempt.size_bytes
    return (
        steps_title(attempt.name),
        steps_title(attempt.parent),
        f"{attempt.speedup.value:.2f}×" if attempt.speedup else "–",
        f"{attempt.accuracy.loss.value:+.2%}" if attempt.accuracy else "–",
        f"{size_bytes / 1024:.4g}" if size_bytes else "–",
        f"{attempt.seconds:.0f}",
        f"{attempt.outcome}: {attempt.reason}",
    )


def _passes(evidence: Evidence) -> list[str]:
    report = evidence.optimization
    if not report:
        return []
    changed = [
        (
            entry["name"],
            entry["status"],
            f"{entry['nodes_before']} → {entry['nodes_after']}",
            "–" if entry["max_relative_error"] is None else f"{entry['max_relative_error']:.1e}",
            entry["reason"],
        )
        for entry in report["passes"]
        if entry["status"] != "unchanged"
    ]
    gain, optimized = "", evidence.optimized
    if optimized is not None and optimized.latency_ms and evidence.baseline.latency_ms:
        took = f"{evidence.baseline.latency_ms:.3g} ms before and {optimized.latency_ms:.3g} ms after"
        gain = f"One FP32 call took {took}. {busy_mark(evidence.disturbance(optimized))} "
    return [
        f"<h2>Graph: {report['nodes_before']} nodes, {report['nodes_after']} after the passes</h2>",
        f"<p>{gain}After every pass, the outputs were compared with the original's.</p>",
        _table(("pass", "result", "nodes", "error", "reason"), changed),
    ]


def _method(manifest: Manifest, evidence: Evidence) -> Iterator[str]:
    """How the figures were measured, and the notes of the build."""
    conditions, serving = evidence.conditions, manifest.serving
    p99 = f", and p99 of one call within {evidence.p99_ms:g} ms" if evidence.p99_ms else ""
    state = f"The machine was busy ({conditions.disturbance})." if conditions.dirty else "The machine was quiet enough."
    instances = f"{serving.instances} instance(s) × {serving.threads} thread(s)"
    rows = f"{evidence.rows_per_call} row{'s' if evidence.rows_per_call != 1 else ''}"
    notes = [
        f"Contract: {evidence.contract}{p99}.",
        f"A call has {rows}. Each candidate was timed in turns with the original, with as many threads. Intervals are 95 %.",
        f"{state} Load {conditions.load_before:g} before and {conditions.load_after:g} after, {conditions.steal_percent:g} % stolen.",
        f"The bundle is served with {instances}, batches up to {serving.max_batch}.",
        *evidence.notes,
        *(f"{what} data: sha256 {digest[:16]}…" for what, digest in evidence.data.items()),
    ]
    yield "<h2>Method and notes</h2>"
    yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _table(heads: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    """A table of texts."""
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _machine(manifest: Manifest) -> str:
    machine = manifest.machine
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    return f'<p class="dim">{escape(machine.cpu)}, {machine.cores} core(s), {escape(" ".join(machine.isa))} · {escape(tools)}</p>'


_LEGEND = (
    '<p class="dim">Left is faster, up is more accurate. Colour: <span class="fp32">■</span> FP32, <span class="bf16">■</span> BF16, '
    '<span class="int8">■</span> INT8. Shape: ● engine of the original, ■ another engine. Hollow: rejected. The grey line connects '
    "the best candidates; the dashed line is the lowest accuracy that the contract allows.</p>"
)
