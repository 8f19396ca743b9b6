"""Rules for operators that change the shape. These operators keep the elements in order, or repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from penstock.rows.call import Call, Facts, rule
from penstock.rows.facts import MAX_KNOWN, Fact, Shape, broadcast, stop
from penstock.rows.graph import OnnxTensor
from penstock.rows.sizes import (
    BATCH,
    Number,
    Size,
    depends_on_batch,
    interleaved,
    outer_of,
    plain,
    plus,
    product,
    quotient,
    result,
    times,
)
from penstock.tensor import Array


@rule("Shape", "Size")
def shape_of(call: Call) -> Fact:
    call.accounted.add(0)
    shape = [plain(size) for size in call[0].shape]
    if call.operator == "Size":
        return Fact.of(product(shape))
    return Fact.of(shape[slice(call.attribute("start", 0), call.attribute("end"))])


@rule("Constant")
def constant(call: Call) -> Fact:
    for value in call.node.attributes.values():
        if isinstance(value, OnnxTensor):
            return Fact(value.dims, tensor=value)
        if isinstance(value, str):
            return Fact(())
        if isinstance(value, tuple) and any(isinstance(each, str) for each in value):
            return Fact((len(value),))
        if isinstance(value, int | float | tuple):
            return Fact.of(value)
    return stop("holds a constant of an unsupported kind")


@rule("ConstantOfShape")
def filled(call: Call) -> Fact:
    call.makes_rows = True
    shape = call.sizes(0)
    value: OnnxTensor | None = call.attribute("value")
    one = Fact((1,), tensor=value).value if value is not None else np.array([0.0], object)
    is_small = one is not None and all(isinstance(size, int) for size in shape) and product(shape) <= MAX_KNOWN
    return Fact(shape, np.full(shape, one[0], object) if one is not None and is_small else None)


@rule("Reshape")
def reshape(call: Call) -> Fact:
    x, wanted = call[0], call.sizes(1)
    copies_zero = not call.attribute("allowzero", 0)
    known = {each for size in x.shape if isinstance(size, Size) for each in size.symbols}
    for axis, size in enumerate(wanted):
        if size == 0 and copies_zero:
            wanted[axis] = plain(x.shape[axis])
        elif isinstance(size, Size) and (size.factor < 0 or not known.issuperset(size.computed)):
            # A computed size could be -1 (inferred) or 0 (copied from the same axis of the input).
            if size.batch or (axis < x.rank and axis == x.axis):
                stop("computes with the batch size")
            wanted[axis] = call.unknown()
    return reshaped(x, wanted)


@rule("Flatten")
def flatten(call: Call) -> Fact:
    x, axis = call[0], call.attribute("axis", 1)
    axis += x.rank if axis < 0 else 0
    whole = [plain(size) for size in x.shape]
    return reshaped(x, [product(whole[:axis]), product(whole[axis:])])


def reshaped(x: Fact, wanted: Sequence[Number]) -> Fact:
    """``x`` reshaped to ``wanted``, where a size of -1 is inferred."""
    shape = _without_rest(x, wanted)
    place = next((axis for axis, size in enumerate(shape) if depends_on_batch(size)), -1)
    if x.is_rows:
        outer, inner = _parts(x.shape, x.axis)
        # Both shapes have the same number of elements. Each row keeps its elements if the new batch axis runs through all rows as
        # often as the old one, or if each row has as many elements on it as before.
        often = quotient(outer, product(shape[:place])) if place >= 0 else None
        size = quotient(shape[place], times(often, BATCH)) if often is not None else None
        if size is None and place >= 0 and (once := quotient(shape[place], BATCH)) is not None:
            often, size = (1, once) if product([once, *shape[place + 1 :]]) == inner else (None, None)
        if often is None or size is None:
            stop("reshapes the batch axis in a way that is not proven to keep rows whole")
        shape = _with(shape, place, interleaved(often, size))
    elif place >= 0:
        stop("reshapes a constant into rows")
    value = x.value
    if value is not None and all(isinstance(size, int) for size in shape):
        return Fact(shape, value.reshape(shape))
    return Fact(shape)


def _parts(shape: Shape, axis: int) -> tuple[Number, Number]:
    """The number of times that the elements run through all rows, and the number of elements of a row in each of these runs."""
    outer = outer_of(shape[axis])
    one = quotient(plain(shape[axis]), times(outer, BATCH))
    return times(product(shape[:axis]), outer), product([one, *shape[axis + 1 :]])


def _without_rest(x: Fact, wanted: Sequence[Number]) -> Shape:
    if -1 not in wanted:
        return tuple(wanted)
    rest = wanted.index(-1)
    whole = [plain(size) for size in x.shape]
    total, others = product(whole), product(size for axis, size in enumerate(wanted) if axis != rest)
    size = quotient(total, others) if others != 0 else 0
    if size is None and depends_on_batch(total) and depends_on_batch(others):
        # The batch size cancels out.
        total, others = (product(_per_row(part)) for part in (whole, [*wanted[:rest], *wanted[rest + 1 :]]))
        size = result("rest", total, others)
    elif size is None and not depends_on_batch(total):
        size = result("rest", total, others)
    elif size is None:
        stop("reshapes the batch axis in a way that is not proven to keep rows whole")
    return (*wanted[:rest], size, *wanted[rest + 1 :])


def _per_row(shape: Sequence[Number]) -> list[Number]:
    return [quotient(size, BATCH) if depends_on_batch(size) else size for size in shape]


@rule("Transpose")
def transpose(call: Call) -> Fact:
    x = call[0]
    order = call.attribute("perm") or range(x.rank)[::-1]
    value = x.value
    return Fact([x.shape[axis] for axis in order], None if value is None else value.transpose(order))


@rule("Squeeze", "Unsqueeze")
def squeeze(call: Call) -> Fact:
    x, given = call[0], call.integers("axes", 1)
    if call.operator == "Unsqueeze":
        rank = x.rank + len(given or ())
        places = {call.within(axis, rank) for axis in given or ()}
        sizes = iter(x.shape)
        shape = [1 if axis in places else next(sizes) for axis in range(rank)]
    elif given is None:
        if not all(isinstance(size, int) for size in x.shape):
            stop("removes axes that depend on the request")
        shape = [size for size in x.shape if size != 1]
    else:
        gone = {call.within(axis, x.rank) for axis in given}
        call.mixes(x, *gone)
        shape = [size for axis, size in enumerate(x.shape) if axis not in gone]
    value = x.value
    return Fact(shape, None if value is None else value.reshape(shape))


@rule("Expand")
def expand(call: Call) -> Fact:
    call.makes_rows = True
    x, wanted = call[0], call.sizes(1)
    shape = broadcast(x.shape, tuple(wanted))
    value = x.value
    is_known = value is not None and all(isinstance(size, int) for size in shape) and product(shape) <= MAX_KNOWN
    return Fact(shape, np.broadcast_to(value, shape) if value is not None and is_known else None)


@rule("Tile")
def tile(call: Call) -> Fact:
    call.makes_rows = True
    x, repeats = call[0], call.sizes(1)
    if x.is_rows and repeats[x.axis] != 1:
        stop("repeats the rows of a batch")
    return Fact(map(times, x.shape, repeats))


@rule("Concat")
def concat(call: Call) -> Fact:
    facts = [fact for fact in call.inputs if fact is not None]
    axis = call.axis(facts[0].rank, 1)
    for fact in facts:
        call.mixes(fact, axis)
    others = [_with(fact.shape, axis, 1) for fact in facts]
    for position, sizes in enumerate(zip(*others, strict=True)):
        if any(map(depends_on_batch, sizes)) and len(set(sizes)) > 1:
            stop(f"joins tensors that do not all have their rows in axis {position}")
    shape = list(broadcast(*others))
    values = [value for fact in facts if (value := fact.value) is not None]
    joined = np.concatenate(values, axis) if len(values) == len(facts) else None
    shape[axis] = joined.shape[axis] if joined is not None else reduce(plus, [fact.shape[axis] for fact in facts])
    return Fact(shape, joined)


@rule("Split")
def split(call: Call) -> Facts:
    x = call[0]
    axis, parts = call.axis(x.rank, 0), len(call.node.outputs)
    call.mixes(x, axis)
    sizes = call.integers("split", 1)
    if sizes is None:
        whole = x.shape[axis]
        if not isinstance(whole, int):
            even = quotient(whole, parts)
            return [Fact(_with(x.shape, axis, call.unknown() if even is None else even)) for _ in range(parts)]
        most = -(-whole // parts)
        sizes = [max(0, min(most, whole - number * most)) for number in range(parts)]
    value = x.value
    cuts: Sequence[Array | None] = [None] * parts
    if value is not None:
        cuts = np.split(value, np.cumsum(sizes)[:-1], axis)
    return [Fact(_with(x.shape, axis, size), cut) for size, cut in zip(sizes, cuts, strict=True)]


def _with(shape: Shape, axis: int, size: Number) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


@rule("DepthToSpace", "SpaceToDepth")
def blocks(call: Call) -> Fact:
    x, size = call[0], call.attribute("blocksize", 1)
    call.mixes(x, 1, 2, 3)
    n, channels, *sides = x.shape
    if call.operator == "SpaceToDepth":
        return Fact([n, times(channels, size * size), *(quotient(side, size) or call.unknown() for side in sides)])
    rest = quotient(channels, size * size)
    return Fact([n, call.unknown() if rest is None else rest, *(times(side, size) for side in sides)])
