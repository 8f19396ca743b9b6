"""Convert a model that computes in FP16, BF16 or FP64 to FP32.

Weights and tensors inside the model become FP32. Inputs and outputs keep their names and types; a Cast connects them. Three parts of a
model keep their types, between Casts:

1. Numbers that become integers, booleans or text, that decide sizes (Range, Resize), and the arithmetic before them. One rounding
   could change a length.
2. Operators of other domains, whose types are not known to be interchangeable.
3. Constants and inputs, where parts 1 and 2 or the caller read them.

Values of FP64 constants beyond the range of FP32 become its largest value, and values too small for FP32 its smallest normal value, so
that a mask of -1e300 and an epsilon of 1e-300 keep their effect. A value that overflows FP16 in the original stays finite in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from penstock.artifact import Artifact
from penstock.errors import PenstockError, Unsupported
from penstock.offline.optimize.mapped import array_of, artifact_of, with_inputs
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames, subgraphs
from penstock.offline.sessions import loaded

_FP32 = TensorProto.FLOAT
_OTHERS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_STANDARD = ("", "ai.onnx")
_TYPE_ATTRIBUTES = frozenset(
    {"to", "dtype", "output_datatype", "output_dtype", "precision", "stash_type", "softmax_precision"}
)
"""Attributes that contain the number of a datatype."""
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "Attention", "LSTM", "GRU", "RNN"})
_ARITHMETIC = frozenset(
    {"Abs", "Add", "Cast", "Ceil", "Clip", "Concat", "Div", "Expand", "Floor", "Gather", "Identity", "Max", "Min"}
    | {"Mod", "Mul", "Neg", "Pow", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Slice"}
    | {"Sqrt", "Squeeze", "Sub", "Unsqueeze", "Where"}
)
"""Operators in the arithmetic of sizes."""


def in_single(artifact: Artifact) -> Artifact:
    """``artifact`` in FP32; ``artifact`` itself if its products already compute in FP32.

    Inputs and outputs keep their names and types. Raises the errors of ``read_proto``. Raises Unsupported if the model has an operator
    whose types are not known, or a sequence of another float type as an input or output.
    """
    proto = read_proto(artifact)
    if not (_mentions(proto.graph) or any(map(_mentions_type, _function_nodes(proto)))):
        return artifact
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    try:
        typed = onnx.shape_inference.infer_shapes(proto)
    except Exception as error:
        raise Unsupported("the types of the model's tensors cannot be inferred", "export the model again") from error
    if not _computes(_Scope(typed.graph)):
        return artifact
    made = _Converter(typed).run()
    try:
        onnx.checker.check_model(with_inputs(made), full_check=True)
    except Exception as error:  # the checker raises several kinds
        first = str(error).splitlines()[0][:200]
        raise Unsupported(f"the model cannot be converted to FP32: {first}", "export it in FP32") from error
    result = artifact.derive(artifact_of(made), "fp32", {}, {})
    try:
        with loaded(result):  # ONNX Runtime's optimisations fail on some Casts
            return result
    except PenstockError as error:
        raise Unsupported(f"the model does not load in FP32: {error.message}", "export it in FP32") from error


class _Tensor(NamedTuple):
    """A tensor that had another float type than FP32."""

    kind: int
    """The type in the original."""
    names: dict[int, str]
    """The name of the tensor in each type in which it is available."""
    exact: TensorProto | None = None
    """The value of a constant in the original."""


class _Scope:
    """A graph during its conversion."""

    def __init__(self, graph: onnx.GraphProto, outer: _Scope | None = None) -> None:
        self.graph, self.outer = graph, outer
        values = (*graph.value_info, *graph.input, *graph.output)
        types = {value.name: value.type.tensor_type.elem_type for value in values if value.type.WhichOneof("value")}
        self._types = types | {tensor.name: tensor.data_type for tensor in graph.initializer}
        self.tensors: dict[str, _Tensor] = {}
        self.nodes: list[onnx.NodeProto] = []

    def kind(self, name: str, *, is_read: bool = True) -> int:
        """The float type other than FP32 that ``name`` has in the original; 0 for other tensors. Raises Unsupported if the type of a
        tensor that is read is not known.
        """
        if name in self._types or not name or not is_read:
            kind = self._types.get(name, 0)
            return kind if kind in _OTHERS else 0
        if self.outer is None:
            raise Unsupported(
                f"the model cannot be converted to FP32, because the type of tensor '{name}' is not known",
                "export it in FP32",
            )
        return self.outer.kind(name)

    def home(self, name: str) -> _Scope:
        """The scope that defines ``name``, a tensor of another float type."""
        if name in self.tensors:
            return self
        assert self.outer is not None
        return self.outer.home(name)

    def kept(self) -> set[int]:
        """The positions of the nodes that keep their types."""
        nodes, found, waiting = self.graph.node, set[int](), list[str]()
        makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
        for at, node in enumerate(nodes):
            is_float = node.op_type != "Cast" or helper.get_node_attr_value(node, "to") in {_FP32, *_OTHERS}
            is_sized = node.op_type == "Range" and self.kind(node.output[0], is_read=False)
            if node.domain not in _STANDARD or node.op_type == "BitCast" or is_sized or not is_float:
                found.add(at)
                waiting += node.input
            waiting += node.input[1:3] if node.op_type in ("Resize", "Upsample") else ()
        while waiting:
            at = makers.get(waiting.pop(), -1)
            if at >= 0 and at not in found and nodes[at].op_type in _ARITHMETIC and nodes[at].domain in _STANDARD:
                found.add(at)
                waiting += nodes[at].input
        return found


class _Converter:
    def __init__(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._fresh = FreshNames(proto.graph)
        self._promised = {value.name for value in proto.graph.output}
        """The names of the model's outputs, which keep their types."""

    def run(self) -> onnx.ModelProto:
        """Convert the model in place."""
        for value in (*self._proto.graph.input, *self._proto.graph.output):
            if value.type.WhichOneof("value") != "tensor_type" and _retype(value.type):
                raise Unsupported(
                    f"the model cannot be converted to FP32, because '{value.name}' is a sequence", "export it in FP32"
                )
        self._convert(_Scope(self._proto.graph))
        return self._proto

    def _convert(self, scope: _Scope) -> None:
        graph, is_main = scope.graph, scope.outer is None
        self._take(scope)
        kept = scope.kept()
        for at, node in enumerate(graph.node):
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.input[:] = [self._read(scope, name, exact=at in kept) for name in node.input]
            if at not in kept:
                _retype_attributes(copy)
                for inner in subgraphs(copy):
                    self._convert(_Scope(inner, scope))
            scope.nodes.append(copy)
            for place, name in enumerate(node.output):
                if not name or not (kind := scope.kind(name, is_read=False)):
                    continue
                if at not in kept and is_main and name in self._promised:
                    copy.output[place] = self._fresh(f"{name}_fp32")
                scope.tensors[name] = _Tensor(kind, {kind if at in kept else _FP32: copy.output[place]})
        for value in graph.output:
            value.name = self._read(scope, value.name, exact=is_main)
            if not is_main:
                _retype(value.type)
        del graph.node[:], graph.value_info[:]
        graph.node.extend(scope.nodes)

    def _take(self, scope: _Scope) -> None:
        """Note the inputs and constants of a graph, and convert the constants."""
        graph, is_main = scope.graph, scope.outer is None
        for value in graph.input:
            if kind := scope.kind(value.name):
                scope.tensors[value.name] = _Tensor(kind, {kind if is_main else _FP32: value.name})
            if not is_main:
                _retype(value.type)
        outputs = {value.name for value in graph.output}
        for node in [node for node in graph.node if node.op_type == "Constant" and node.output[0] not in outputs]:
            tensor = next((one.t for one in node.attribute if one.name == "value"), None)
            if tensor is not None and tensor.data_type in _OTHERS:
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = node.output[0]
                graph.node.remove(node)
        for tensor in graph.initializer:
            if tensor.data_type not in _OTHERS or tensor.name in scope.tensors:
                continue
            if is_main and tensor.name in self._promised:
                scope.tensors[tensor.name] = _Tensor(tensor.data_type, {tensor.data_type: tensor.name})
                continue
            exact = onnx.TensorProto()
            exact.CopyFrom(tensor)
            scope.tensors[tensor.name] = _Tensor(tensor.data_type, {_FP32: tensor.name}, exact)
            tensor.CopyFrom(_converted(tensor))

    def _read(self, scope: _Scope, name: str, *, exact: bool) -> str:
        """The name under which ``name`` is available in FP32 or, if ``exact``, in its own type."""
        if not scope.kind(name):
            return name
        home = scope.home(name)
        tensor = home.tensors[name]
        wanted = tensor.kind if exact else _FP32
        if wanted not in tensor.names:
            is_output = home.outer is None and name in self._promised and name not in tensor.names.values()
            found = name if is_output else self._fresh(f"{name}_{helper.tensor_dtype_to_string(wanted)[12:].lower()}")
            if exact and tensor.exact is not None:
                home.graph.initializer.add().CopyFrom(tensor.exact)
                home.graph.initializer[-1].name = found
            else:
                (source,) = tensor.names.values()
                home.nodes.append(helper.make_node("Cast", [source], [found], to=wanted))
            tensor.names[wanted] = found
        return tensor.names[wanted]


