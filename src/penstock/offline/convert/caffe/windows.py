"""Layers that slide a window over the image: Convolution, Deconvolution, Pooling, LRN. Any number of spatial axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, check_size, scalar
from penstock.offline.convert.caffe.prototxt import TextMessage
from penstock.tensor import Array


def sizes(given: TextMessage, name: str, axes: int, default: int = 0, short: str = "") -> list[int]:
    """The parameter ``name`` for each spatial axis: given once, for every axis, or as ``kernel_h`` and ``kernel_w``."""
    short = short or name
    if f"{short}_h" in given or f"{short}_w" in given:
        values = [given.get(f"{short}_h", default), given.get(f"{short}_w", default)]
    else:
        values = given.all(name, int) or [default]
    values = values * axes if len(values) == 1 else values
    if len(values) != axes or min(values, default=0) < (0 if name == "pad" else 1):
        raise InvalidModel(f"'{name}' is {values}, but positive numbers for {axes} axes are needed")
    return values


def windows_of(image: Array, kernel: list[int], stride: list[int], dilation: list[int]) -> Array:
    """A view of every window: the axes of ``image``, then one axis of the kernel for each spatial axis."""
    axes = len(kernel)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    view = sliding_window_view(image, reach, axis=tuple(range(2, 2 + axes)))
    steps = [
        slice(None),
        slice(None),
        *(slice(None, None, s) for s in stride),
        *(slice(None, None, d) for d in dilation),
    ]
    found: Array = view[tuple(steps)]
    return found


def padded(image: Array, before: list[int], after: list[int], value: float = 0.0) -> Array:
    check_size([size + b + a for size, b, a in zip(image.shape, [0, 0, *before], [0, 0, *after], strict=True)])
    return np.pad(image, [(0, 0), (0, 0), *zip(before, after, strict=True)], constant_values=value)


class Convolution(Layer):
    parameter = "convolution_param"

    def geometry(self, rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Kernel, stride, pad and dilation of each spatial axis."""
        if self.axis(rank) != 1 or rank < 3:
            raise InvalidModel(
                f"its input has {rank} dimensions, but at least 3 are needed, and the channels on axis 1"
            )
        axes, given = rank - 2, self.given
        kernel = sizes(given, "kernel_size", axes, short="kernel")
        return (
            kernel,
            sizes(given, "stride", axes, 1),
            sizes(given, "pad", axes),
            sizes(given, "dilation", axes, 1),
        )

    def weights(self, channels: int, kernel: list[int]) -> tuple[Array, Array | None, int]:
        """Weights, bias and number of groups."""
        count, group = self.given.get("num_output", 0), self.given.get("group", 1)
        if count < 1 or group < 1 or count % group or channels % group:
            raise InvalidModel(f"{channels} inputs and {count} outputs cannot be divided into {group} group(s)")
        bias = self.blob(1, count) if self.given.get("bias_term", True) else None
        return self.blob(0, *self.weight_shape(channels, count, group), *kernel), bias, group

    def weight_shape(self, channels: int, count: int, group: int) -> Shape:
        return count, channels // group

    def run(self, *bottoms: Array) -> Array | list[Array]:
        return [self.run_one(image) for image in bottoms]

    def run_one(self, image: Array) -> Array:
        kernel, stride, pad, dilation = self.geometry(image.ndim)
        weights, bias, group = self.weights(image.shape[1], kernel)
        windows = windows_of(padded(image, pad, pad), kernel, stride, dilation)
        axes, width = len(kernel), image.shape[1] // group
        parts = [
            # The sum over the channels and the kernel of one group.
            np.tensordot(
                windows[:, number * width : (number + 1) * width],
                part,
                ([1, *range(2 + axes, 2 + 2 * axes)], list(range(1, 2 + axes))),
            )
            for number, part in enumerate(np.split(weights, group))
        ]
        found = np.moveaxis(np.concatenate(parts, -1), -1, 1)
        return found if bias is None else found + bias.reshape(-1, *[1] * axes)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> list[str]:
        op_type = "ConvTranspose" if isinstance(self, Deconvolution) else "Conv"
        kernel, stride, pad, dilation = self.geometry(len(shapes[0]))
        weights, bias, group = self.weights(shapes[0][1], kernel)
        constants = [to.constant(one) for one in (weights, bias) if one is not None]
        geometry: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "pads": pad * 2, "dilations": dilation}
        return [to.node(op_type, bottom, *constants, group=group, **geometry) for bottom in bottoms]


