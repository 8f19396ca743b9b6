"""Run the scenarios: ``python -m benchmarks [--scenario NAME [--part NAME [--keep]]] [--quick] [--check]``.

Each scenario writes ``results/<scenario>.json``. ``RESULTS.md`` is then generated from all result files. The exit status is 1 if a
scenario fails to run. A missed goal is reported, and the exit status is then 0, or 1 with ``--check``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks import masked_cpu
from benchmarks.machine import MachineWatch
from benchmarks.results import REPORT, Result, Row, failed, goal, load, merge, render, save, shown
from benchmarks.scenarios import REPORTED, SCENARIOS
from penstock.errors import PenstockError


def main() -> int:
    """Run the scenarios that the command line selects."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the figures that Penstock claims."
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help="run only this one")
    parser.add_argument("--part", help="only this part of it, shown and not kept")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the part among those of the scenario")
    parser.add_argument("--quick", action="store_true", help="rough figures, each scenario within a minute")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal does not hold")
    arguments = parser.parse_args()
    # A signal must also end the servers. SystemExit leaves their contexts, which stops them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    console = Console(width=None if sys.stdout.isatty() else 160)
    if arguments.part:
        return show_part(console, parser, arguments)
    missed = broken = 0
    for scenario in (arguments.scenario,) if arguments.scenario else SCENARIOS:
        console.print(f"[bold]{scenario}[/bold]{', quick' if arguments.quick else ''} …")
        try:
            result = measure(scenario, arguments.quick)
        except (PenstockError, RuntimeError, OSError) as error:
            console.print(f"failed to run: {error}", style="red", markup=False)
            broken += 1
            continue
        path = save(result)
        show(console, result)
        console.print(f"written to {path}")
        missed += len(failed(result.rows))
    REPORT.write_text(render(load(REPORTED)))
    if missed:
        console.print(f"{missed} goal{'s do' if missed > 1 else ' does'} not hold", style="red")
    return 1 if broken or (arguments.check and missed) else 0


def show_part(console: Console, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run one part of a scenario."""
    if not arguments.scenario:
        parser.error("--part needs --scenario")
    module = importlib.import_module(f"benchmarks.scenarios.{arguments.scenario}")
    parts = getattr(module, "PARTS", {})
    if arguments.part not in parts:
        parser.error(f"'{arguments.scenario}' has no part '{arguments.part}'; it has {', '.join(parts) or 'none'}")
    result = measure(arguments.scenario, arguments.quick, parts[arguments.part])
    show(console, result)
    if arguments.keep:
        save(merge(load((result.scenario,)), result))
        REPORT.write_text(render(load(REPORTED)))
    return 1 if arguments.check and failed(result.rows) else 0


def measure(scenario: str, quick: bool, part: Callable[[bool], list[Row]] | None = None) -> Result:
    """Run one scenario, or a ``part`` of it, on this machine."""
    module = importlib.import_module(f"benchmarks.scenarios.{scenario}")
    watch = MachineWatch()
    rows = (part or module.run)(quick)
    about, machine = " ".join((module.__doc__ or "").split()), watch.finish()
    if masked := os.environ.get(masked_cpu.NAME):
        machine["cpu"] += f" masked as '{masked}'"
        scenario, about = (
            f"{scenario}-{masked}",
            f"The scenario {scenario} on a CPU without some instructions (`benchmarks/masked_cpu.py`).",
        )
    return Result(scenario=scenario, about=about, machine=machine, quick=quick, rows=tuple(rows))


def show(console: Console, result: Result) -> None:
    """Print the rows as a table."""
    rough = ", rough: a quick run" if result.quick else ""
    busy = ", the machine was busy" if result.machine["dirty"] else ""
    table = Table(title=f"{result.scenario}{rough}{busy}", title_justify="left")
    for heading in ("figure", "value", "goal", "holds", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "goal") else "left")
    for row in result.rows:
        holds = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[row.holds]
        table.add_row(row.name, shown(row).replace("[", "\\["), goal(row), holds, row.note)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