def _computes(scope: _Scope) -> bool:
    """True if a product in the graph or its subgraphs has a result of another float type."""
    return any(
        (node.op_type in _PRODUCTS and any(scope.kind(name, is_read=False) for name in node.output))
        or any(_computes(_Scope(inner, scope)) for inner in subgraphs(node))
        for node in scope.graph.node
    )


def _mentions(graph: onnx.GraphProto) -> bool:
    """True if an input, output, constant or attribute of the graph or its subgraphs has another float type."""
    tensors = (*graph.initializer, *graph.input, *graph.output)
    kinds = (one.data_type if isinstance(one, TensorProto) else one.type.tensor_type.elem_type for one in tensors)
    return not _OTHERS.isdisjoint(kinds) or any(map(_mentions_type, graph.node))


def _mentions_type(node: onnx.NodeProto) -> bool:
    given = {
        one.t.data_type if one.type == AttributeProto.TENSOR else one.i for one in node.attribute if _is_typed(one)
    }
    return not _OTHERS.isdisjoint(given) or any(map(_mentions, subgraphs(node)))


def _is_typed(attribute: AttributeProto) -> bool:
    return attribute.type == AttributeProto.TENSOR or attribute.name in _TYPE_ATTRIBUTES


def _retype(kind: onnx.TypeProto) -> bool:
    """Replace other float types in ``kind`` by FP32. Returns True if there was one."""
    match kind.WhichOneof("value"):
        case "tensor_type":
            is_other = kind.tensor_type.elem_type in _OTHERS
            if is_other:
                kind.tensor_type.elem_type = _FP32
            return is_other
        case "sequence_type":
            return _retype(kind.sequence_type.elem_type)
        case "optional_type":
            return _retype(kind.optional_type.elem_type)
        case "map_type":
            return _retype(kind.map_type.value_type)
    return False


def _retype_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR and attribute.t.data_type in _OTHERS:
            attribute.t.CopyFrom(_converted(attribute.t))
        elif attribute.type == AttributeProto.TYPE_PROTO:
            _retype(attribute.tp)
        elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _OTHERS:
            attribute.i = _FP32


def _converted(tensor: TensorProto) -> TensorProto:
    array = array_of(tensor).astype(np.float64)
    limits = np.finfo(np.float32)
    finite = np.where(np.isfinite(array), array.clip(limits.min, limits.max), array)
    small = (array != 0) & (np.abs(array) < limits.tiny)
    single = np.where(small, np.copysign(limits.tiny, array), finite).astype(np.float32)
    return numpy_helper.from_array(single, tensor.name)


def _function_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    return (node for function in proto.functions for node in function.node)
