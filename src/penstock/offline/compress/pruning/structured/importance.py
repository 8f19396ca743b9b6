"""Score the importance of each unit, from weights alone or with data. ``taylor.py`` uses gradients.

The scores of a group add up to 1, so that groups can be compared.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from penstock.dataset import Dataset
from penstock.errors import InvalidData
from penstock.offline.compress.pruning.structured.coupling import ChannelSlot
from penstock.offline.compress.pruning.structured.cut import Structure
from penstock.offline.compress.taps import Progress, Taps, no_progress
from penstock.offline.optimize import graph
from penstock.tensor import Array

Scores = dict[str, Array]
"""FP64 [units] by group, at least 0."""


def importance(
    structure: Structure, kind: str, data: Dataset | None, threads: int = 1, on_progress: Progress = no_progress
) -> Scores:
    """The scores of ``kind``: "norm", "batch-norm" or "activation". Raises InvalidData if ``kind`` needs data but ``data`` is None."""
    if kind == "norm":
        return by_norm(structure)
    if kind == "batch-norm":
        return by_batch_norm(structure)
    if data is None:
        raise InvalidData("importance by activation needs data", "give data, or use importance='norm'")
    return by_activation(structure, data, threads=threads, on_progress=on_progress)


def by_norm(structure: Structure) -> Scores:
    """Squared norm of all weights that compute or read the unit (Fang et al. 2023, §3.3), normalised per tensor."""
    slots = [slot for slot in structure.slots if slot.role != "goes along"]
    return gather(structure, [(slot, shares(_energy(slot))) for slot in slots])


def by_batch_norm(structure: Structure) -> Scores:
    """γ² of the unit's BatchNormalization (Liu et al., "Network Slimming", 2017), which must not yet be folded into weights.

    Groups without BatchNormalization are scored by norm.
    """
    slots = [slot for slot in structure.slots if slot.node.op_type == "BatchNormalization" and slot.operand == 1]
    scales = gather(structure, [(slot, shares(_energy(slot))) for slot in slots])
    return by_norm(structure) | {name: score for name, score in scales.items() if score.any()}


def by_activation(
    structure: Structure, data: Dataset, *, threads: int = 1, batch_size: int = 32, on_progress: Progress = no_progress
) -> Scores:
    """Mean square of the unit's activation over ``data``, times the squared norm of the weights that read the unit.

    If channels are uncorrelated, the score is the proportion of a layer's energy that is lost when the unit is removed. Raises
    InvalidData if the data do not fit the model.
    """
    readers: dict[str, list[ChannelSlot]] = defaultdict(list)
    for slot in structure.slots:
        source = slot.node.inputs[0]
        if slot.role == "reads" and source is not None and source.name is not None:
            readers[source.name].append(slot)
    squares: dict[str, Array] = {}
    taps = Taps(structure.artifact, data, batch_size=batch_size, threads=threads)
    for name, array in taps.run(list(readers), on_progress):
        axis = array.ndim - 1 if readers[name][0].node.op_type == "MatMul" else 1
        squares[name] = squares.get(name, 0.0) + _squares(array, axis)
    terms = [(slot, shares(squares[name] * _energy(slot))) for name, slots in readers.items() for slot in slots]
    return gather(structure, terms)


def gather(structure: Structure, terms: list[tuple[ChannelSlot, Array]]) -> Scores:
    """For each unit, the sum of ``terms`` over all slots and positions that belong to the unit, normalised for each group. Raises
    InvalidData for NaN or infinity.
    """
    found: Scores = {}
    for group in structure.groups:
        total = np.zeros(group.units)
        for slot, values in terms:
            numbers = structure.unit_numbers(group.name, slot.labels)
            mine = numbers >= 0
            total += np.bincount(numbers[mine], weights=values[mine], minlength=group.units)
        if not np.isfinite(total).all():
            raise InvalidData(
                f"the weights or the inputs of '{group.name}' are not finite", "repair the model, or clean the data"
            )
        found[group.name] = shares(total)
    return found


def shares(values: Array) -> Array:
    total = values.sum()
    return values / total if total > 0 else values


def _energy(slot: ChannelSlot) -> Array:
    """The sum of squares at each position of the slot's axis."""
    array = graph.constant(slot.value)
    assert array is not None
    return _squares(array, slot.axis)


def _squares(array: Array, axis: int) -> Array:
    """The sum of squares at each position of ``axis``."""
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    return np.asarray(np.square(rows, dtype=np.float64).sum(axis=1))
