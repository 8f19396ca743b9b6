"""Layers that compute each value by itself: activations, Power, Exp, Log, Eltwise, PReLU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from penstock.errors import InvalidModel
from penstock.offline.convert.caffe.layer import Layer, Shape, Writer, scalar
from penstock.offline.convert.caffe.prototxt import TextMessage
from penstock.tensor import Array


class FunctionLayer(Layer):
    """A function of one value. ``values`` and ``nodes`` compute it; both get the parameters."""

    values: ClassVar[Callable[[Array, TextMessage], Array]]
    nodes: ClassVar[Callable[[Writer, str, TextMessage], str]]

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        return np.asarray(type(self).values(x, self.given)).astype(np.float32)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        (x,) = bottoms
        return type(self).nodes(to, x, self.given)


def function(
    parameter: str, values: Callable[[Array, TextMessage], Array], nodes: Callable[[Writer, str, TextMessage], Any]
) -> type[Layer]:
    """The class of the layers that compute ``values``, and that ONNX computes by ``nodes``."""
    body = {"parameter": parameter, "values": staticmethod(values), "nodes": staticmethod(nodes)}
    return type("FunctionLayer", (FunctionLayer,), body)


def _affine(to: Writer, x: str, given: TextMessage) -> str:
    """``scale * x + shift``."""
    scale, shift = given.get("scale", 1.0), given.get("shift", 0.0)
    x = to.node("Mul", x, scalar(scale)) if scale != 1 else x
    return to.node("Add", x, scalar(shift)) if shift else x


def _shifted(x: Array, given: TextMessage) -> Array:
    return np.asarray(given.get("scale", 1.0) * x + given.get("shift", 0.0), np.float32)


def _log_of_base(given: TextMessage) -> float:
    """The natural logarithm of ``base``; -1 stands for e."""
    base = given.get("base", -1.0)
    if base != -1 and base <= 0:
        raise InvalidModel(f"'base' must be positive or -1, got {base:g}")
    return 1.0 if base == -1 else math.log(base)


def _write_relu(to: Writer, x: str, given: TextMessage) -> Any:
    slope = given.get("negative_slope", 0.0)
    return to.node("LeakyRelu", x, alpha=slope) if slope else to.node("Relu", x)


def _write_power(to: Writer, x: str, given: TextMessage) -> Any:
    power = given.get("power", 1.0)
    base = _affine(to, x, given)
    if power == 2:
        return to.node("Mul", base, base)
    return to.node("Pow", base, scalar(power)) if power != 1 else base


class Eltwise(Layer):
    """Product, weighted sum or maximum of its inputs, which have one shape."""

    parameter = "eltwise_param"

    def _operation(self, count: int) -> tuple[str, list[float]]:
        operation = self.given.get("operation", "SUM")
        factors = self.given.all("coeff", float)
        if operation not in ("PROD", "SUM", "MAX") or (factors and (operation != "SUM" or len(factors) != count)):
            raise InvalidModel(f"'operation' {operation} with {len(factors)} coefficient(s) for {count} inputs")
        return operation, factors or [1.0] * count

    def run(self, *bottoms: Array) -> Array:
        operation, factors = self._operation(len(bottoms))
        if len({one.shape for one in bottoms}) != 1:
            raise InvalidModel(f"its inputs have the shapes {[list(one.shape) for one in bottoms]}, which differ")
        if operation == "SUM":
            return reduce(np.add, (np.float32(f) * one for f, one in zip(factors, bottoms, strict=True)))
        return reduce(np.multiply if operation == "PROD" else np.maximum, bottoms)

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        operation, factors = self._operation(len(bottoms))
        terms = [
            one if factor == 1 else to.node("Mul", one, scalar(factor))
            for one, factor in zip(bottoms, factors, strict=True)
        ]
        op_type = {"PROD": "Mul", "SUM": "Add", "MAX": "Max"}[operation]
        return reduce(lambda one, other: to.node(op_type, one, other), terms)


class ParametricRelu(Layer):
    parameter = "prelu_param"

    def _slopes(self, shape: Shape) -> Array:
        if self.given.get("channel_shared", False):
            return self.blob(0, 1)
        return self.blob(0, shape[1], *[1] * (len(shape) - 2))

    def run(self, *bottoms: Array) -> Array:
        (x,) = bottoms
        return np.asarray(np.maximum(x, 0) + self._slopes(x.shape) * np.minimum(x, 0))

    def write(self, to: Writer, bottoms: list[str], shapes: list[Shape]) -> str:
        found: str = to.node("PRelu", *bottoms, self._slopes(shapes[0]))
        return found


LAYERS: dict[str, type[Layer]] = {
    "ReLU": function(
        "relu_param", lambda x, p: np.maximum(x, 0) + p.get("negative_slope", 0.0) * np.minimum(x, 0), _write_relu
    ),
    "ReLU6": function("", lambda x, p: np.clip(x, 0, 6), lambda to, x, p: to.node("Clip", x, scalar(0), scalar(6))),
    "ELU": function(
        "elu_param",
        lambda x, p: np.where(x > 0, x, p.get("alpha", 1.0) * np.expm1(np.minimum(x, 0))),
        lambda to, x, p: to.node("Elu", x, alpha=p.get("alpha", 1.0)),
    ),
    "Sigmoid": function("", lambda x, p: 0.5 * np.tanh(0.5 * x) + 0.5, lambda to, x, p: to.node("Sigmoid", x)),
    "TanH": function("", lambda x, p: np.tanh(x), lambda to, x, p: to.node("Tanh", x)),
    "AbsVal": function("", lambda x, p: np.abs(x), lambda to, x, p: to.node("Abs", x)),
    "BNLL": function(
        "",
        lambda x, p: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
        # Softplus of ONNX Runtime overflows to infinity for large values.
        lambda to, x, p: to.node("Add", to.node("Relu", x), to.node("Softplus", to.node("Neg", to.node("Abs", x)))),
    ),
    "Swish": function(
        "swish_param",
        lambda x, p: x * (0.5 * np.tanh(0.5 * p.get("beta", 1.0) * x) + 0.5),
        lambda to, x, p: to.node("Mul", x, to.node("Sigmoid", to.node("Mul", x, scalar(p.get("beta", 1.0))))),
    ),
    "Power": function("power_param", lambda x, p: _shifted(x, p) ** p.get("power", 1.0), _write_power),
    "Exp": function(
        "exp_param",
        lambda x, p: np.exp(_log_of_base(p) * _shifted(x, p)),
        lambda to, x, p: to.node("Exp", to.node("Mul", _affine(to, x, p), scalar(_log_of_base(p)))),
    ),
    "Log": function(
        "log_param",
        lambda x, p: np.log(_shifted(x, p)) / _log_of_base(p),
        lambda to, x, p: to.node("Div", to.node("Log", _affine(to, x, p)), scalar(_log_of_base(p))),
    ),
    "Threshold": function(
        "threshold_param",
        lambda x, p: x > p.get("threshold", 0.0),
        lambda to, x, p: to.node("Cast", to.node("Greater", x, scalar(p.get("threshold", 0.0))), to=1),
    ),
    "Clip": function(
        "clip_param",
        lambda x, p: np.clip(x, p.get("min", 0.0), p.get("max", 0.0)),
        lambda to, x, p: to.node("Clip", x, scalar(p.get("min", 0.0)), scalar(p.get("max", 0.0))),
    ),
    "Dropout": function("", lambda x, p: x, lambda to, x, p: x),
    "Eltwise": Eltwise,
    "PReLU": ParametricRelu,
}
