"""Faults of exporters, injected into ONNX graphs, to test that parity finds them and names the node.

Each fault is one that a real exporter has had: a lost bias, the default epsilon, another coordinate mode. ``inject`` changes one
random node to which the fault applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from penstock.tensor import Array

_NORMS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")
_ACTIVATIONS = (
    "Celu",
    "Clip",
    "Elu",
    "Erf",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Mish",
    "PRelu",
    "Relu",
    "Selu",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Softsign",
    "Tanh",
)


class Place:
    """One node of a model, and what a fault may change around it."""

    def __init__(self, model: onnx.ModelProto, index: int, rng: np.random.Generator) -> None:
        self.model, self.graph, self.node, self.rng = model, model.graph, model.graph.node[index], rng
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def attribute(self, name: str, default: Any = None) -> Any:
        found = next((each for each in self.node.attribute if each.name == name), None)
        return default if found is None else helper.get_attribute_value(found)

    def set(self, name: str, value: Any) -> bool:
        for at, each in enumerate(self.node.attribute):
            if each.name == name:
                del self.node.attribute[at]
                break
        self.node.attribute.append(helper.make_attribute(name, value))
        return True

    def constant(self, at: int) -> Array | None:
        name = self.node.input[at] if at < len(self.node.input) else ""
        if name in self._tensors:
            return np.array(numpy_helper.to_array(self._tensors[name]))
        made = next(
            (node for node in self.graph.node if name and name in node.output and node.op_type == "Constant"), None
        )
        found = [each for each in made.attribute if each.name == "value"] if made is not None else []
        return np.array(numpy_helper.to_array(found[0].t)) if found else None

    def put(self, at: int, array: Array) -> bool:
        """Give the node another constant; other readers keep theirs."""
        before = self.constant(at)
        if before is not None and before.shape == array.shape and np.array_equal(before, array):
            return False
        name = f"{self.node.input[at]}_changed"
        self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        self.node.input[at] = name
        return True

    def become(self, operator: str, inputs: int | None = None) -> bool:
        """Change the operator; attributes are dropped, and so are inputs beyond the first ``inputs``."""
        self.node.op_type, self.node.domain = operator, ""
        del self.node.attribute[:]
        if inputs is not None:
            del self.node.input[inputs:]
        return True

    def drop(self, at: int) -> bool:
        if at >= len(self.node.input) or not self.node.input[at]:
            return False
        if at == len(self.node.input) - 1:
            del self.node.input[at:]
        else:
            self.node.input[at] = ""
        return True

    def through(self, *casts: int) -> bool:
        """Send the node's result through casts."""
        if self.node.op_type == "Constant" or len(self.node.output) != 1:
            return False
        name, at = self.node.output[0], list(self.graph.node).index(self.node)
        self.node.output[0] = f"{name}_uncast"
        tensors = [f"{name}_uncast", *(f"{name}_cast{number}" for number in range(len(casts) - 1)), name]
        for number, kind in enumerate(casts):
            cast = helper.make_node(
                "Cast", [tensors[number]], [tensors[number + 1]], name=f"{name}_cast{number}", to=kind
            )
            self.graph.node.insert(at + 1 + number, cast)
        return True


class Fault(NamedTuple):
    operators: tuple[str, ...]
    """Operators to which the fault applies; empty: all."""
    change: Callable[[Place], bool]
    """Changes the place; False if the fault does not apply there."""


class Injected(NamedTuple):
    model: onnx.ModelProto
    guilty: tuple[str, ...]
    """Labels of the nodes of which the certificate must name one."""


def inject(model: onnx.ModelProto, name: str, rng: np.random.Generator) -> Injected | None:
    """``model`` with the fault ``name`` at a random place; None if it applies nowhere."""
    fault = FAULTS[name]
    indices = [at for at, node in enumerate(model.graph.node) if not fault.operators or node.op_type in fault.operators]
    for at in rng.permutation(indices):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        outputs = {output for node in changed.graph.node for output in node.output}
        place = Place(changed, int(at), rng)
        if fault.change(place):
            made = [
                node
                for node in changed.graph.node
                if node is place.node
                or not outputs.issuperset(node.output)
                or node.name.startswith(f"{place.node.output[0].removesuffix('_uncast')}_cast")
            ]
            return Injected(changed, tuple(_label(node) for node in (place.node, *made)))
    return None


def _label(node: onnx.NodeProto) -> str:
    return f"{node.name or next(filter(None, node.output), '')} ({node.op_type})"


def _epsilon(place: Place) -> bool:
    return place.set("epsilon", place.attribute("epsilon", 1e-5) * 100)


