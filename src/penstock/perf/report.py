"""The build report as one self-contained HTML page: all candidates with their measurements and verdicts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from penstock.bundle.evidence import Attempt, CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest
from penstock.errors import AlreadyExists
from penstock.perf.chart import Scale, attempts_chart, bar_chart, pareto_chart, throughput_chart
from penstock.storage.atomic import write_whole


class ServedRow(msgspec.Struct, frozen=True):
    """One row of the table that compares the original and the built model under load."""

    what: str
    original: str
    built: str
    ratio: str


def write_report(path: Path, manifest: Manifest, served: Sequence[ServedRow] = ()) -> None:
    """Write the report of ``manifest``'s build to ``path`` atomically. Raises AlreadyExists, ResourceExhausted."""
    check_report_target(path)
    write_whole(path, render(manifest, served).encode(), what="the report")


def check_report_target(path: Path) -> None:
    """Raise AlreadyExists if ``path`` is a file other than a build report."""
    if not path.exists() or path.is_dir():
        return  # a folder fails later, with a more precise error
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            if _GENERATOR.encode() in file.read(_HEAD_BYTES):
                return
    raise AlreadyExists(f"'{path}' exists and is not a Penstock build report", "choose another name for the report")


def render(manifest: Manifest, served: Sequence[ServedRow] = ()) -> str:
    """The report's page as HTML text."""
    evidence = manifest.evidence
    body = [f"<h1>{escape(manifest.name)}</h1>", _machine(manifest)]
    if evidence is None:
        body.append("<p>This bundle has no evidence.</p>")
    else:
        body += [_verdict(manifest, evidence), *_served(served)]
        body += ["<h2>Accuracy and latency of every candidate</h2>", _LEGEND, pareto_chart(evidence)]
        body += [_candidates(evidence), *_attempts(evidence)]
        profiles = {
            evidence.baseline.name: evidence.baseline_latency,
            manifest.serving.variant: manifest.serving.latency,
        }
        if any(profiles.values()):
            body += ["<h2>Throughput by batch size, one instance</h2>", throughput_chart(profiles)]
        body += [_passes(evidence), _notes(evidence)]
    return page(f"{manifest.name}: build report", body)


def page(title: str, body: Sequence[str]) -> str:
    """An HTML page whose body is the concatenation of ``body``. ``check_report_target`` recognises such a page."""
    return _PAGE.format(generator=_GENERATOR, title=escape(title), body="\n".join(body))


def _verdict(manifest: Manifest, evidence: Evidence) -> str:
    chosen, serving = evidence.candidate(evidence.chosen), manifest.serving
    speed = chosen.speedup
    loss = chosen.accuracy.loss if chosen.accuracy else None
    facts = [
        ("chosen", escape(chosen.name)),
        ("speed", f"{speed.value:.2f}x ({speed.low:.2f} … {speed.high:.2f})" if speed else "the original's"),
        ("accuracy lost", f"{loss.value:+.2%} ({loss.low:+.2%} … {loss.high:+.2%})" if loss else "–"),
        ("size", f"{evidence.baseline.disk_bytes / 1024:.4g} → {chosen.disk_bytes / 1024:.4g} KiB"),
        ("served with", f"{serving.instances} × {serving.threads} thread(s), batches up to {serving.max_batch}"),
    ]
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    p99 = f", p99 of one call within {evidence.p99_ms:g} ms" if evidence.p99_ms else ""
    return (
        f"<dl>{cards}</dl><p>Contract: {escape(evidence.contract)}{p99}. "
        f"Timed on calls of {evidence.rows_per_call} row(s). Intervals are 95 %.</p>"
    )


def _served(rows: Sequence[ServedRow]) -> list[str]:
    if not rows:
        return []
    lines = "".join(
        f"<tr><td>{escape(row.what)}</td><td>{escape(row.original)}</td><td>{escape(row.built)}</td><td>{escape(row.ratio)}</td></tr>"
        for row in rows
    )
    head = "<tr><th></th><th>original</th><th>built</th><th>ratio</th></tr>"
    return ["<h2>Served over HTTP, measured in turn</h2>", f"<table>{head}{lines}</table>"]


def _candidates(evidence: Evidence) -> str:
    ranked = sorted(evidence.candidates, key=lambda record: record.latency_ms or float("inf"))
    rows = "".join(_row(record) for record in (evidence.baseline, *ranked))
    heads = ("candidate", "p50 ms", "p99 ms", "speed", "95 %", "accuracy", "loss", "error", "KiB", "verdict")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"


def _attempts(evidence: Evidence) -> list[str]:
    """The attempts of a compression plan, with charts of their gain and loss."""
    tried = [attempt for attempt in evidence.attempts if attempt.accuracy is not None and attempt.speedup is not None]
    if not evidence.attempts:
        return []
    heads = ("step", "after", "speed", "loss", "KiB", "seconds", "verdict")
    rows = "".join(_attempt(attempt) for attempt in evidence.attempts)
    table = f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
    by_size = any(attempt.stored_bytes for attempt in tried)
    bars = [
        (
            f"{attempt.parent} → {attempt.name}",
            attempt.stored_bytes / 1024 if by_size else attempt.speedup.value if attempt.speedup else 0.0,
            attempt.accuracy.loss.value if attempt.accuracy else 0.0,
        )
        for attempt in tried
    ]
    bought = Scale("KiB coded" if by_size else "times the original's speed", "{:.3g}")
    picture = bar_chart(bars, "Steps of the plan", bought, Scale("accuracy lost", "{:.2%}")) if bars else ""
    exact = evidence.optimized or evidence.baseline
    tree = attempts_chart(evidence.attempts, exact.disk_bytes if by_size else exact.size_bytes)
    return ["<h2>Compression steps</h2>", picture, tree, table]