class Deconvolution(Convolution):
    def weight_shape(self, channels: int, count: int, group: int) -> Shape:
        return channels, count // group

    def run_one(self, image: Array) -> Array:
        kernel, stride, pad, dilation = self.geometry(image.ndim)
        weights, bias, group = self.weights(image.shape[1], kernel)
        spatial = image.shape[2:]
        full = [s * (n - 1) + d * (k - 1) + 1 for n, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)]
        count = weights.shape[1] * group
        check_size([len(image), count, *full])
        found = np.zeros((len(image), count, *full), np.float32)
        for place in np.ndindex(*kernel):
            parts = [
                np.tensordot(part, weight[(..., *place)], ([1], [0]))
                for part, weight in zip(np.split(image, group, 1), np.split(weights, group), strict=True)
            ]
            region = [
                slice(at * d, at * d + s * (n - 1) + 1, s)
                for at, n, s, d in zip(place, spatial, stride, dilation, strict=True)
            ]
            found[(slice(None), slice(None), *region)] += np.moveaxis(np.concatenate(parts, -1), -1, 1)
        if any(2 * p >= size for size, p in zip(full, pad, strict=True)):
            raise InvalidModel(f"'pad' is {pad}, which leaves nothing of {full}")
        found = found[(slice(None), slice(None), *(slice(p, size - p) for size, p in zip(full, pad, strict=True)))]
        return found if bias is None else found + bias.reshape(-1, *[1] * len(kernel))


