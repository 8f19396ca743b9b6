"""Layers that move values or choose some of them: Concat, Slice, Crop, Reshape, Permute, Flatten, Tile, Reduction, ArgMax."""

from __future__ import annotations

import numpy as np

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, check_size, scalar, whole
from penstock.tensor import Array


class SplitLayer(Layer):
    """Copies its input."""

    def run(self, *bottoms: Array) -> list[Array]:
        return [bottoms[0]] * len(self.tops)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> list[str]:
        return bottoms[:1] * len(self.tops)


class Concat(Layer):
    parameter = "concat_param"

    def _axis(self, rank: int) -> int:
        return self.axis(rank, name="concat_dim" if "concat_dim" in self.given else "axis")

    def run(self, *bottoms: Array) -> Array:
        return np.concatenate(bottoms, self._axis(bottoms[0].ndim))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Concat", *bottoms, axis=self._axis(len(shapes[0]))))


class Slice(Layer):
    parameter = "slice_param"

    def _parts(self, shape: Shape) -> tuple[int, list[int]]:
        """The axis, and the lengths of the parts."""
        axis = self.axis(len(shape), name="slice_dim" if "slice_dim" in self.given else "axis")
        count, size = len(self.tops), shape[axis]
        inner = self.given.all("slice_point", int) or [size * part // count for part in range(1, count)]
        lengths = np.diff([0, *inner, size]).tolist()
        if len(lengths) != count or min(lengths) <= 0:
            raise InvalidModel(f"'slice_point' {inner} does not divide {size} into {count} parts")
        return axis, lengths

    def run(self, *bottoms: Array) -> list[Array]:
        axis, lengths = self._parts(bottoms[0].shape)
        return np.split(bottoms[0], np.cumsum(lengths)[:-1], axis)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> list[str]:
        axis, lengths = self._parts(shapes[0])
        if len(lengths) == 1:
            return bottoms
        return list(to.node("Split", *bottoms, whole(*lengths), count=len(lengths), axis=axis))


class Crop(Layer):
    """Cuts the first input to the size of the second, from an axis on."""

    parameter = "crop_param"

    def _offsets(self, rank: int) -> tuple[int, list[int]]:
        axis = self.axis(rank, 2)
        offsets = self.given.all("offset", int) or [0]
        offsets = offsets * (rank - axis) if len(offsets) == 1 else offsets
        if len(offsets) != rank - axis or min(offsets) < 0:
            raise InvalidModel(f"'offset' is {offsets}, but {rank - axis} positive numbers are needed")
        return axis, offsets

    def run(self, *bottoms: Array) -> Array:
        x, like = bottoms
        axis, offsets = self._offsets(x.ndim)
        sizes = like.shape[axis:]
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, x.shape[axis:], strict=True)):
            raise ValueError(f"{list(like.shape)} at {offsets} does not fit into {list(x.shape)}")
        return x[(*[slice(None)] * axis, *(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)))]

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        x, like = bottoms
        axis, offsets = self._offsets(len(shapes[0]))
        ends = to.node("Add", to.node("Shape", like, start=axis), whole(*offsets))
        return str(to.node("Slice", x, whole(*offsets), ends, whole(*range(axis, len(shapes[0])))))


class ReshapeLayer(Layer):
    parameter = "reshape_param"

    def dims(self, shape: Shape) -> list[int]:
        """The new shape for ONNX: 0 copies the size in the same place, -1 takes what is left."""
        given, rank = self.given, len(shape)
        start = given.get("axis", 0)
        start = start if start >= 0 else rank + 1 + start
        count = given.get("num_axes", -1)
        end = rank if count == -1 else start + count
        if not 0 <= start <= end <= rank:
            raise InvalidModel(f"'axis' and 'num_axes' choose the axes {start} to {end} of {rank}")
        return [*[0] * start, *given.message("shape").all("dim", int), *shape[end:]]

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        dims = [x.shape[at] if dim == 0 else dim for at, dim in enumerate(self.dims(x.shape))]
        return x.reshape(dims)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Reshape", *bottoms, whole(*self.dims(shapes[0]))))


