"""Rules for operators that combine elements along some axes: reductions, normalisation, sorting, resizing."""

from __future__ import annotations

from functools import reduce

import numpy as np

from penstock.rows.call import MICROSOFT, Call, Facts, after_first, keeps_shape, rule
from penstock.rows.facts import Fact, broadcast, stop
from penstock.rows.sizes import Number, bounded, depends_on_batch, plus, result, times

keeps_shape("InstanceNormalization", "GroupNormalization", "LRN", mixed=after_first, constants=(1, 2))
keeps_shape("MeanVarianceNormalization", mixed=lambda call: call.attribute("axes", (0, 2, 3)))
keeps_shape("LpNormalization", mixed=lambda call: (call.attribute("axis", -1),))
keeps_shape("CumSum", "CumProd", mixed=lambda call: call.integers("", 1) or ())
keeps_shape(
    "QLinearSoftmax",
    mixed=lambda call: range(call.axis(call[0].rank, -1), call[0].rank),
    singles=(1, 2, 3, 4),
    domain=MICROSOFT,
)

_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare"
_IMAGE_RANK = 4
"""ONNX Runtime interpolates tensors with fewer axes along all axes. It interpolates other tensors along all axes except the first."""
_FOLDED = {"ReduceProd": times, "ReduceSum": plus}


@rule(*(f"Reduce{kind}" for kind in _REDUCTIONS.split()))
def reduction(call: Call) -> Fact:
    x, axes = call[0], call.integers("axes", 1)
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return Fact(x.shape)
    gone = [call.within(axis, x.rank) for axis in axes] if axes else list(range(x.rank))
    shape = _reduced(call, x, gone)
    value, function = x.value, _FOLDED.get(call.operator)
    if value is None or function is None or x.rank != 1 or not value.size:
        return Fact(shape)
    return Fact(shape, np.full(shape, reduce(lambda one, other: bounded(function(one, other)), value.tolist()), object))


def _reduced(call: Call, x: Fact, gone: list[int]) -> list[Number]:
    call.mixes(x, *gone)
    if call.attribute("keepdims", 1):
        return [1 if axis in gone else size for axis, size in enumerate(x.shape)]
    return [size for axis, size in enumerate(x.shape) if axis not in gone]


@rule("ArgMax", "ArgMin")
def best(call: Call) -> Fact:
    x = call[0]
    return Fact(_reduced(call, x, [call.axis(x.rank, 0)]))


@rule("Softmax", "LogSoftmax", "Hardmax")
def softmax(call: Call) -> Fact:
    """Before version 13, softmax is computed over all axes starting at ``axis``."""
    x, is_old = call[0], call.version < 13
    axis = call.axis(x.rank, 1 if is_old else -1)
    call.mixes(x, *range(axis, x.rank if is_old else axis + 1))
    return Fact(x.shape)


@rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def layer_norm(call: Call) -> Facts:
    x = call[0]
    call.constants(1, 2)
    axis = call.axis(x.rank, -1)
    call.mixes(x, *range(axis, x.rank))
    statistics = Fact([*x.shape[:axis], *[1] * (x.rank - axis)])
    return [Fact(broadcast(x.shape, *(fact.shape for fact in call.inputs[1:3] if fact))), statistics, statistics]


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_norm(call: Call) -> Facts:
    call.constants(*range(2, len(call.inputs)))
    shape = broadcast(call[0].shape, call[1].shape)
    total = Fact(shape)
    call.mixes(total, -1)
    return [total, None, None, total]


@rule("BatchNormalization")
def batch_norm(call: Call) -> Facts:
    is_training = call.attribute("training_mode", 0) if call.version >= 14 else len(call.node.outputs) > 1
    if is_training:
        stop("is in training mode")
    call.constants(1, 2, 3, 4)
    call.mixes(call[0], *range(1, call[0].rank))
    return [Fact(call[0].shape)]


@rule("TopK")
def top(call: Call) -> Facts:
    x = call[0]
    axis = call.axis(x.rank, -1)
    call.mixes(x, axis)
    count = call.attribute("k") or call.numbers(1)[0]
    found = Fact([*x.shape[:axis], count, *x.shape[axis + 1 :]])
    return [found, found]


@rule("ReverseSequence")
def reverse(call: Call) -> Fact:
    x, lengths = call[0], call[1]
    call.mixes(x, call.attribute("time_axis", 0))
    batch = call.attribute("batch_axis", 1)
    if x.axis != (batch if lengths.is_rows else -1) or (x.is_rows and x.shape[batch] != lengths.shape[0]):
        stop("takes the length of each row from a constant")
    return Fact(x.shape)


@rule("Resize", "Upsample")
def resize(call: Call) -> Fact:
    x = call[0]
    if call.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        stop("crops the batch")
    if call.attribute("mode", "nearest") != "nearest" and x.is_rows and (x.axis > 0 or x.rank < _IMAGE_RANK):
        stop("interpolates along the batch axis, which spreads NaN and infinities to other rows even at scale 1")
    is_old = call.operator == "Upsample" or call.version < 11
    scales, sizes = (call.get(1), None) if is_old else (call.get(2), call.get(3))
    axes = [call.within(axis, x.rank) for axis in call.attribute("axes") or range(x.rank)]
    shape = list(x.shape)
    if sizes is not None and sizes.shape != (0,):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            stop("keeps the aspect ratio, so it can resize any axis")
        wanted = call.sizes(3)
        for axis, size in zip(axes, wanted, strict=True):
            if axis == x.axis and size != shape[axis]:
                stop("resizes the batch axis")
            shape[axis] = size
    elif scales is not None or call.attribute("scales"):
        given = list(call.attribute("scales") or call.numbers(1 if is_old else 2))
        for axis, scale in zip(axes, given, strict=True):
            if axis == x.axis and scale != 1:
                stop("resizes the batch axis")
            is_whole = isinstance(scale, float) and scale.is_integer()
            shape[axis] = times(shape[axis], int(scale)) if is_whole else result("scaled", shape[axis], scale)
    else:
        stop("has neither sizes nor scales")
    call.constants(*range(1, len(call.inputs)))
    if any(map(depends_on_batch, (size for axis, size in enumerate(shape) if axis != x.axis))):
        stop("computes with the batch size")
    return Fact(shape)
