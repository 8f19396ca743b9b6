"""Layers that scale, shift or weigh their input: InnerProduct, BatchNorm, Scale, Bias, Embed, MVN, Normalize, Softmax."""

from __future__ import annotations

import math

import numpy as np

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, check_size, scalar, whole
from penstock.tensor import Array


class InnerProduct(Layer):
    parameter = "inner_product_param"

    def _weights(self, shape: Shape) -> tuple[int, Array, Array]:
        """The axis from which on the input is flattened, the weights (inputs, outputs), and the bias."""
        axis, count = self.axis(len(shape)), self.given.get("num_output", 0)
        width = math.prod(shape[axis:])
        is_transposed = self.given.get("transpose", False)
        weights = self.blob(0, width, count) if is_transposed else self.blob(0, count, width).T
        bias = self.blob(1, count) if self.given.get("bias_term", True) else np.zeros(count, np.float32)
        return axis, weights, bias

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        axis, weights, bias = self._weights(x.shape)
        found: Array = x.reshape(*x.shape[:axis], -1) @ weights + bias
        return found

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        (x,) = bottoms
        axis, weights, bias = self._weights(shapes[0])
        if axis == 1:
            found: str = to.node("Gemm", to.node("Flatten", x, axis=1), weights.T, bias, transB=1)
            return found
        found = to.node("MatMul", to.node("Reshape", x, whole(*[0] * axis, -1)), weights)
        return str(to.node("Add", found, bias))


class BatchNorm(Layer):
    parameter = "batch_norm_param"

    def refusal(self) -> str:
        return "" if self.given.get("use_global_stats", True) else "'use_global_stats: false'"

    def _statistics(self, channels: int) -> tuple[Array, Array, float]:
        factor = float(self.blob(2, 1)[0])
        factor = 1 / factor if factor else 0.0
        return (
            self.blob(0, channels) * np.float32(factor),
            self.blob(1, channels) * np.float32(factor),
            self.given.get("eps", 1e-5),
        )

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        mean, variance, eps = self._statistics(x.shape[1])
        shape = (-1, *[1] * (x.ndim - 2))
        return np.asarray((x - mean.reshape(shape)) / np.sqrt(variance + np.float32(eps)).reshape(shape))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        channels = shapes[0][1]
        mean, variance, eps = self._statistics(channels)
        ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        found: str = to.node("BatchNormalization", *bottoms, ones, zeros, mean, variance, epsilon=eps)
        return found


class ScaleLayer(Layer):
    """Multiplies by weights, or by its second input, along some axes, and adds a bias if it has one."""

    parameter = "scale_param"

    def _span(self, shape: Shape, count: int | None) -> Shape:
        """The shape of the factors, with ones for the axes behind them. ``count`` is the rank of the second input, if given."""
        axis = self.axis(len(shape))
        if count is None:
            count = self.given.get("num_axes", 1)
            count = len(shape) - axis if count == -1 else count
        if count < 0 or axis + count > len(shape):
            raise InvalidModel(f"{count} axes from axis {axis} exceed the {len(shape)} dimensions of its input")
        return (*shape[axis : axis + count], *[1] * (len(shape) - axis - count))

    def _bias(self, span: Shape, first: int) -> Array | None:
        return self.blob(first, *span) if self.given.get("bias_term", False) else None

    def run(self, *bottoms: Array) -> Array:
        x, *others = bottoms
        span = self._span(x.shape, others[0].ndim if others else None)
        found = x * (others[0].reshape(span) if others else self.blob(0, *span))
        bias = self._bias(span, 0 if others else 1)
        return np.asarray(found if bias is None else found + bias)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        x, *others = bottoms
        span = self._span(shapes[0], len(shapes[1]) if others else None)
        found: str = to.node(
            "Mul", x, _trailing(to, others[0], len(shapes[1]), len(span)) if others else self.blob(0, *span)
        )
        bias = self._bias(span, 0 if others else 1)
        return found if bias is None else str(to.node("Add", found, bias))