class Flatten(ReshapeLayer):
    parameter = "flatten_param"

    def dims(self, shape: Shape) -> list[int]:
        start, end = self.axis(len(shape)), self.axis(len(shape), -1, "end_axis")
        return [*[0] * start, -1, *shape[end + 1 :]]


class Permute(Layer):
    parameter = "permute_param"

    def _order(self, rank: int) -> list[int]:
        given = self.given.all("order", int)
        order = [*given, *(axis for axis in range(rank) if axis not in given)]
        if sorted(order) != list(range(rank)):
            raise InvalidModel(f"'order' is {given}, but its input has {rank} dimensions")
        return order

    def run(self, *bottoms: Array) -> Array:
        return np.ascontiguousarray(bottoms[0].transpose(self._order(bottoms[0].ndim)))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Transpose", *bottoms, perm=self._order(len(shapes[0]))))


class Tile(Layer):
    parameter = "tile_param"

    def _repeats(self, shape: Shape) -> list[int]:
        repeats = [1] * len(shape)
        repeats[self.axis(len(shape))] = self.given.get("tiles", 1)
        check_size([size * count for size, count in zip(shape, repeats, strict=True)])
        return repeats

    def run(self, *bottoms: Array) -> Array:
        return np.tile(bottoms[0], self._repeats(bottoms[0].shape))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Tile", *bottoms, whole(*self._repeats(shapes[0]))))


class Reduction(Layer):
    """Sums or averages all axes from one on."""

    parameter = "reduction_param"

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        axes = tuple(range(self.axis(x.ndim, 0), x.ndim))
        operation = self.given.get("operation", "SUM")
        terms = {"SUM": x, "MEAN": x, "ASUM": np.abs(x), "SUMSQ": x * x}[operation]
        found = terms.mean(axes) if operation == "MEAN" else terms.sum(axes)
        return np.asarray(found * np.float32(self.given.get("coeff", 1.0)))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        op_type = {"SUM": "Sum", "MEAN": "Mean", "ASUM": "L1", "SUMSQ": "SumSquare"}[self.given.get("operation", "SUM")]
        axes = whole(*range(self.axis(len(shapes[0]), 0), len(shapes[0])))
        found = to.node(f"Reduce{op_type}", *bottoms, axes, keepdims=0)
        return str(to.node("Mul", found, scalar(self.given.get("coeff", 1.0))))


class ArgMax(Layer):
    """The place of the largest value, as a float; of equal values the last one."""

    parameter = "argmax_param"

    def refusal(self) -> str:
        return "" if self.given.get("top_k", 1) == 1 else "'top_k' above 1"

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        is_along = "axis" in self.given
        if not is_along:
            x = x.reshape(len(x), 1, -1)
        axis = self.axis(x.ndim, 2)
        place = (x.shape[axis] - 1 - np.flip(x, axis).argmax(axis, keepdims=True)).astype(np.float32)
        if not self.given.get("out_max_val", False):
            return np.asarray(place)
        return (
            np.asarray(x.max(axis, keepdims=True))
            if is_along
            else np.concatenate([place, x.max(axis, keepdims=True)], 1)
        )

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        (x,) = bottoms
        is_along = "axis" in self.given
        if not is_along:
            x = to.node("Reshape", x, whole(0, 1, -1))
        axis = self.axis(len(shapes[0]), 2) if is_along else 2
        place = to.node("Cast", to.node("ArgMax", x, axis=axis, select_last_index=1), to=1)
        if not self.given.get("out_max_val", False):
            return str(place)
        largest = to.node("ReduceMax", x, whole(axis))
        return str(largest if is_along else to.node("Concat", place, largest, axis=1))


LAYERS: dict[str, type[Layer]] = {
    "Split": SplitLayer,
    "Concat": Concat,
    "Slice": Slice,
    "Crop": Crop,
    "Reshape": ReshapeLayer,
    "Flatten": Flatten,
    "Permute": Permute,
    "Tile": Tile,
    "Reduction": Reduction,
    "ArgMax": ArgMax,
}
