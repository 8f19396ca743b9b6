"""Print tables. A pipe gets every column in full. A narrow terminal folds cells, and a line names omitted columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.tensor import TensorSpec

_PIPE_WIDTH = 1 << 16
"""Columns of an output that is not a terminal: more than any line has."""
_GAP = 2
_VERDICT_WIDTH = 28
"""The last column may be folded to this width before another column is left out."""


def specs_text(specs: Sequence[TensorSpec]) -> str:
    """``x FP32[N, 3], mask BOOL[N]``."""
    shapes = {spec.name: ", ".join("N" if dim < 0 else str(dim) for dim in spec.shape) for spec in specs}
    return ", ".join(f"{spec.name} {spec.datatype.value}[{shapes[spec.name]}]" for spec in specs)


def make_console() -> Console:
    """A console on stdout. If stdout is not a terminal, its lines are never cut or folded."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[str] = (),
    minor: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> None:
    """Print a table of ``rows``. The first column and the columns titled in ``texts`` contain text; all other columns contain numbers.

    If the terminal is too narrow, columns titled in ``minor`` are omitted in this order until the table fits, and a line names them.
    Cells of the remaining columns are folded. ``styles`` has one style per row.
    """
    left_out = _left_out(console.width, titles, rows, minor)
    kept = [number for number, title in enumerate(titles) if title not in left_out]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number in kept:
        is_text = number == 0 or titles[number] in texts
        table.add_column(escape(titles[number]), justify="left" if is_text else "right", overflow="fold", min_width=1)
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*(escape(cells[number]) for number in kept), style=style)
    console.print(table)
    if left_out:
        console.print(
            f"not shown: {', '.join(left_out)}; a wider terminal, a pipe or --json shows them", highlight=False
        )


def _left_out(
    width: int, titles: Sequence[str], rows: Sequence[Sequence[str]], minor: Sequence[str]
) -> tuple[str, ...]:
    """The first of the ``minor`` titles, as many as must be left out so that the other columns fit into ``width``."""
    widths = {title: max(map(cell_len, cells)) for title, *cells in zip(titles, titles, *rows, strict=True)}
    widths[titles[-1]] = min(widths[titles[-1]], _VERDICT_WIDTH)
    for count in range(len(minor) + 1):
        kept = [widths[title] for title in titles if title not in minor[:count]]
        if sum(kept) + _GAP * (len(kept) - 1) <= width:
            break
    return tuple(minor[:count])
