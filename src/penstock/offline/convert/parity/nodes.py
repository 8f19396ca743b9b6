"""Runs an ONNX graph node by node, as written or in double precision, from any tensors to any tensors.

A run in double precision shows how much of a difference rounding explains. A run from inner tensors shows which node is wrong.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner
from onnx.reference import ReferenceEvaluator

from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError, Unsupported
from penstock.offline.convert.parity.bodies import CONTROL_FLOW, Bodies, How, Noise, Values
from penstock.offline.convert.parity.ensembles import TreeEnsemble, ensemble_of
from penstock.offline.convert.parity.widened import widen_array, widened
from penstock.offline.optimize.graph import NON_DETERMINISTIC
from penstock.offline.optimize.mapped import array_of
from penstock.offline.optimize.names import reads, subgraphs
from penstock.tensor import Array, DataType

_KERNEL = {"threads": 1, "graph_level": "disabled", "arena": False, "spinning": False}
_EMBEDDED_ELEMENTS = 64
"""Constants up to this size become a part of a node's model, because some kernels require constants."""
_TRUSTED = 1e-3
"""Largest relative difference from ONNX Runtime's kernel at which the reference implementation counts as right."""
_SUMMING = frozenset(
    [
        "AveragePool",
        "BatchNormalization",
        "Conv",
        "ConvTranspose",
        "CumSum",
        "Einsum",
        "GRU",
        "Gemm",
        "GlobalAveragePool",
        "GroupNormalization",
        "InstanceNormalization",
        "LSTM",
        "LayerNormalization",
        "LinearClassifier",
        "LinearRegressor",
        "LpPool",
        "MatMul",
        "Mean",
        "MeanVarianceNormalization",
        "Normalizer",
        "RMSNormalization",
        "RNN",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceSum",
        "ReduceSumSquare",
        "SVMClassifier",
        "SVMRegressor",
        "Sum",
    ]
)
"""Operators that add many values. Their results can be exact by luck, such as the mean of equal values."""
_WEIGHTED = frozenset({"LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor"})
"""Operators that multiply the values by attributes, so that not even sums of whole numbers are exact."""
_SORTING = frozenset({"NonMaxSuppression", "TopK"})
_SLOW = frozenset({"AveragePool", "ConvTranspose", "GlobalAveragePool", "LpPool", "LRN", "Resize"})
_SLOW_ELEMENTS = 1 << 14
"""Larger inputs of these operators take the reference implementation seconds."""
_OTHER_FLOATS = frozenset({DataType.FP16.onnx, DataType.BF16.onnx, DataType.FP64.onnx})
_Kernel = Callable[[Values], list[Any]]


class NodeError(PenstockError):
    """A node failed. ``node`` names it."""

    node: str = ""


