"""Samples in a Parquet file, read by pyarrow, which is imported only here: one row per sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import InvalidData, Unsupported
from penstock.samples.tables.columns import Columns
from penstock.tensor import DataType, Signature, TensorSpec

_ROWS = 256
"""Number of rows to read at a time. A row group is decoded piece by piece."""


def parquet_samples(path: Path, signature: Signature, states: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The samples of a file, made of its ``Columns``. The value in a column may be a list.

    Raises InvalidData if the columns do not suit the model, or the file is damaged; Unsupported if pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra
    except ImportError:
        raise Unsupported(
            f"'{path}' is a Parquet file, which needs pyarrow",
            "pip install 'penstock[parquet]', or save the data as CSV",
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = Columns(f"'{path}'", file.schema_arrow.names, signature, states)
            for batch in file.iter_batches(_ROWS):
                for row in range(batch.num_rows):
                    yield columns.sample(partial(_value, path, batch, row))
    except (ArrowException, OSError) as error:
        raise InvalidData(f"cannot read '{path}': {error}", "write it again, for example with pandas") from None


def _value(path: Path, batch: Any, row: int, spec: TensorSpec | None, place: int) -> Any:
    """The value in a column of ``batch``. Raises InvalidData if there is none, or if it is text for an input of numbers."""
    found = batch.column(place)[row].as_py()
    is_text = isinstance(found, str | bytes) and spec is not None and spec.datatype is not DataType.BYTES
    if found is None or is_text:
        raise InvalidData(
            f"'{path}': column '{batch.schema.names[place]}' has {'no value' if found is None else repr(found[:40])} in a row",
            f"remove the row, or give {'a value' if spec is None else spec.datatype.value}",
        )
    return found