class Pooling(Layer):
    parameter = "pooling_param"

    def geometry(self, spatial: Shape) -> dict[str, list[int]]:
        """Kernel, stride and pad, and the size of the result by Caffe's rule: round up, but no window begins in the padding."""
        if self.given.get("global_pooling", False):
            return {
                "kernel": list(spatial),
                "stride": [1] * len(spatial),
                "pad": [0] * len(spatial),
                "size": [1] * len(spatial),
            }
        kernel = sizes(self.given, "kernel_size", len(spatial), short="kernel")
        stride, pad = sizes(self.given, "stride", len(spatial), 1), sizes(self.given, "pad", len(spatial))
        found = []
        for n, k, s, p in zip(spatial, kernel, stride, pad, strict=True):
            room = n + 2 * p - k
            size = (-(-room // s) if self.rounds_up else room // s) + 1
            if p and (size - 1) * s >= n + p:
                size -= 1
            if size < 1 or p >= k or (size - 1) * s >= n + p:
                raise InvalidModel(f"a window of kernel {k}, stride {s} and pad {p} lies outside of {n} pixels")
            found.append(size)
        return {"kernel": kernel, "stride": stride, "pad": pad, "size": found}

    @property
    def rounds_up(self) -> bool:
        return self.given.get("ceil_mode", True) and self.given.get("round_mode", "CEIL") == "CEIL"

    @property
    def is_max(self) -> bool:
        return self.given.get("pool", "MAX") == "MAX"

    def refusal(self) -> str:
        method = self.given.get("pool", "MAX")
        return "" if method in ("MAX", "AVE") else f"'pool: {method}'"

    def run(self, *bottoms: Array) -> Array:
        (image,) = bottoms
        at = self.geometry(image.shape[2:])
        kernel, stride, pad, size = at["kernel"], at["stride"], at["pad"], at["size"]
        spatial = image.shape[2:]
        after = [
            max(0, (m - 1) * s + k - n - p) for m, s, k, n, p in zip(size, stride, kernel, spatial, pad, strict=True)
        ]
        filled = padded(image, pad, after, -np.inf if self.is_max else 0.0)
        windows = windows_of(filled, kernel, stride, [1] * len(kernel))
        windows = windows[(slice(None), slice(None), *map(slice, size))]
        axes = tuple(range(-len(kernel), 0))
        if self.is_max:
            return np.asarray(windows.max(axes))
        # A window counts the padding, but not what lies behind it.
        counts: Any = 1
        for n, m, s, k, p in zip(spatial, size, stride, kernel, pad, strict=True):
            begins = np.arange(m) * s - p
            counts = np.multiply.outer(counts, np.minimum(begins + k, n + p) - begins)
        return np.asarray((windows.sum(axes) / counts).astype(np.float32))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        at = self.geometry(shapes[0][2:])
        kind = "MaxPool" if self.is_max else "AveragePool"
        if self.given.get("global_pooling", False):
            return str(to.node(f"Global{kind}", *bottoms))
        extra = {} if self.is_max else {"count_include_pad": 1}
        geometry: dict[str, Any] = {"kernel_shape": at["kernel"], "strides": at["stride"], "pads": at["pad"] * 2}
        return str(to.node(kind, *bottoms, **geometry, ceil_mode=int(self.rounds_up), **extra))


class LocalResponse(Layer):
    """LRN: divides by a power of the mean square of the neighbours, in the same place of other channels or in the same channel."""

    parameter = "lrn_param"

    @property
    def is_within(self) -> bool:
        return self.given.get("norm_region", "ACROSS_CHANNELS") == "WITHIN_CHANNEL"

    @property
    def numbers(self) -> tuple[int, float, float, float]:
        """Size, alpha, beta and k."""
        size = self.given.get("local_size", 5)
        if size < 1 or size % 2 == 0:
            raise InvalidModel(f"'local_size' must be an odd number, got {size}")
        k = 1.0 if self.is_within else self.given.get("k", 1.0)
        return size, self.given.get("alpha", 1.0), self.given.get("beta", 0.75), k

    def run(self, *bottoms: Array) -> Array:
        (image,) = bottoms
        size, alpha, beta, k = self.numbers
        reach = size // 2
        squares = image * image
        if self.is_within:
            windows = windows_of(padded(squares, [reach] * 2, [reach] * 2), [size] * 2, [1] * 2, [1] * 2)
            mean = windows.sum((-2, -1)) / size**2
        else:
            check_size([len(image), image.shape[1] + 2 * reach, *image.shape[2:]])
            filled = np.pad(squares, [(0, 0), (reach, reach), *[(0, 0)] * (image.ndim - 2)])
            mean = sliding_window_view(filled, size, axis=1).sum(-1) / size
        return np.asarray((image * (k + alpha * mean) ** -beta).astype(np.float32))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        size, alpha, beta, k = self.numbers
        (image,) = bottoms
        if not self.is_within:
            return str(to.node("LRN", image, size=size, alpha=alpha, beta=beta, bias=k))
        squares = to.node("Mul", image, image)
        mean = to.node("AveragePool", squares, kernel_shape=[size] * 2, pads=[size // 2] * 4, count_include_pad=1)
        sums = to.node("Add", to.node("Mul", mean, scalar(alpha)), scalar(k))
        return str(to.node("Div", image, to.node("Pow", sums, scalar(beta))))


LAYERS: dict[str, type[Layer]] = {
    "Convolution": Convolution,
    "ConvolutionDepthwise": Convolution,
    "DepthwiseConvolution": Convolution,
    "Deconvolution": Deconvolution,
    "Pooling": Pooling,
    "LRN": LocalResponse,
}