def _epsilon_constant(place: Place) -> bool:
    readers = [node for node in place.graph.node if place.node.output[0] in node.input]
    small = place.constant(1)
    if (
        small is None
        or small.size != 1
        or not 0 < small.item() < 1e-2
        or not any(each.op_type == "Sqrt" for each in readers)
    ):
        return False
    return place.put(1, small * 100)


def _other_axis(place: Place) -> bool:
    default = {"Softmax": -1, "LogSoftmax": -1, "LayerNormalization": -1, "ArgMax": 0, "ArgMin": 0}.get(
        place.node.op_type, 0
    )
    axis = place.attribute("axis", default)
    return place.set("axis", -2 if axis == -1 else axis - 1 if axis > 0 else axis + 1)


def _reduced_axis(place: Place) -> bool:
    axes = place.attribute("axes")
    if axes:
        return place.set("axes", [axis - 1 if axis > 0 else -2 if axis == -1 else axis + 1 for axis in axes])
    given = place.constant(1)
    return (
        given is not None
        and given.size > 0
        and place.put(1, np.where(given == -1, -2, np.where(given > 0, given - 1, given + 1)).astype(given.dtype))
    )


def _reversed(at: int, axis: int = 0) -> Callable[[Place], bool]:
    def change(place: Place) -> bool:
        array = place.constant(at)
        return array is not None and array.ndim > axis and place.put(at, np.flip(array, axis))

    return change


def _transposed(place: Place) -> bool:
    weight = place.constant(1)
    if weight is None or weight.ndim < 2 or weight.shape[-1] != weight.shape[-2]:
        return False
    return place.put(1, np.swapaxes(weight, -1, -2))


def _perm(place: Place) -> bool:
    perm = place.attribute("perm")
    if not perm or len(perm) < 2:
        return False
    at = int(place.rng.integers(0, len(perm) - 1))
    perm = list(perm)
    perm[at], perm[at + 1] = perm[at + 1], perm[at]
    return place.set("perm", perm)


def _swap(place: Place) -> bool:
    if len(place.node.input) < 2 or place.node.input[0] == place.node.input[1]:
        return False
    place.node.input[0], place.node.input[1] = place.node.input[1], place.node.input[0]
    return True


def _pads(place: Place) -> bool:
    """The padding of the end goes to the beginning."""
    pads = place.attribute("pads")
    if not pads or not any(pads):
        return False
    half = len(pads) // 2
    moved = [pads[at] + pads[half + at] for at in range(half)] + [0] * half
    return moved != list(pads) and place.set("pads", moved)


