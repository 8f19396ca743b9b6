from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.views.tables import make_console, print_table

TITLES = ("candidate", "p50 ms", "p99 ms", "speed", "loss", "KiB", "verdict")
MINOR = ("p50 ms", "KiB", "p99 ms")
LONG = "onnxruntime-int8-" + "mixed-" * 30 + "wide-t1"
VERDICT = "rejected: " + " ".join(f"reason{number}" for number in range(40))
ROW = (LONG, "12.345", "23.456", "1.23x", "+0.10%", "1234.5", VERDICT)


def printed(width: int | None, *rows: tuple[str, ...], titles: tuple[str, ...] = TITLES) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    print_table(console, titles, rows, texts=("verdict",), minor=MINOR)
    return file.getvalue()


def test_a_pipe_gets_every_cell_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(make_console(), TITLES, [ROW], texts=("verdict",), minor=MINOR)
    title, line, *rest = capsys.readouterr().out.splitlines()
    assert title.split() == " ".join(TITLES).split()
    assert line.split() == " ".join(ROW).split()
    assert not rest


def test_a_narrow_terminal_keeps_what_decides_and_names_what_is_missing() -> None:
    row = ("onnxruntime-int8-mse-wide-t1", *ROW[1:6], "outrun: not provably faster than the original")
    out = printed(80, row)
    assert out.splitlines()[0].split() == ["candidate", "speed", "loss", "verdict"]
    assert all(cell in out for cell in (row[0], "1.23x", "+0.10%"))
    assert "not shown: p50 ms, KiB, p99 ms; a wider terminal, a pipe or --json shows them" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "not shown" not in printed(200, row)


@settings(max_examples=60)
@given(
    st.integers(24, 160),
    st.lists(st.tuples(*[st.text("abcdef[]/0123456789.%", min_size=1, max_size=60)] * 7), min_size=1, max_size=4),
)
def test_no_width_loses_a_cell_silently(width: int, rows: list[tuple[str, ...]]) -> None:
    out = printed(width, *rows)
    told = " ".join(out.split()).partition("not shown: ")[2].partition(";")[0]
    left_out = told.split(", ") if told else []
    assert "…" not in out
    assert list(MINOR[: len(left_out)]) == left_out
    shown = sum(len(cell) for row in rows for title, cell in zip(TITLES, row, strict=True) if title not in left_out)
    table = out.partition("not shown: ")[0]
    titles = sum(len(title.replace(" ", "")) for title in TITLES if title not in left_out)
    assert len("".join(table.split())) == shown + titles
