"""Samples in a CSV file: one line per sample, below a line with the names of the columns."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InvalidData
from penstock.samples.tables.columns import Columns
from penstock.tensor import DataType, Signature, TensorSpec

_TRUE, _FALSE = {"1", "true"}, {"0", "false"}


def csv_samples(path: Path, signature: Signature, states: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The samples of a file, made of its ``Columns``.

    Raises InvalidData if the columns do not suit the model, or a cell does not have the type of its input.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            columns = Columns(f"'{path}'", names, signature, states)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise InvalidData(
                        f"'{path}', line {reader.line_num} has {len(cells)} cells, but there are {len(names)} columns",
                        "give every line a cell for each column",
                    )
                line = _Line(path, reader.line_num, names, cells)
                yield columns.sample(line.value)
        except (csv.Error, UnicodeDecodeError) as error:
            raise InvalidData(
                f"'{path}', line {reader.line_num} is not CSV: {error}", "save it as CSV in UTF-8"
            ) from None


class _Line(NamedTuple):
    path: Path
    number: int
    names: list[str]
    cells: list[str]

    def value(self, spec: TensorSpec | None, place: int) -> Any:
        """The value of a cell. Raises InvalidData."""
        text = self.cells[place].strip()
        try:
            return _value(spec, text)
        except ValueError:
            assert spec is not None
            raise InvalidData(
                f"'{self.path}', line {self.number}: column '{self.names[place]}' has '{self.cells[place][:40]}', but input "
                f"'{spec.name}' is {spec.datatype.value}",
                "repair the cell, or remove the line",
            ) from None


def _value(spec: TensorSpec | None, text: str) -> Any:
    """The value of a cell. Raises ValueError."""
    if spec is None:
        return _label(text)
    if spec.datatype is DataType.BYTES:
        return text
    if spec.datatype is DataType.BOOL:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    return float(text) if spec.datatype.is_float else int(text)


def _label(text: str) -> Any:
    """A label as a number if it is one, otherwise as text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
