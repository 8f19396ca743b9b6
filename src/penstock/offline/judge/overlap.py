"""Find evaluation rows that are also calibration or training rows, and evaluation rows that occur more than once."""

from __future__ import annotations

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidData
from penstock.tensor import Array

_SHOWN = 10


def seen_rows(judged: Dataset, fitted: Dataset) -> Array:
    """The indices of the rows of ``judged`` that have the same inputs as a row of ``fitted``."""
    known = set(_digests(fitted))
    return np.flatnonzero([digest in known for digest in _digests(judged)])


def copies(data: Dataset, *, labelled: bool = False) -> int:
    """The number of rows whose inputs, and also labels if ``labelled``, are copies of those of an earlier row."""
    return data.count - len(set(_digests(data, labelled=labelled)))


def check_distinct(data: Dataset, *, labelled: bool = True) -> None:
    """Raise InvalidData if a row is a copy of another: the copies would count as samples of a proof. With ``labelled``, rows with
    different labels are not copies. Pass False if the metric does not use labels.
    """
    again = copies(data, labelled=labelled)
    if again:
        raise InvalidData(
            f"{again} of {data.count} evaluation rows are copies of others, which add nothing to the proof that --prove-accuracy asks "
            f"for: there are only {data.count - again} distinct rows",
            "remove the copies; or do not require a proof",
        )


def overlap_notes(judged: Dataset, fitted: Dataset | None) -> tuple[int, tuple[str, ...]]:
    """The number of rows of ``judged`` that are also in ``fitted``, and notes on these rows and on copies."""
    notes: list[str] = []
    rows = seen_rows(judged, fitted) if fitted is not None else np.zeros(0, np.intp)
    if len(rows):
        shown = ", ".join(map(str, rows[:_SHOWN])) + (", …" if len(rows) > _SHOWN else "")
        notes.append(
            f"{len(rows)} of {judged.count} evaluation rows are also calibration or training rows (rows {shown}), so the loss may be "
            "larger on others: remove them from one of the two"
        )
    if again := copies(judged):
        notes.append(
            f"{again} of {judged.count} evaluation rows are copies of others, so the intervals of the loss are too narrow: remove them"
        )
    return len(rows), tuple(notes)


def _digests(data: Dataset, *, labelled: bool = False) -> list[bytes]:
    return [digest.tobytes() for digest in data.digests(labelled=labelled)]