def _attempt(attempt: Attempt) -> str:
    size_bytes = attempt.stored_bytes or attempt.size_bytes
    cells = (
        escape(attempt.name),
        escape(attempt.parent),
        f"{attempt.speedup.value:.2f}x" if attempt.speedup else "–",
        f"{attempt.accuracy.loss.value:+.2%}" if attempt.accuracy else "–",
        f"{size_bytes / 1024:.4g}" if size_bytes else "–",
        f"{attempt.seconds:.0f}",
        f"<b>{attempt.outcome}</b> {escape(attempt.reason)}",
    )
    return f'<tr class="{attempt.outcome}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _row(record: CandidateRecord) -> str:
    speed, accuracy = record.speedup, record.accuracy
    cells = (
        escape(record.name),
        f"{record.latency_ms:.4g}" if record.latency_ms is not None else "–",
        f"{record.p99_ms:.4g}" if record.p99_ms is not None else "–",
        f"{speed.value:.2f}x" if speed else "",
        f"{speed.low:.2f}–{speed.high:.2f}" if speed else "",
        accuracy.shown if accuracy else "–",
        f"{accuracy.loss.value:+.2%}" if accuracy else "",
        f"{accuracy.relative_error:.2g}" if accuracy else "",
        f"{record.disk_bytes / 1024:.4g}",
        f"<b>{record.status}</b> {escape(record.reason)}",
    )
    return f'<tr class="{record.status}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _passes(evidence: Evidence) -> str:
    report = evidence.optimization
    if not report:
        return ""
    changed = [entry for entry in report["passes"] if entry["status"] != "unchanged"]
    rows = "".join(
        f"<tr><td>{escape(entry['name'])}</td><td>{entry['status']}</td>"
        f"<td>{entry['nodes_before']} → {entry['nodes_after']}</td>"
        f"<td>{_error(entry['max_relative_error'])}</td><td>{escape(entry['reason'])}</td></tr>"
        for entry in changed
    )
    head = "<tr><th>pass</th><th></th><th>nodes</th><th>error</th><th></th></tr>"
    return (
        f"<h2>Graph: {report['nodes_before']} nodes, {report['nodes_after']} after the passes</h2>"
        f"<p>{_gain(evidence)}After every pass the outputs were compared with the original's.</p><table>{head}{rows}</table>"
    )


def _gain(evidence: Evidence) -> str:
    """The latency before and after the passes, in FP32 on the same engine and threads."""
    optimized = evidence.optimized
    if optimized is None:
        return ""
    return f"One FP32 call took {evidence.baseline.latency_ms:.4g} ms before and {optimized.latency_ms:.4g} ms after. "


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _notes(evidence: Evidence) -> str:
    conditions = evidence.conditions
    notes = [escape(note) for note in evidence.notes]
    quiet = (
        f"The machine was busy ({conditions.disturbance}), so the ratios are unreliable."
        if conditions.dirty
        else "The machine was quiet enough."
    )
    notes.append(
        f"{quiet} Load {conditions.load_before} before and {conditions.load_after} after, {conditions.steal_percent} % stolen."
    )
    notes += [f"{escape(what)} data: sha256 {digest[:16]}…" for what, digest in evidence.data.items()]
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{note}</li>" for note in notes) + "</ul>"


def _machine(manifest: Manifest) -> str:
    machine = manifest.machine
    tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.tools.items()))
    return f'<p class="dim">{escape(machine.cpu)}, {machine.cores} core(s), {escape(" ".join(machine.isa))} · {escape(tools)}</p>'


_LEGEND = (
    '<p class="dim"><span style="color:#2563eb">■ fp32</span> <span style="color:#d97706">■ bf16</span> '
    '<span style="color:#059669">■ int8</span> · circle: engine of the original, square: another engine · hollow: rejected · '
    "the line is the Pareto front · hover for the reason</p>"
)

_GENERATOR = '<meta name="generator" content="penstock">'
_HEAD_BYTES = 256
"""Number of bytes at a report's start that contain its ``generator`` tag."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{generator}<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}}
dl{{display:flex;flex-wrap:wrap;gap:1rem}} dl div{{border:1px solid #8884;border-radius:.5rem;padding:.5rem 1rem}}
dt{{opacity:.7;font-size:.85em}} dd{{margin:0;font-weight:600}}
table{{border-collapse:collapse;font-size:.85em;width:100%}}
td,th{{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #8883}}
td:first-child,td:last-child,th:first-child,th:last-child{{text-align:left}}
tr.chosen{{background:#05966922}} tr.rejected td,tr.failed td{{opacity:.65}} .dim{{opacity:.7}}
</style></head><body>
{body}
</body></html>
"""
