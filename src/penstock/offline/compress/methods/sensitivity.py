"""``sensitivity``: the cost of INT8 in each group of operators."""

from __future__ import annotations

from html import escape
from typing import Annotated, ClassVar, Literal

import msgspec

from penstock.artifact import Artifact
from penstock.offline.compress.method import Made, Method, StepContext
from penstock.offline.compress.options import NotNegative, Usage
from penstock.offline.compress.precision.groups import MixedModel
from penstock.offline.compress.precision.sensitivity import (
    GroupSensitivity,
    SensitivityOptions,
    SensitivityReport,
    measure_sensitivity,
    sensitivity_chart,
)
from penstock.offline.compress.precision.trials import Trials
from penstock.offline.compress.ptq.calibrate import collect
from penstock.offline.compress.ptq.qdq_placement import QdqPlacement
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.ptq.recipe import check_float, prepared
from penstock.offline.judge.judge import Judge
from penstock.perf.report import page

_TITLES = ("group", "operators", "part", "±", "alone", "won back", "divergence", "ms saved", "SQNR, dB")


class SensitivityMethod(Method, frozen=True, kw_only=True):
    """Rank groups of operators by their loss of accuracy in INT8, and show the time that INT8 saves in each group.

    The command writes no model; to apply the ranking, use penstock quantize --mixed. Without --evaluate, a fifth of the calibration
    data is held out. In the table, `part` is the loss that the group causes, and `±` is half the width of its 95% interval. `alone` is
    the loss with only this group in INT8. `won back` is the gain with only this group in float. `ms saved` is the time that INT8 saves
    in one call. A group with a large `part` and a small `ms saved` should stay in float.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "penstock sensitivity model.onnx --calibrate train.npz --evaluate test.npz",
        "penstock sensitivity model.onnx --calibrate train.npz --placement wide --report sensitivity.html",
    )
    data_options: ClassVar[tuple[str, ...]] = ("--calibrate",)
    writes_model: ClassVar[bool] = False

    placement: Literal["linear", "wide"] = "linear"
    """Operators to quantise: linear or wide."""
    method: Literal["min-max", "percentile", "mse", "entropy"] = "mse"
    """Calibration method."""
    equalize: bool = True
    """Equalise the ranges of channels first."""
    budget_s: Annotated[NotNegative, Usage("seconds")] = 20.0
    """Time limit for measuring latencies; 0s skips the measurement."""
    report: Annotated[str | None, Usage("file", writes="report")] = None
    """Also write the table and a chart to this HTML file."""
    chart: Annotated[str | None, Usage("file", writes="picture")] = None
    """Also write a chart to this SVG file."""

    def reason_for_data(self) -> str:
        return "INT8"

    def examine(self, model: Artifact) -> None:
        check_float(model)

    def run(self, model: Artifact, context: StepContext) -> Made:
        options = SensitivityOptions(budget_s=self.budget_s)
        start = prepared(model, context, self.equalize)
        if context.evaluation is not None:
            judge = Judge(context.original, context.evaluation, self.threads, contract=self.contract)
            fitted = context.data
        else:
            fitted, judge = context.held_out(self.threads, self.contract)
        statistics = collect(start, fitted)
        placement, method = QdqPlacement(self.placement), RangeMethod(self.method)
        trials = Trials(MixedModel(start, statistics, context.scheme, placement, method), judge)
        found = measure_sensitivity(trials, options, context.stage("rank"))
        files = {self.chart: sensitivity_chart(found).encode()} if self.chart else {}
        if self.report:
            name = context.original.path.name if context.original.path else "the model"
            files[self.report] = _page(name, found, options).encode()
        return Made(
            None,
            facts={**msgspec.to_builtins(found), "report": self.report, "chart": self.chart},
            notes=tuple(_notes(found, options)),
            files=files,
            heading=_summary(found),
            table=(_TITLES, *map(_cells, found.groups)),
        )


def _summary(found: SensitivityReport) -> str:
    loss = found.int8.loss
    timed = f"; {found.int8_ms:.3f} ms a call of {found.rows} row(s)" if found.int8_ms else ""
    return (
        f"INT8 everywhere: {found.metric} {found.int8.shown} of {found.original.shown}, loss {loss.value:+.2%} "
        f"(95 %: {loss.low:+.2%} … {loss.high:+.2%}; {found.samples} samples), {found.proxy} {found.divergence:.3g}{timed}"
    )


def _notes(found: SensitivityReport, options: SensitivityOptions) -> list[str]:
    notes = [f"{name} saves no time in INT8" for name in found.unpaying]
    if found.int8.loss.low <= 0:
        notes.append("the loss is not significant on these samples, so the divergence determines the order")
    if found.untimed and options.budget_s:
        notes.append(f"{len(found.untimed)} groups were not timed: give a larger --budget")
    return notes


def _cells(one: GroupSensitivity) -> tuple[str, ...]:
    noise, part = one.activation, one.rank.part
    return (
        one.group.name,
        " ".join(dict.fromkeys(one.group.operators)),
        f"{part.value:+.2%}",
        f"{(part.high - part.low) / 2:.2%}",
        f"{one.rank.alone.value:+.2%}" if one.rank.alone else "–",
        f"{one.rank.recovered.value:+.2%}",
        f"{one.rank.divergence.value:.3g}",
        f"{one.saving_ms.value:+.4f}" if one.saving_ms else "–",
        f"{noise.sqnr_db:.1f}" if noise else "–",
    )


def _page(name: str, found: SensitivityReport, options: SensitivityOptions) -> str:
    def row(tag: str, cells: tuple[str, ...]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    title = f"Sensitivity of {name}"
    lines = "".join(row("td", _cells(one)) for one in found.groups)
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_summary(found))}</p>", sensitivity_chart(found)]
    body.append(f"<table>{row('th', _TITLES)}{lines}</table>")
    return page(title, [*body, *(f"<p>{escape(note)}</p>" for note in _notes(found, options))])
