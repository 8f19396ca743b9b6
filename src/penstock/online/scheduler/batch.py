"""Requests merged into one batch along the first axis, and its outputs split back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.errors import PenstockError
from penstock.tensor import Array


def merge(inputs: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """One set of inputs holding the rows of all, in order; a single request's arrays are passed on as they are.

    All must have the same names, datatypes and shapes; only the first dimension may differ.
    """
    if len(inputs) == 1:
        return inputs[0]
    return {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}


def split(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    """For each request its ``rows`` of every output, as views that do not overlap.

    Raises PenstockError if the model did not answer row for row, because then rows cannot be assigned to requests.
    """
    total = sum(rows)
    for name, array in outputs.items():
        if array.shape[:1] != (total,):
            raise PenstockError(
                f"the model's output '{name}' has shape {list(array.shape)} for a batch of {total}",
                "serve it with a maximum batch of 1",
            )
    parts: list[dict[str, Array]] = []
    start = 0
    for count in rows:
        part = {}
        for name, array in outputs.items():
            part[name] = array[start : start + count]
        parts.append(part)
        start += count
    return parts
