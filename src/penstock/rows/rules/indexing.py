"""Rules for operators that read or write elements by position or by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.rows.call import CLASSICAL, Call, keeps_shape, rule
from penstock.rows.facts import MAX_KNOWN, Fact, stop
from penstock.rows.sizes import Number, Size, depends_on_batch, plus, result

_END = (1 << 31) - 1
"""An end of at least this value means the end of the axis."""


@rule("Slice")
def cut(call: Call) -> Fact:
    x = call[0]
    if call.attribute("starts") is not None:
        starts, ends = list(call.attribute("starts")), list(call.attribute("ends"))
        axes, steps = list(call.attribute("axes") or range(len(starts))), [1] * len(starts)
    else:
        starts, ends = call.sizes(1), call.sizes(2)
        axes = call.integers("axes", 3) or list(range(len(starts)))
        steps = call.integers("steps", 4) or [1] * len(starts)
    shape, places = list(x.shape), [slice(None)] * x.rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = call.within(axis, x.rank)
        size = x.shape[place]
        if start == 0 and step == 1 and (end == size or (isinstance(end, int) and end >= _END)):
            continue
        call.mixes(x, place)
        if depends_on_batch(start) or depends_on_batch(end):
            stop("depends on the batch size")
        if all(isinstance(each, int) for each in (start, end, size)) and (step > 0 or end < _END):
            # With a negative step, ONNX clamps a start before the axis to the first element; Python clamps it to the position
            # before.
            places[place] = slice(max(start, -size), end if step > 0 or end >= -size else None, step)
            shape[place] = len(range(*places[place].indices(size)))
        else:
            shape[place] = result("slice", size, start, end, step)
    is_known = all(map(_is_int, (*shape, *starts, *ends)))
    value = x.value if is_known else None
    return Fact(shape, None if value is None else value[tuple(places)])


def _is_int(number: Number) -> bool:
    return isinstance(number, int)


@rule("Gather")
def gather(call: Call) -> Fact:
    data, indices = call[0], call[1]
    axis = call.axis(data.rank, 0)
    call.mixes(data, axis)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    value, at = data.value, indices.value
    if value is None or at is None or not all(map(_is_int, at.flat)) or data.rank > 1:
        return Fact(shape)
    return Fact(shape, np.asarray(value.take(at.astype(np.int64)), object).reshape(indices.shape))


@rule("ArrayFeatureExtractor", domain=CLASSICAL)
def features(call: Call) -> Fact:
    x, indices = call[0], call[1]
    call.constants(1)
    call.mixes(x, -1)
    return Fact([*(x.shape[:-1] or (1,)), indices.shape[-1]])


@rule("GatherElements")
def gather_elements(call: Call) -> Fact:
    _along(call, 0, 1)
    return Fact(call[1].shape)


@rule("ScatterElements", "Scatter")
def scatter_elements(call: Call) -> Fact:
    _along(call, 0, 1, 2)
    return Fact(call[0].shape)


def _along(call: Call, *positions: int) -> None:
    """Raise Dependent unless all inputs have the same rows, or no input has rows."""
    facts = [call[position] for position in positions]
    axis = call.axis(facts[0].rank, 0)
    for fact in facts:
        call.mixes(fact, axis)
        if fact.axis != facts[0].axis or (fact.is_rows and fact.shape[fact.axis] != facts[0].shape[fact.axis]):
            stop("combines rows with other rows, or with constants")


@rule("GatherND")
def gather_nd(call: Call) -> Fact:
    data, indices = call[0], call[1]
    shared, depth = call.attribute("batch_dims", 0), indices.shape[-1]
    if not isinstance(depth, int):
        stop("has indices of an unknown length")
    call.mixes(data, *range(shared, shared + depth))
    call.mixes(indices, -1)
    both = (same(data.shape[axis], indices.shape[axis]) for axis in range(shared))
    return Fact([*both, *indices.shape[shared:-1], *data.shape[shared + depth :]])


def same(first: Number, second: Number) -> Number:
    """The size of an axis that two tensors share. Raises Dependent if the axis is the batch axis of only one tensor."""
    if first != second and (depends_on_batch(first) or depends_on_batch(second)):
        stop("combines rows with other rows, or with constants")
    return first


@rule("ScatterND")
def scatter_nd(call: Call) -> Fact:
    data, indices, updates = call[0], call[1], call[2]
    depth = indices.shape[-1]
    if not isinstance(depth, int):
        stop("has indices of an unknown length")
    call.constants(1)
    call.mixes(data, *range(depth))
    call.mixes(updates, *range(indices.rank - 1))
    places = [fact.axis - first for fact, first in ((data, depth), (updates, indices.rank - 1)) if fact.is_rows]
    if places and (places != places[:1] * 2 or data.shape[data.axis] != updates.shape[updates.axis]):
        stop("combines rows with other rows, or with constants")
    return Fact(data.shape)


@rule("OneHot")
def one_hot(call: Call) -> Fact:
    indices, (depth,) = call[0], call.numbers(1)
    call.constants(2)
    axis = call.axis(indices.rank + 1, -1)
    return Fact([*indices.shape[:axis], depth, *indices.shape[axis:]])


@rule("Pad")
def pad(call: Call) -> Fact:
    x = call[0]
    call.constants(2)
    pads: list[Any] = list(call.attribute("pads") or call.numbers(1))
    axes = [call.within(axis, x.rank) for axis in call.integers("axes", 3) or range(x.rank)]
    shape = list(x.shape)
    for place, axis in enumerate(axes):
        before, after = pads[place], pads[place + len(axes)]
        if before != 0 or after != 0:
            call.mixes(x, axis)
            shape[axis] = plus(plus(shape[axis], before), after)
    return Fact(shape)


@rule("Range")
def count(call: Call) -> Fact:
    start, limit, step = (call.numbers(position)[0] for position in range(3))
    if all(map(_is_int, (start, limit, step))) and step and len(range(start, limit, step)) <= MAX_KNOWN:
        return Fact.of(list(range(start, limit, step)))
    is_size = isinstance(limit, Size) and limit.factor > 0 and not limit.computed
    return Fact([limit if (start, step) == (0, 1) and is_size else result("range", start, limit, step)])


@rule("NonZero", "EyeLike")
def positions(call: Call) -> Fact:
    call.constants(0)
    if call.operator == "EyeLike":
        return Fact(call[0].shape)
    return Fact([max(call[0].rank, 1), call.unknown()])


keeps_shape("Trilu", mixed=lambda call: (-1, -2), constants=(1,))


@rule("GridSample")
def sample(call: Call) -> Fact:
    x, grid = call[0], call[1]
    call.mixes(x, *range(1, x.rank))
    call.mixes(grid, *range(1, grid.rank))
    return Fact([same(x.shape[0], grid.shape[0]), x.shape[1], *grid.shape[1:-1]])