class Bias(ScaleLayer):
    parameter = "bias_param"

    def run(self, *bottoms: Array) -> Array:
        x, *others = bottoms
        span = self._span(x.shape, others[0].ndim if others else None)
        return np.asarray(x + (others[0].reshape(span) if others else self.blob(0, *span)))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        x, *others = bottoms
        span = self._span(shapes[0], len(shapes[1]) if others else None)
        return str(
            to.node("Add", x, _trailing(to, others[0], len(shapes[1]), len(span)) if others else self.blob(0, *span))
        )


def _trailing(to: Writer, x: str, rank: int, wanted: int) -> str:
    """``x`` with further axes of length 1 at its end."""
    return str(to.node("Unsqueeze", x, whole(*range(rank, wanted)))) if rank < wanted else x


class Embed(Layer):
    parameter = "embed_param"

    def _table(self) -> Array:
        table = self.blob(0, self.given.get("input_dim", 0), self.given.get("num_output", 0))
        return table + self.blob(1, table.shape[1]) if self.given.get("bias_term", True) else table

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        ids, table = x.astype(np.int64), self._table()
        if ids.size and (ids.min() < 0 or ids.max() >= len(table)):
            raise ValueError(f"an index is outside of the {len(table)} rows")
        check_size([*ids.shape, table.shape[1]])
        found: Array = table[ids]
        return found

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Gather", self._table(), to.node("Cast", *bottoms, to=7)))


class MeanVariance(Layer):
    """MVN: subtracts the mean of each image, or of each of its channels, and divides by the standard deviation."""

    parameter = "mvn_param"

    def _axes(self, rank: int) -> tuple[int, ...]:
        return tuple(range(1 if self.given.get("across_channels", False) else 2, rank))

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        axes = self._axes(x.ndim)
        # A constant image has no variance, so any rounding of its mean would decide the result.
        found = x - x.mean(axes, np.float64, keepdims=True).astype(np.float32)
        if self.given.get("normalize_variance", True):
            found = found / (
                np.sqrt((found * found).mean(axes, keepdims=True)) + np.float32(self.given.get("eps", 1e-9))
            )
        return np.asarray(found)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        axes = whole(*self._axes(len(shapes[0])))
        found: str = to.node("Sub", *bottoms, to.node("ReduceMean", *bottoms, axes))
        if self.given.get("normalize_variance", True):
            deviation = to.node("Sqrt", to.node("ReduceMean", to.node("Mul", found, found), axes))
            found = to.node("Div", found, to.node("Add", deviation, scalar(self.given.get("eps", 1e-9))))
        return found


class Normalize(Layer):
    """Divides by the Euclidean norm over the channels, or over the whole image, and multiplies by a scale for each channel."""

    parameter = "norm_param"

    def _parts(self, shape: Shape) -> tuple[tuple[int, ...], Array, Array]:
        axes = tuple(range(1, len(shape))) if self.given.get("across_spatial", True) else (1,)
        is_shared = self.given.get("channel_shared", True)
        scale = self.blob(0, *([1] if is_shared else [shape[1], *[1] * (len(shape) - 2)]))
        return axes, scale, scalar(self.given.get("eps", 1e-10))

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        axes, scale, eps = self._parts(x.shape)
        return np.asarray(x / np.sqrt((x * x).sum(axes, keepdims=True) + eps) * scale)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        (x,) = bottoms
        axes, scale, eps = self._parts(shapes[0])
        squares = to.node("ReduceSum", to.node("Mul", x, x), whole(*axes))
        return str(to.node("Mul", to.node("Div", x, to.node("Sqrt", to.node("Add", squares, eps))), scale))


class SoftmaxLayer(Layer):
    parameter = "softmax_param"

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        axis = self.axis(x.ndim)
        powers = np.exp(x - x.max(axis, keepdims=True))
        return np.asarray(powers / powers.sum(axis, keepdims=True))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        return str(to.node("Softmax", *bottoms, axis=self.axis(len(shapes[0]))))


LAYERS: dict[str, type[Layer]] = {
    "InnerProduct": InnerProduct,
    "BatchNorm": BatchNorm,
    "Scale": ScaleLayer,
    "Bias": Bias,
    "Embed": Embed,
    "MVN": MeanVariance,
    "Normalize": Normalize,
    "Softmax": SoftmaxLayer,
}
