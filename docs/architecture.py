"""Draw ``images/architecture.svg``: the layers of packages, from the contracts that import-linter enforces in ``pyproject.toml``.

Run ``python docs/architecture.py`` after a contract has changed; ``tests/docs/test_architecture.py`` fails while the picture is out
of date.
"""

from __future__ import annotations

import tomllib
from html import escape
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
PICTURE = _ROOT / "docs" / "images" / "architecture.svg"
_OPENED = ("offline", "online", "server", "http")
"""Packages whose own layers are drawn inside them."""
_WIDTH, _MARGIN, _GAP, _LINE, _TITLE = 980, 14, 8, 30, 26
_FILLS = ("#ffffff", "#eef4fb", "#dbe8f6", "#c8dcf1", "#b5cfea")
_WEIGHTS = {"online": 40, "offline": 16, "http": 24}
"""Relative widths of these packages in a row. Other packages have a width in proportion to the length of their names."""

Layers = list[list[str]]


def layers_of(room: str) -> Layers:
    """The layers inside the package ``room``, the highest first, each with its packages; empty if no contract orders them."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        if contract["type"] == "layers" and contract.get("containers", [""])[0].rpartition(".")[2] == room:
            rows = [[name.strip().removeprefix("penstock.") for name in row.split("|")] for row in contract["layers"]]
            return rows if room else [row for row in rows if row]
    return []


def height_of(room: str) -> int:
    """Height of the box of ``room``, in pixels."""
    if room not in _OPENED:
        return _LINE
    return _TITLE + sum(max(map(height_of, row)) + _GAP for row in layers_of(room))


def draw(room: str, x: int, y: int, width: int, height: int = 0, depth: int = 0) -> list[str]:
    """The box of ``room`` and the boxes inside it, as elements of an SVG picture."""
    is_open = room in _OPENED or not depth
    parts = []
    if depth:
        fill = _FILLS[min(depth, len(_FILLS)) - 1] if is_open else "#ffffff"
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="#5b7ea6"/>')
        place = f'x="{x + 8}" y="{y + 18}"' if is_open else f'x="{x + width / 2:g}" y="{y + 19}" text-anchor="middle"'
        parts.append(
            f"<text {place}{' font-weight=' + chr(34) + 'bold' + chr(34) if is_open else ''}>{escape(room)}</text>"
        )
        y += _TITLE
    if is_open:
        for row in layers_of(room if depth else ""):
            tallest = max(map(height_of, row))
            weights = [_WEIGHTS.get(one, len(one) + 2) for one in row]
            inner = width - 2 * _MARGIN - _GAP * (len(row) - 1)
            left = x + _MARGIN
            for one, weight in zip(row, weights, strict=True):
                share = inner * weight // sum(weights)
                parts += draw(one, left, y, share, tallest, depth + 1)
                left += share + _GAP
            y += tallest + _GAP
    return parts


def picture() -> str:
    """The whole picture as SVG."""
    height = 2 * _MARGIN + sum(max(map(height_of, row)) + _GAP for row in layers_of(""))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
            "<title>The rooms of Penstock. A room imports only rooms below it.</title>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#f7f9fb"/>',
            *draw("", 0, _MARGIN, _WIDTH),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
