"""The outcome of a method, as a table or as one JSON object."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.markup import escape

from penstock.cli.views.sizes import show_sizes
from penstock.cli.views.tables import make_console, print_table
from penstock.offline.compress.method import Method
from penstock.offline.compress.outcome import Outcome, times
from penstock.offline.judge.contract import while_busy

_NOTHING_MEASURED = "speed and accuracy are not measured without --evaluate"


def show(name: str, method: Method, outcome: Outcome, output: Path | None, *, json: bool) -> None:
    """Print the outcome of the command ``name`` as tables or, with ``json``, as one object with stable keys."""
    if json:
        written = {"output": str(output)} if output else {}
        print(msgspec.json.encode({"command": name, **written, **outcome.summary()}).decode())
        return
    console, made = make_console(), outcome.made
    if made.heading:
        console.print(escape(made.heading), soft_wrap=True)
    if made.table:
        titles, *rows = made.table
        print_table(console, titles, rows)
    if made.model is not None:
        print_table(console, ("", *method.titles, "gain"), _comparison(outcome), texts=("gain",))
    show_sizes(console, outcome.comparison.by_size if outcome.comparison else ())
    for note in outcome.notes:
        console.print(f"[yellow]note[/yellow]    {escape(note)}")
    if made.model is not None and outcome.comparison is None:
        console.print(f"[yellow]note[/yellow]    {_NOTHING_MEASURED}")
    for path in (*made.files, *([output] if output else [])):
        console.print(f"written  {path}", markup=False)


def _comparison(outcome: Outcome) -> list[tuple[str, ...]]:
    """The rows of a table that compares the original and the result."""
    before, after = outcome.original.size_bytes, outcome.model.size_bytes
    rows: list[tuple[str, ...]] = [("size, KiB", _kib(before), _kib(after), _smaller(before, after))]
    if outcome.coded:
        against = f"{_smaller(before, outcome.coded[1])} than the file"
        rows.append(("coded, KiB", *map(_kib, outcome.coded), against))
    if (found := outcome.comparison) is not None:
        accuracy = found.accuracy
        loss = f"loss {accuracy.loss.value:+.2%} (95 %: {accuracy.loss.low:+.2%} … {accuracy.loss.high:+.2%})"
        values = accuracy.show(found.original_accuracy), accuracy.shown
        rows.append((f"{accuracy.metric}, {accuracy.samples} samples", *values, loss))
        call = f"p50 of {found.rows} row(s), ms"
        rows.append(
            (
                call,
                f"{found.original_ms:.3f}",
                f"{found.compressed_ms:.3f}",
                times(found.speedup) + while_busy(found.busy),
            )
        )
    return rows


def _kib(size_bytes: int) -> str:
    return f"{size_bytes / 1024:.1f}"


def _smaller(before: int, after: int) -> str:
    return f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