class Nodes:
    """The nodes of ``proto`` with their kernels, which are made when first used. One thread may use it at a time."""

    def __init__(self, proto: onnx.ModelProto, parent: Nodes | None = None, outer: Collection[str] = ()) -> None:
        """``parent`` and ``outer``, the tensors around it, are those of the body of a control-flow node."""
        self.proto = inliner.inline_local_functions(proto) if proto.functions else proto
        graph = self.proto.graph
        self.constants: Values = {tensor.name: array_of(tensor) for tensor in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.outputs = [value.name for value in graph.output]
        self.makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
        known = {*self.constants, *self.inputs, *self.makers, *outer}
        self.reads = [reads(node) & known for node in graph.node]
        self._kernels: dict[tuple[object, ...], _Kernel] = {}
        self.rounded: set[str] = parent.rounded if parent else set()
        """Tensors that are FP32 even in double precision, because no kernel computes them otherwise. Known after a run."""
        self.sum_errors: Values = {}
        """The rounding of sums of leaves, in units in the last place of 1. It is that of the last run in double precision."""
        self.float_types: dict[str, np.dtype[Any]] = parent.float_types if parent else _float_types(self.proto)
        """The tensors with a float type other than FP32, also those within bodies."""
        self.quantised = frozenset(node.output[0] for node in graph.node if node.op_type == "QuantizeLinear")
        """The tensors of quantised values."""
        self._is_body = parent is not None
        self._bodies: dict[int, Bodies] = {}

    @cached_property
    def stored(self) -> Values:
        """All constants of the outer graph, also those of Constant nodes."""
        made = {
            node.output[0]: array_of(each.t)
            for node in self.proto.graph.node
            if node.op_type == "Constant"
            for each in node.attribute
            if each.name == "value"
        }
        return self.constants | made

    @cached_property
    def is_narrow(self) -> bool:
        """True if a node computes a tensor of FP16 or BF16."""
        outside = {*self.inputs, *self.constants}
        return any(kind.itemsize == 2 for name, kind in self.float_types.items() if name not in outside)

    @cached_property
    def steps(self) -> dict[str, Array]:
        """The tensors that are quantised, with the size of a step. Steps that depend on the inputs are left out."""
        found = {}
        for node in self.proto.graph.node:
            if node.op_type == "QuantizeLinear":
                with contextlib.suppress(
                    PenstockError
                ):  # exporters also write a step as the output of nodes without inputs
                    step = self.run({}, [node.input[1]])[node.input[1]]
                    found[node.input[0]] = np.max(step).astype(np.float64)
        return found

    def needed(self, wanted: Collection[str], given: Collection[str]) -> list[int]:
        """The nodes that compute ``wanted`` from ``given``, in order."""
        found: set[int] = set()
        open_names = [name for name in wanted if name not in given]
        while open_names:
            index = self.makers.get(open_names.pop())
            if index is not None and index not in found:
                found.add(index)
                open_names += [name for name in self.reads[index] if name not in given]
        return sorted(found)

    def run(
        self,
        given: Mapping[str, Any],
        wanted: Collection[str],
        *,
        precise: bool = False,
        noise: Noise | None = None,
        seen: Callable[[Values], None] | None = None,
    ) -> Values:
        """Compute the tensors ``wanted`` from the tensors ``given``. ``seen`` gets the outputs of every node.

        Raises NodeError if a node fails. Raises PenstockError if ``given`` does not suffice.
        """
        order = self.needed(wanted, given)
        last = {name: index for index in order for name in self.reads[index]}
        values: Values = {}
        for name, original in given.items():
            value = widen_array(original) if precise and isinstance(original, np.ndarray) else original
            # Inputs are the same in the source; inner tensors contain the rounding of the source.
            is_inner = name not in self.inputs
            changes = noise is not None and not self._is_body and _is_array(value)
            values[name] = noise(name, value, "all" if is_inner else "inexact") if noise and changes else value
        for index in order:
            node = self.proto.graph.node[index]
            if missing := [name for name in self.reads[index] if name not in values and name not in self.constants]:
                raise PenstockError(f"the tensor '{missing[0]}' is not given, and no node computes it")
            inputs = {
                name: values[name] if name in values else self._constant(name, precise) for name in self.reads[index]
            }
            if noise and node.op_type in _SUMMING | _SORTING:
                # Rounding within the sums of a node has the effect of a change of its inputs. The order of equal values is undefined.
                how: How = "tied" if node.op_type in _SORTING else "scaled" if node.op_type in _WEIGHTED else "all"
                inputs = {
                    name: noise(name, one, how) if _is_array(one) and one.size > 1 else one
                    for name, one in inputs.items()
                }
            if precise and (bodies := self._narrow_bodies(index)):
                results = bodies.run(inputs, noise=noise, seen=seen)
            else:
                results = self._call(index, inputs, precise)
            made = dict(zip(filter(None, node.output), results, strict=False))
            if noise:
                made = {
                    name: noise(name, one, "inexact") if isinstance(one, np.ndarray) else one
                    for name, one in made.items()
                }
            if seen:
                seen(made)
            values |= made
            for name in self.reads[index]:
                if last[name] == index and name not in wanted:
                    values.pop(name, None)
        if missing := [name for name in wanted if name not in values and name not in self.constants]:
            raise PenstockError(f"no node computes the tensor '{missing[0]}'")
        return {name: values[name] if name in values else self.constants[name] for name in wanted}

    def label(self, index: int) -> str:
        """The name of a node with its operator; the name of its output if it has no name."""
        node = self.proto.graph.node[index]
        return f"{node.name or next(filter(None, node.output), '')} ({node.op_type})"

    def random(self) -> list[int]:
        """The nodes that give random results."""
        return [index for index, node in enumerate(self.proto.graph.node) if _is_random(node, self.constants)]

    def has_loop(self) -> bool:
        """True if the number of steps can depend on values, so that a call might not end."""
        return any(_is_loop(node) for node in self.proto.graph.node)

    def dependent(self, indices: Collection[int]) -> set[str]:
        """All tensors that depend on the nodes ``indices``."""
        found: set[str] = set()
        for index, node in enumerate(self.proto.graph.node):
            if index in indices or not found.isdisjoint(self.reads[index]):
                found.update(filter(None, node.output))
        return found

    def _narrow_bodies(self, index: int) -> Bodies | None:
        """The bodies of a control-flow node that round to FP16 or BF16, which only a run of their nodes shows."""
        node = self.proto.graph.node[index]
        if node.op_type not in CONTROL_FLOW:
            return None
        if index not in self._bodies:
            names = (name for graph in subgraphs(node) for each in graph.node for name in each.output)
            is_narrow = any(name in self.float_types and self.float_types[name].itemsize == 2 for name in names)
            outer = set(self.reads[index])
            made = {
                each.name: Nodes(
                    helper.make_model(each.g, opset_imports=self.proto.opset_import, ir_version=self.proto.ir_version),
                    self,
                    outer,
                )
                for each in node.attribute
                if is_narrow and each.HasField("g")
            }
            self._bodies[index] = Bodies(node, made)
        return self._bodies[index] if self._bodies[index].graphs else None

    def _constant(self, name: str, precise: bool) -> Array:
        array: Array = self.constants[name]
        return widen_array(array) if precise else array

    def _call(self, index: int, inputs: Values, precise: bool) -> list[Any]:
        kinds = {name: _kind(value) for name, value in inputs.items()}
        key = (index, precise, *sorted(kinds.items()))
        kernel = self._kernels.get(key)
        try:
            if kernel is None:
                kernel = self._kernels[key] = self._choose(index, inputs, precise)
            return kernel(inputs)
        except Exception as error:  # kernels raise exceptions of every kind
            reason = error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
            failure = NodeError(f"node '{self.label(index)}' fails: {reason}")
            failure.node = self.label(index)
            raise failure from error

    def _choose(self, index: int, inputs: Values, precise: bool) -> _Kernel:
        node = self.proto.graph.node[index]
        if precise:
            if (ensemble := ensemble_of(node)) is not None:
                return self._summed(index, inputs, ensemble)
            node = widened(node)
        if precise and any(isinstance(one, np.ndarray) and one.dtype == np.float64 for one in inputs.values()):
            try:
                return self._checked(self._engine(index, inputs, node), inputs, node)
            except Exception:  # noqa: BLE001 - ONNX Runtime lacks many kernels for double
                return self._second(index, inputs, node)
        try:
            kernel = self._engine(index, inputs, node)
        except Unsupported:  # sequences
            kernel = self._reference(index, inputs, node)
        return (
            _widening(kernel) if precise else kernel
        )  # some operators, such as OneHotEncoder, make FP32 of other types

    def _summed(self, index: int, inputs: Values, ensemble: TreeEnsemble) -> _Kernel:
        """The sums of ``ensemble`` in double precision. A run notes their rounding in ``sum_errors``."""
        kernel, (output,) = self._engine(index, inputs, ensemble.node), ensemble.node.output

        def run(values: Values) -> list[Any]:
            (numbers,) = kernel(values)
            sums = ensemble.sums(numbers)
            self.sum_errors[output] = sums.error
            return [sums.values]

        return run

    def _checked(self, kernel: _Kernel, inputs: Values, node: onnx.NodeProto) -> _Kernel:
        """``kernel``, if it runs. Ensembles of trees take doubles, but give FP32."""
        if any(isinstance(one, np.ndarray) and one.dtype == np.float32 for one in kernel(inputs)):
            return self._mark_rounded(node, _widening(kernel))
        return _widening(kernel)

    def _second(self, index: int, inputs: Values, node: onnx.NodeProto) -> _Kernel:
        """The reference implementation if it agrees with ONNX Runtime on ordinary values, otherwise ONNX Runtime in FP32."""
        narrow = self._narrow(index, inputs)
        sizes = [value.size for value in inputs.values() if isinstance(value, np.ndarray)]
        if node.op_type in _SLOW and max(sizes) > _SLOW_ELEMENTS:
            return self._mark_rounded(node, narrow)
        try:
            reference = self._reference(index, inputs, node)
            ordinary = _ordinary(inputs, self.constants)
            found = reference(ordinary)
            if not all(map(_is_close, found, narrow(ordinary))):
                return self._mark_rounded(node, narrow)
        except Exception:  # noqa: BLE001 - the reference implementation is incomplete
            return self._mark_rounded(node, narrow)
        if any(isinstance(one, np.ndarray) and one.dtype == np.float32 for one in found):
            return self._mark_rounded(node, _widening(reference))
        return _widening(reference)

    def _mark_rounded(self, node: onnx.NodeProto, kernel: _Kernel) -> _Kernel:
        self.rounded.update(node.output)
        return kernel

    def _narrow(self, index: int, inputs: Values) -> _Kernel:
        kernel = self._engine(index, _narrowed(inputs), self.proto.graph.node[index])
        return _widening(lambda values: kernel(_narrowed(values)))

    def _engine(self, index: int, inputs: Values, node: onnx.NodeProto) -> _Kernel:
        embedded = {
            name for name, value in inputs.items() if name in self.constants and value.size <= _EMBEDDED_ELEMENTS
        }
        fed = {name: value for name, value in inputs.items() if name not in embedded}
        outputs = [name for name in node.output if name]
        graph = helper.make_graph(
            [node],
            "node",
            [_declared(name, value) for name, value in fed.items()],
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [onnx.numpy_helper.from_array(np.asarray(inputs[name]), name) for name in embedded],
        )
        proto = helper.make_model(graph, opset_imports=self.proto.opset_import, ir_version=self.proto.ir_version)
        model = get_engine("onnxruntime").load(Artifact.from_bytes(proto.SerializeToString()), _KERNEL)
        if model.left_out:
            raise Unsupported("the node makes a value that is not a tensor")

        def run(values: Values) -> list[Any]:
            found = model.forward({name: values[name] for name in fed})
            return [found[name] for name in outputs]

        return run

    def _reference(self, index: int, inputs: Values, node: onnx.NodeProto) -> _Kernel:
        graph = helper.make_graph(
            [node],
            "node",
            [onnx.ValueInfoProto(name=name) for name in inputs],
            [onnx.ValueInfoProto(name=name) for name in node.output if name],
        )
        proto = helper.make_model(graph, opset_imports=self.proto.opset_import, ir_version=self.proto.ir_version)
        evaluator = ReferenceEvaluator(proto)

        def run(values: Values) -> list[Any]:
            with warnings.catch_warnings(action="ignore"):  # numpy warns of NaN, which may be the right result
                results = evaluator.run(None, values)
            # Results of rank 0 are numpy scalars.
            return [np.asarray(one) if isinstance(one, np.generic) else one for one in results]

        return run


def _widening(kernel: _Kernel) -> _Kernel:
    """``kernel`` with float64 in place of other floats, as after a cast to FP16 that is a part of the model."""
    return lambda values: [widen_array(one) if isinstance(one, np.ndarray) else one for one in kernel(values)]


def _declared(name: str, value: Any) -> onnx.ValueInfoProto:
    if not isinstance(value, np.ndarray):
        raise Unsupported(f"'{name}' is not a tensor")
    # Shape inference of some operators needs the length of a list of sizes.
    shape = list(value.shape) if _is_list(value) else [None] * value.ndim
    declared: onnx.ValueInfoProto = helper.make_tensor_value_info(name, DataType.from_numpy(value.dtype).onnx, shape)
    return declared


def _kind(value: Any) -> tuple[object, ...]:
    if not isinstance(value, np.ndarray):
        return ("sequence",)
    return value.dtype.name, value.shape if _is_list(value) else value.ndim


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _is_list(value: Array) -> bool:
    return value.ndim == 1 and value.dtype.kind == "i"


def _narrowed(values: Values) -> Values:
    return {
        name: value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float64 else value
        for name, value in values.items()
    }


def _ordinary(inputs: Values, constants: Values) -> Values:
    """``inputs`` with random numbers in place of computed floats, on which all kernels are well conditioned."""
    rng = np.random.default_rng(0)
    return {
        name: rng.uniform(0.1, 1.0, value.shape)
        if name not in constants and isinstance(value, np.ndarray) and value.dtype == np.float64
        else value
        for name, value in inputs.items()
    }


def _is_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, np.ndarray | np.generic) or not isinstance(theirs, np.ndarray):
        return False
    if ours.shape != theirs.shape:
        return False
    if ours.dtype.kind != "f":
        return bool(np.array_equal(ours, theirs))
    scale = np.abs(theirs).max(initial=0.0)
    return bool(np.abs(ours - theirs).max(initial=0.0) <= _TRUSTED * scale)


def _is_random(node: onnx.NodeProto, constants: Values) -> bool:
    if node.op_type == "Dropout" and node.domain == "":
        return len(node.input) > 2 and bool(node.input[2]) and bool(np.any(constants.get(node.input[2], True)))
    inner = (each for graph in subgraphs(node) for each in graph.node)
    return node.op_type in NON_DETERMINISTIC or any(_is_random(each, constants) for each in inner)


def _is_loop(node: onnx.NodeProto) -> bool:
    return node.op_type == "Loop" or any(_is_loop(each) for graph in subgraphs(node) for each in graph.node)


def _float_types(proto: onnx.ModelProto) -> dict[str, np.dtype[Any]]:
    with contextlib.suppress(Exception):  # types that inference cannot find count as FP32
        proto = onnx.shape_inference.infer_shapes(proto)
    return dict(_types_within(proto.graph))


def _types_within(graph: onnx.GraphProto) -> Iterator[tuple[str, np.dtype[Any]]]:
    kinds = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    yield from ((name, DataType.from_onnx(kind).dtype) for name, kind in kinds.items() if kind in _OTHER_FLOATS)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _types_within(inner)
