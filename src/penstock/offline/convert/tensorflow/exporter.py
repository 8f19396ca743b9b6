"""tf2onnx: writes TensorFlow graphs and TensorFlow Lite files as ONNX, and reports everything that it cannot convert at once.

tf2onnx logs its failures and goes on. ``Trouble`` collects these messages, so that no failure remains unnoticed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import onnx
import tf2onnx
from tf2onnx import optimizer, tfonnx
from tf2onnx.constants import OPSET_TO_IR_VERSION

from penstock.engines.custom_ops import TENSORFLOW, CustomOp, custom_ops
from penstock.errors import InvalidArgument, Unsupported, shortened
from penstock.offline.convert.base import Axis, UnsupportedOperator, UnsupportedOperators
from penstock.offline.convert.repairs.graphs import nodes_below
from penstock.offline.convert.tensorflow import functions, repairs
from penstock.offline.convert.tensorflow.links import layer_of
from penstock.tensor import Signature

VERSION: str = tf2onnx.__version__
_WRITTEN_OPSET: int = max(OPSET_TO_IR_VERSION)
_MAX_OPSET = 21
_MIN_OPSET = 13
_KNOWN_DOMAINS = {"", "ai.onnx.ml", "com.microsoft"}
_WAY_OUT = (
    "replace it in the model, or define it in a file for --ops, with @penstock.register_op('tf::{}', form='python', ...) or "
    "tf2onnx's decorator tf_op"
)


class Request(NamedTuple):
    """What to convert."""

    renamed: Mapping[str, str]
    """New names of the inputs and outputs, by the names in the source, in order."""
    signature: Signature
    axes: Mapping[str, tuple[Axis, ...]]
    arguments: Mapping[str, Any]
    """Arguments of ``process_tf_graph`` that name the source."""


class Trouble(logging.Handler):
    """Collects what tf2onnx logs while it converts: the operators that it cannot convert, and its warnings."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.operators: list[UnsupportedOperator] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Tensorflow op [%s: %s] is not supported"):
            name, op = record.args  # type: ignore[misc]
            self.operators.append(UnsupportedOperator(str(op), layer_of(str(name)), _WAY_OUT.format(op)))
        elif str(record.msg).startswith("Failed to convert node"):
            name, _, summary = record.args  # type: ignore[misc]
            reason = shortened(str(record.exc_info[1]), 200) if record.exc_info else ""
            op = str(summary).partition("OP=")[2].split("\n")[0] or "an operator"
            self.operators.append(
                UnsupportedOperator(op, layer_of(str(name)), f"{_WAY_OUT.format(op)}; tf2onnx says: {reason}")
            )

    def __enter__(self) -> Self:
        logger = logging.getLogger("tf2onnx")
        self._before = logger.propagate, logger.level
        logger.propagate, logger.level = False, logging.ERROR
        logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logger = logging.getLogger("tf2onnx")
        logger.removeHandler(self)
        logger.propagate, logger.level = self._before


def converted(request: Request, opset: int) -> onnx.ModelProto:
    """The ONNX model, with opset ``opset`` or the newest one that is possible. Raises UnsupportedOperators, Unsupported."""
    if opset < _MIN_OPSET:
        raise Unsupported(f"tf2onnx cannot write opset {opset} reliably", f"use --opset {_MIN_OPSET} or newer")
    handlers: dict[str, Any] = {name: (_call_function, []) for name in functions.OPERATORS}
    handlers |= {one.operator: (partial(_call_python, one), []) for one in _in_python().values()}
    with Trouble() as trouble, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TensorFlow's interpreter, which tf2onnx asks for shapes
        try:
            graph = tfonnx.process_tf_graph(
                opset=min(opset, _WRITTEN_OPSET),
                continue_on_error=True,
                tensors_to_rename=dict(request.renamed),
                custom_op_handlers=handlers,
                extra_opset=[onnx.helper.make_opsetid(domain, 1) for domain in (functions.DOMAIN, TENSORFLOW)],
                **request.arguments,
            )
            if not trouble.operators:
                graph = optimizer.optimize_graph(graph, catch_errors=True)
                model = graph.make_model("converted by tf2onnx")
        except Exception as error:
            if not trouble.operators:
                raise Unsupported(
                    f"tf2onnx {VERSION} fails on this model: {shortened(str(error) or type(error).__name__, 300)}",
                    "report the model to the maintainers of tf2onnx, or export it with another opset",
                ) from error
    if trouble.operators:
        raise UnsupportedOperators.of(list(dict.fromkeys(trouble.operators)))
    repairs.quantise_rows(model.graph)
    if "tflite_path" in request.arguments:
        repairs.round_resized(model.graph)
    model = functions.inlined(model)
    if left := list(dict.fromkeys(_unknown(model.graph))):
        raise UnsupportedOperators.of(left)
    _describe(model, request)
    repairs.repair(model.graph)
    repairs.raise_opset(model, min(opset, _MAX_OPSET))
    return model


