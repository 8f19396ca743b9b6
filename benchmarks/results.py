"""Rows of results, result files, and the report ``RESULTS.md``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.measurement import Interval

RESULTS = Path(__file__).parent / "results"
REPORT = Path(__file__).parent / "RESULTS.md"

Operator = Literal[">=", "<="]

_LONGEST_NOTE = 300

_HEADING = """# Benchmark results

Made by `make bench` from the files in `results/`; do not edit. What is compared is measured interleaved, in one run, on one
machine, so that a ratio says something where a time alone would not. Brackets hold 95 % confidence intervals. A goal holds if
the worse end of its interval reaches it; without an interval, if the value does, which proves nothing about a value that varies.
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. ``op``, ``goal`` and ``holds`` are None if the figure is only for information."""

    name: str
    value: float | None
    """The figure; None if it was not measured. ``note`` then contains the reason."""
    unit: str
    op: Operator | None = None
    goal: float | None = None
    holds: bool | None = None
    interval: tuple[float, float] | None = None
    """95 % confidence interval of ``value``."""
    note: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run of a scenario, as in the file ``results/<scenario>.json``."""

    scenario: str
    about: str
    """Describes what is compared, and how."""
    machine: dict[str, Any]
    """MachineFacts, ``date``, the machine's load during the run, and the ``versions`` of packages."""
    quick: bool
    """True if the run was short, so that its figures are rough."""
    rows: tuple[Row, ...]


def fact(name: str, value: float, unit: str, *, interval: Interval | None = None, note: str = "") -> Row:
    """A row that is only for information."""
    return Row(name=name, value=value, unit=unit, interval=_bounds(interval), note=note)


def skipped(name: str, why: object) -> Row:
    """A row for a figure that could not be measured."""
    return Row(name=name, value=None, unit="", note=" ".join(str(why).split())[:_LONGEST_NOTE])


def claim(name: str, value: float | Interval, unit: str, op: Operator, goal: float, *, note: str = "") -> Row:
    """A row with a goal, which holds if the worse end of its interval does; a value without an interval must not vary."""
    found = value if isinstance(value, Interval) else Interval(value, value, value)
    holds = found.low >= goal if op == ">=" else found.high <= goal
    interval = _bounds(value) if isinstance(value, Interval) else None
    return Row(name=name, value=found.value, unit=unit, op=op, goal=goal, holds=holds, interval=interval, note=note)


def failed(rows: Sequence[Row]) -> list[Row]:
    """The rows whose goals do not hold."""
    return [row for row in rows if row.holds is False]


def save(result: Result, folder: Path = RESULTS) -> Path:
    """Write the file of ``result``, and replace an existing file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.scenario}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def merge(earlier: Sequence[Result], part: Result) -> Result:
    """``part`` with those rows of ``earlier`` that it does not have, which say when they were measured; busy if either was."""
    names = {row.name for row in part.rows}
    kept = tuple(
        row if result.machine["date"] == part.machine["date"] else _dated(row, result.machine["date"])
        for result in earlier
        for row in result.rows
        if row.name not in names
    )
    is_dirty = any(result.machine["dirty"] for result in (*earlier, part))
    return msgspec.structs.replace(part, rows=(*kept, *part.rows), machine=part.machine | {"dirty": is_dirty})


def _dated(row: Row, date: str) -> Row:
    known = "measured on " in row.note
    return (
        row if known else msgspec.structs.replace(row, note="; ".join(filter(None, [row.note, f"measured on {date}"])))
    )


def load(scenarios: Sequence[str], folder: Path = RESULTS) -> list[Result]:
    """The existing results, in the order of ``scenarios``."""
    paths = [folder / f"{scenario}.json" for scenario in scenarios]
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths if path.exists()]


def render(results: Sequence[Result]) -> str:
    """The text of ``RESULTS.md``: for each scenario, a table and a description of the machine."""
    return "\n".join([_HEADING, *(_section(result) for result in results)])


def _section(result: Result) -> str:
    machine = result.machine
    lines = [f"## {result.scenario}\n", result.about, ""]
    if result.quick:
        lines += ["**Rough: a quick run.**", ""]
    if machine.get("dirty"):
        lines += ["**The machine was busy with other work while this was measured.**", ""]
    lines += ["| figure | value | goal | holds | note |", "|---|---:|---:|---|---|"]
    lines += [_line(row) for row in result.rows]
    lines += ["", _conditions(machine), ""]
    return "\n".join(lines)


def _conditions(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['date']} · {machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{' '.join(machine['isa'])} · {machine['system']}, Python {machine['python']} · "
        f"load {machine['load_before']:g} before, steal {machine['steal_percent']:g} % · {versions}"
    )


def _line(row: Row) -> str:
    holds = {True: "yes", False: "**no**", None: ""}[row.holds]
    return f"| {row.name} | {shown(row)} | {goal(row)} | {holds} | {row.note.replace('|', '/')} |"


def shown(row: Row) -> str:
    """Value, unit and interval as text."""
    if row.value is None:
        return "not measured"
    interval = f" [{number(row.interval[0])}, {number(row.interval[1])}]" if row.interval else ""
    return f"{number(row.value)}{'' if row.unit == '×' else ' '}{row.unit}".rstrip() + interval


def goal(row: Row) -> str:
    """The goal as text; empty if there is no goal."""
    if row.goal is None:
        return ""
    return f"{'≥' if row.op == '>=' else '≤'} {number(row.goal)}{'' if row.unit == '×' else ' '}{row.unit}".rstrip()


def number(value: float) -> str:
    """``value`` as text with three significant digits. Values of 100 or more are rounded to integers."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    return (interval.low, interval.high) if interval else None
