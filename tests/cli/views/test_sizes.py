from __future__ import annotations

import io

from rich.console import Console

from penstock.bundle.evidence import SizeGain
from penstock.cli.views.sizes import show_sizes
from penstock.measurement import Interval

GAINS = [
    SizeGain({"x": (1, 3, 64, 64), "n": ()}, 0.75, 2.0, 1.0, Interval(2.0, 1.9, 2.1)),
    SizeGain({"x": (1, 3, 96, 64), "n": ()}, 0.25, 3.0, 2.0, Interval(1.5, 1.4, 1.6)),
]


def shown(gains: list[SizeGain]) -> str:
    output = io.StringIO()
    show_sizes(Console(file=output, width=120), gains)
    return output.getvalue()


def test_each_size_is_a_row() -> None:
    text = shown(GAINS)
    assert "x 1×3×64×64, n scalar" in text
    assert "75%" in text
    assert "1.50x (1.40 … 1.60)" in text
    assert GAINS[1].title == "x 1×3×96×64, n scalar"


def test_one_size_needs_no_table() -> None:
    assert shown([]) == ""