def write(model: onnx.ModelProto, target: Path) -> None:
    """Write ``model``, with its weights in a second file if it exceeds the size of a protobuf message."""
    large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    onnx.save_model(model, target, save_as_external_data=large, location=f"{target.name}.data" if large else None)


def _in_python() -> dict[str, CustomOp]:
    """The user's definitions of operators of TensorFlow. Raises InvalidArgument."""
    found = {one.name: one for one in custom_ops() if one.domain == TENSORFLOW}
    for one in found.values():
        if one.form != "python":
            raise InvalidArgument(
                f"register_op defines '{one.name}' with the form '{one.form}'",
                "use form='python', or tf2onnx's decorator tf_op in the same file",
            )
    return found


def _unknown(graph: onnx.GraphProto) -> Iterator[UnsupportedOperator]:
    """The nodes of ``graph`` and its subgraphs that are no ONNX operators."""
    known = _in_python()
    for node in nodes_below(graph):
        if f"{node.domain}::{node.op_type}" in known:
            continue
        if node.domain not in _KNOWN_DOMAINS or (not node.domain and not onnx.defs.has(node.op_type)):
            yield UnsupportedOperator(node.op_type, layer_of(node.name), _WAY_OUT.format(node.op_type))


def _describe(model: onnx.ModelProto, request: Request) -> None:
    """Put inputs and outputs into the signature's order, and name their free dimensions."""
    for kept, specs in ((model.graph.input, request.signature.inputs), (model.graph.output, request.signature.outputs)):
        by_name = {info.name: info for info in kept}
        infos = [by_name[spec.name] if spec.name in by_name else _absent(spec.name) for spec in specs]
        del kept[:]
        kept.extend(infos)
        for spec, info in zip(specs, kept, strict=True):
            names = {axis.index: axis.name for axis in request.axes.get(spec.name, ())}
            tensor = info.type.tensor_type
            tensor.elem_type = tensor.elem_type or spec.datatype.onnx
            del tensor.shape.dim[:]
            for axis, size in enumerate(spec.shape):
                free = names.get(axis, f"{spec.name}_{axis}")
                tensor.shape.dim.add(**({"dim_param": free} if size < 0 else {"dim_value": size}))


def _call_function(graph: Any, node: Any, name: str, arguments: Any) -> Any:
    """Handler of tf2onnx that turns an operator of TensorFlow into a call of a function."""
    node.domain, node.type = functions.DOMAIN, functions.function_of(node.type, node.attr)
    for one in list(node.attr):
        del node.attr[one]
    return node


def _call_python(one: CustomOp, graph: Any, node: Any, name: str, arguments: Any) -> Any:
    """Handler of tf2onnx that turns an operator of TensorFlow into one in Python. The function does not get attributes."""
    for what, wanted, names in (("inputs", one.inputs, node.input), ("outputs", one.outputs, node.output)):
        if (found := [graph.get_dtype(each) for each in names]) != [each.onnx for each in wanted]:
            kinds = ", ".join(onnx.TensorProto.DataType.Name(kind or 0) for kind in found)
            raise ValueError(f"'{one.name}' in {one.file} declares other {what} than the graph has, {kinds}")
    node.domain = one.domain
    for each in list(node.attr):
        del node.attr[each]
    return node


def _absent(name: str) -> onnx.ValueInfoProto:
    """Declares an input that no node of the model reads; tf2onnx leaves such inputs out."""
    info = onnx.ValueInfoProto(name=name)
    info.type.tensor_type.shape.SetInParent()
    return info
