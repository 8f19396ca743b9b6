"""``penstock sensitivity``."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.markup import escape as plain

from penstock.cli import method as shared
from penstock.cli import outcome
from penstock.cli.inspect import make_console
from penstock.cli.quantities import parse_seconds
from penstock.cli.quantize import check_float, prepare
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.sensitivity import (
    Sensitivity,
    SensitivityOptions,
    SensitivityReport,
    measure_sensitivity,
    sensitivity_chart,
)
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.scheme import integer_scheme
from penstock.offline.judge.judge import Judge
from penstock.perf.report import check_report_target, page
from penstock.resources import machine_facts
from penstock.storage.atomic import write_whole

_TITLES = ("group", "operators", "part", "±", "alone", "won back", "divergence", "ms saved", "SQNR, dB")
_NAME = 44
"""Letters of a name that fit into the table; the report has all."""


def sensitivity(
    model: shared.Model,
    calibrate: shared.Calibrate = None,
    evaluate: shared.Evaluate = None,
    placement: Annotated[Literal["linear", "wide"], typer.Option(help="What becomes int8.")] = "linear",
    method: Annotated[
        Literal["min-max", "percentile", "mse", "entropy"], typer.Option(help="How ranges are found.")
    ] = "mse",
    no_equalize: Annotated[
        bool, typer.Option("--no-equalize", help="Leave channels of unlike ranges as they are.")
    ] = False,
    budget: Annotated[str, typer.Option(help="Time to spend on latencies; 0s for none.")] = "20s",
    report: Annotated[Path | None, typer.Option(help="Also write table and picture here, an HTML file.")] = None,
    chart: shared.Chart = None,
    threads: shared.Threads = 1,
    json: shared.Json = False,
) -> None:
    """Rank the groups of operators of an INT8 model by the accuracy that they cost, with the time that each saves.

    Writes no model: penstock quantize --mixed acts on such a ranking. Without --evaluate a fifth of the calibration data is
    held out. `part` is a group's part in the accuracy lost, with half its 95% interval; `alone`: lost with only it in INT8; `won
    back`: regained with only it float; `ms saved`: by its integers, of one call. Large in `part` and small in `ms saved` is
    what should stay float.

    [bold]Examples[/bold]

      penstock sensitivity model.onnx --calibrate train.npz --evaluate test.npz

      penstock sensitivity model.onnx --calibrate train.npz --placement wide --report sensitivity.html
    """
    options = SensitivityOptions(budget_s=parse_seconds(budget))
    if report is not None:
        check_report_target(report)
    job = shared.Job(model, None, fitted=calibrate, evaluate=evaluate, writes=[report], chart=chart, threads=threads)
    check_float(job)
    with job:
        data = job.data("--calibrate", "INT8")
        prepared = prepare(job, data, not no_equalize)
        fitted, held = (data, job.evaluation) if job.evaluation else data.split(0.2, job.signature.smallest_batch)
        statistics = collect(prepared, fitted.inputs)
        scheme = integer_scheme(machine_facts())
        mixed = MixedModel(prepared, statistics, scheme, QdqPlacement(placement), RangeMethod(method))
        trials = Trials(mixed, Judge(job.original, held, threads))
        found = measure_sensitivity(trials, options, job.stage("rank"))
    if chart is not None:
        write_whole(chart, sensitivity_chart(found).encode())
    if report is not None:
        write_whole(report, _page(model.name, found, options).encode())
    if json:
        written = {"report": str(report) if report else None, "chart": str(chart) if chart else None}
        shared.print_json({"command": "sensitivity", **msgspec.to_builtins(found), **written})
        return
    console = make_console()
    console.print(plain(_summary(found)), soft_wrap=True)
    table = outcome.make_table(*_TITLES)
    for one in found.groups:
        name, *cells = _cells(one)
        short = name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
        table.add_row(*map(plain, (short, *cells)))
    console.print(table)
    for note in _notes(found, options):
        console.print(f"[yellow]note[/yellow]    {plain(note)}")
    for path in filter(None, (report, chart)):
        console.print(f"written  {path}", markup=False)


def _summary(found: SensitivityReport) -> str:
    loss = found.int8.loss
    timed = f"; {found.int8_ms:.3f} ms a call of {found.rows} row(s)" if found.int8_ms else ""
    return (
        f"INT8 everywhere: {found.metric} {found.int8.value:.2%} of {found.original.value:.2%}, loss {loss.value:+.2%} "
        f"(95 %: {loss.low:+.2%} … {loss.high:+.2%}; {found.samples} samples), {found.proxy} {found.divergence:.3g}{timed}"
    )


def _notes(found: SensitivityReport, options: SensitivityOptions) -> list[str]:
    notes = [f"{name} saves no time in integers" for name in found.unpaying]
    if found.int8.loss.low <= 0:
        notes.append("the loss cannot be told from none on these samples: the order rests on the divergence")
    if found.untimed and options.budget_s:
        notes.append(f"{len(found.untimed)} groups were not timed: give a larger --budget")
    return notes


def _cells(one: Sensitivity) -> list[str]:
    noise, part = one.activation, one.rank.part
    return [
        one.group.name,
        " ".join(dict.fromkeys(one.group.operators)),
        f"{part.value:+.2%}",
        f"{(part.high - part.low) / 2:.2%}",
        f"{one.rank.alone.value:+.2%}" if one.rank.alone else "–",
        f"{one.rank.recovered.value:+.2%}",
        f"{one.rank.divergence.value:.3g}",
        f"{one.saving_ms.value:+.4f}" if one.saving_ms else "–",
        f"{noise.sqnr_db:.1f}" if noise else "–",
    ]


def _page(name: str, found: SensitivityReport, options: SensitivityOptions) -> str:
    def row(tag: str, cells: Any) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = "".join(row("td", _cells(one)) for one in found.groups)
    body = [f"<h1>Sensitivity of {escape(name)}</h1>", f"<p>{escape(_summary(found))}</p>", sensitivity_chart(found)]
    body += [
        f"<table>{row('th', _TITLES)}{lines}</table>",
        *(f"<p>{escape(note)}</p>" for note in _notes(found, options)),
    ]
    return page(f"Sensitivity of {name}", body)