def _dilation(place: Place) -> bool:
    kernel = place.constant(1)
    pads = place.attribute("pads")
    if kernel is None or pads is None or max(kernel.shape[2:]) < 3 or place.attribute("dilations", [1])[0] != 1:
        return False
    place.set("dilations", [2] * (kernel.ndim - 2))
    return place.set("pads", [pad + (kernel.shape[2 + at % (kernel.ndim - 2)] - 1) // 2 for at, pad in enumerate(pads)])


def _groups(place: Place) -> bool:
    group, weight = place.attribute("group", 1), place.constant(1)
    if group < 2 or weight is None:
        return False
    return place.put(
        1,
        weight.reshape(group, -1, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)
        if weight.shape[0] > group
        else weight[::-1],
    )


def _number(name: str, default: float, change: Callable[[float], float]) -> Callable[[Place], bool]:
    return lambda place: place.set(name, change(place.attribute(name, default)))


def _flag(name: str, default: int = 0) -> Callable[[Place], bool]:
    return lambda place: place.set(name, 1 - place.attribute(name, default))


def _scaled(at: int, factor: float) -> Callable[[Place], bool]:
    def change(place: Place) -> bool:
        array = place.constant(at)
        return array is not None and array.dtype.kind == "f" and place.put(at, (array * factor).astype(array.dtype))

    return change


def _scalar(place: Place) -> bool:
    """The scale of an attention, or another factor."""
    for at in (1, 0):
        array = place.constant(at)
        if array is not None and array.size == 1 and array.dtype.kind == "f" and array.item() not in (0.0, 1.0):
            return place.put(at, (array * math.sqrt(2)).astype(array.dtype))
    return False


def _bias(place: Place) -> bool:
    for at in (1, 0):
        array = place.constant(at)
        if array is not None and array.ndim and array.size > 1 and array.dtype.kind == "f":
            return place.put(at, np.zeros_like(array))
    return False


def _offset(place: Place) -> bool:
    """A twentieth of the bias's size is added to all of its elements."""
    for at in (2, 1):
        array = place.constant(at)
        if array is not None and array.ndim == 1 and array.size > 1 and array.dtype.kind == "f":
            return place.put(at, (array + 0.05 * np.abs(array).mean()).astype(array.dtype))
    return False


def _shifted(at: int) -> Callable[[Place], bool]:
    def change(place: Place) -> bool:
        array = place.constant(at)
        return (
            array is not None
            and array.dtype.kind == "i"
            and array.size > 0
            and place.put(at, np.where(array > 0, array - 1, array + 1).astype(array.dtype))
        )

    return change


def _gates(at: int, gates: int) -> Callable[[Place], bool]:
    def change(place: Place) -> bool:
        weight = place.constant(at)
        if weight is None or weight.ndim != 3:
            return False
        parts = np.split(weight, gates, axis=1)
        parts[0], parts[1] = parts[1], parts[0]
        return place.put(at, np.concatenate(parts, 1))

    return change


def _coordinates(place: Place) -> bool:
    mode = place.attribute("coordinate_transformation_mode", b"half_pixel")
    return place.set("coordinate_transformation_mode", "asymmetric" if mode != b"asymmetric" else "half_pixel")


def _nearest(place: Place) -> bool:
    if place.attribute("mode", b"nearest") != b"nearest":
        return False
    mode = place.attribute("nearest_mode", b"round_prefer_floor")
    return place.set("nearest_mode", "ceil" if mode != b"ceil" else "floor")


def _one_weight(place: Place) -> bool:
    weight = place.constant(1)
    if weight is None or weight.dtype.kind != "f" or weight.ndim < 2:
        return False
    weight[np.unravel_index(int(np.abs(weight).argmax()), weight.shape)] *= 0.9
    return place.put(1, weight)


def _statistics(place: Place) -> bool:
    mean = place.constant(3)
    return mean is not None and place.put(3, np.zeros_like(mean))


def _direction(place: Place) -> bool:
    direction = place.attribute("direction", b"forward")
    return direction != b"bidirectional" and place.set("direction", "reverse" if direction == b"forward" else "forward")


def _outputs(place: Place) -> bool:
    outputs = place.node.output
    if len(outputs) < 2:
        return False
    outputs[0], outputs[1] = outputs[1], outputs[0]
    return True


def _last_two(place: Place) -> bool:
    place.node.input[1], place.node.input[2] = place.node.input[2], place.node.input[1]
    return True


def _equation(place: Place) -> bool:
    text = place.attribute("equation").decode()
    inputs, arrow, output = text.partition("->")
    first, comma, rest = inputs.partition(",")
    letters = [at for at, letter in enumerate(first) if letter.isalpha()]
    if len(letters) < 2:
        return False
    swapped = list(first)
    swapped[letters[-1]], swapped[letters[-2]] = swapped[letters[-2]], swapped[letters[-1]]
    return place.set("equation", "".join(swapped) + comma + rest + arrow + output)


def _mode(name: str, one: str, other: str) -> Callable[[Place], bool]:
    return lambda place: place.set(name, other if place.attribute(name, one.encode()) == one.encode() else one)


def _is_float(place: Place) -> bool:
    graph = onnx.shape_inference.infer_shapes(place.model).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    return bool(kinds.get(place.node.output[0]) == onnx.TensorProto.FLOAT)


def _becomes(operator: str, inputs: int | None = None) -> Callable[[Place], bool]:
    return lambda place: place.become(operator, inputs)


def _to_identity(place: Place) -> bool:
    return place.become("Identity", 1)


def _without_bias(place: Place) -> bool:
    return place.drop(2)


FAULTS = {
    "epsilon": Fault(_NORMS, _epsilon),
    "epsilon before a square root": Fault(("Add",), _epsilon_constant),
    "softmax axis": Fault(("Softmax", "LogSoftmax"), _other_axis),
    "layer norm axis": Fault(("LayerNormalization",), _other_axis),
    "argmax axis": Fault(("ArgMax", "ArgMin"), _other_axis),
    "gather axis": Fault(("Gather",), _other_axis),
    "reduced axis": Fault(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduced_axis),
    "mean for sum": Fault(("ReduceSum",), lambda place: _renamed(place, "ReduceMean")),
    "sum for mean": Fault(("ReduceMean",), lambda place: _renamed(place, "ReduceSum")),
    "keepdims": Fault(("ReduceMean", "ReduceSum", "ReduceMax", "ArgMax"), _flag("keepdims", 1)),
    "lost bias": Fault(("Conv", "Gemm", "ConvTranspose"), _without_bias),
    "zero bias": Fault(("Add",), _bias),
    "pads": Fault(("Conv", "MaxPool", "AveragePool", "ConvTranspose"), _pads),
    "rounding mode": Fault(("Round",), _becomes("Floor")),
    "floor for ceil": Fault(
        ("Ceil", "Floor"), lambda place: place.become("Floor" if place.node.op_type == "Ceil" else "Ceil")
    ),
    "transposed weights": Fault(("MatMul", "Gemm"), _transposed),
    "swapped inputs": Fault(("Sub", "Div", "Pow", "MatMul", "Less", "Greater"), _swap),
    "perm": Fault(("Transpose",), _perm),
    "alpha": Fault(("LeakyRelu", "Elu", "Celu", "ThresholdedRelu"), _number("alpha", 1.0, lambda alpha: alpha * 1.1)),
    "group order": Fault(("Conv",), _groups),
    "dilation": Fault(("Conv",), _dilation),
    "reversed kernel": Fault(("Conv", "ConvTranspose"), _reversed(1, 2)),
    "count_include_pad": Fault(("AveragePool",), _flag("count_include_pad")),
    "ceil_mode": Fault(("AveragePool", "MaxPool"), _flag("ceil_mode")),
    "max for average": Fault(
        ("AveragePool", "GlobalAveragePool"),
        lambda place: _renamed(place, place.node.op_type.replace("Average", "Max")),
    ),
    "coordinate mode": Fault(("Resize",), _coordinates),
    "nearest mode": Fault(("Resize",), _nearest),
    "dropped activation": Fault(_ACTIVATIONS, _to_identity),
    "slice start": Fault(("Slice",), _shifted(1)),
    "slice end": Fault(("Slice",), _shifted(2)),
    "lost statistics": Fault(("BatchNormalization",), _statistics),
    "biased variance": Fault(("BatchNormalization",), _scaled(4, 8 / 7)),
    "exclusive": Fault(("CumSum",), _flag("exclusive")),
    "reverse": Fault(("CumSum",), _flag("reverse")),
    "clip bound": Fault(("Clip",), lambda place: place.drop(2) or place.drop(1)),
    "cast to half": Fault(
        (), lambda place: _is_float(place) and place.through(onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
    ),
    "cast to integer": Fault(
        (), lambda place: _is_float(place) and place.through(onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)
    ),
    "approximate GELU": Fault(("Gelu",), _mode("approximate", "none", "tanh")),
    "tanh for erf": Fault(("Erf",), _becomes("Tanh")),
    "LSTM gate order": Fault(("LSTM",), _gates(1, 4)),
    "GRU gate order": Fault(("GRU",), _gates(2, 3)),
    "linear_before_reset": Fault(("GRU",), _flag("linear_before_reset")),
    "direction": Fault(("LSTM", "GRU", "RNN"), _direction),
    "factor": Fault(("Mul", "Div"), _scalar),
    "gathered index": Fault(("Gather",), _shifted(1)),
    "swapped branches": Fault(("Where",), _last_two),
    "or equal": Fault(("Greater", "Less"), lambda place: place.become(f"{place.node.op_type}OrEqual")),
    "last index": Fault(("ArgMax", "ArgMin"), _flag("select_last_index")),
    "smallest": Fault(("TopK",), _flag("largest", 1)),
    "beta": Fault(("Gemm",), _number("beta", 1.0, lambda beta: beta * 0.5)),
    "concat order": Fault(("Concat",), _swap),
    "split order": Fault(("Split",), _outputs),
    "pad mode": Fault(("Pad",), _mode("mode", "constant", "edge")),
    "one weight": Fault(("MatMul", "Gemm", "Conv", "ConvTranspose"), _one_weight),
    "swapped channels": Fault(("Conv", "Gemm"), _reversed(1)),
    "depth to space": Fault(("DepthToSpace",), _mode("mode", "DCR", "CRD")),
    "hard sigmoid": Fault(
        ("HardSigmoid",), _number("alpha", 0.2, lambda alpha: 1 / 6 if abs(alpha - 1 / 6) > 1e-3 else 0.2)
    ),
    "fmod": Fault(("Mod",), _flag("fmod")),
    "trilu": Fault(("Trilu",), _flag("upper", 1)),
    "equation": Fault(("Einsum",), _equation),
    "quantisation scale": Fault(("QuantizeLinear", "DequantizeLinear"), _scaled(1, 1.1)),
    "gain of 2 %": Fault(("Conv", "Gemm", "MatMul"), _scaled(1, 1.02)),
    "gain of 0.5 %": Fault(("Conv", "Gemm", "MatMul"), _scaled(1, 1.005)),
    "shifted bias": Fault(("Conv", "Gemm", "Add"), _offset),
    "max for mean": Fault(("ReduceMax",), lambda place: _renamed(place, "ReduceMean")),
    "GridSample corners": Fault(("GridSample",), _flag("align_corners")),
}


def _renamed(place: Place, operator: str) -> bool:
    place.node.op_type = operator
    return True
