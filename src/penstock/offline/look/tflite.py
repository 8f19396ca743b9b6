"""What a TensorFlow Lite file says, by the schema that LiteRT ships."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from penstock.artifact import Artifact
from penstock.errors import InvalidModel
from penstock.offline.look.facts import FileFacts, TensorFacts, sorted_counts

_TYPES = {
    "FLOAT64": "FP64", "FLOAT32": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "STRING": "BYTES", "BOOL": "BOOL",
    **{f"{name}{bits}": f"{name}{bits}" for name in ("INT", "UINT") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_IDENTIFIER = b"TFL3"


def _names(of: Any) -> dict[int, str]:
    return {number: name for name, number in vars(of).items() if isinstance(number, int)}


_OPERATORS, _ELEMENTS = _names(schema.BuiltinOperator), _names(schema.TensorType)


def read(artifact: Artifact) -> FileFacts:
    """Read the file. Raises InvalidModel."""
    if artifact.data[4:8] != _IDENTIFIER:
        raise InvalidModel("the file is not a TensorFlow Lite model", "convert the model again")
    try:
        return _read(schema.Model.GetRootAs(artifact.data, 0))
    except (struct.error, AttributeError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise InvalidModel(f"the TensorFlow Lite file is corrupt: {error}", "convert the model again") from None


def _read(model: Any) -> FileFacts:
    codes = [model.OperatorCodes(at) for at in range(model.OperatorCodesLength())]
    names = [_operator(code) for code in codes]
    counts: Counter[str] = Counter()
    weights = weight_bytes = quantised = 0
    for at in range(model.SubgraphsLength()):
        graph = model.Subgraphs(at)
        counts.update(names[graph.Operators(each).OpcodeIndex()] for each in range(graph.OperatorsLength()))
        for each in range(graph.TensorsLength()):
            tensor = graph.Tensors(each)
            stored = model.Buffers(tensor.Buffer()).DataLength()
            weights += math.prod(_shape(tensor)) if stored and _ELEMENTS.get(tensor.Type()) != "INT32" else 0
            weight_bytes += stored
            quantisation = tensor.Quantization()
            quantised += bool(quantisation is not None and quantisation.ScaleLength())
    graph = model.Subgraphs(0)
    inputs = {graph.Inputs(at): "" for at in range(graph.InputsLength())}
    outputs = {graph.Outputs(at): "" for at in range(graph.OutputsLength())}
    if model.SignatureDefsLength():
        signature = model.SignatureDefs(0)
        for at in range(signature.InputsLength()):
            inputs[signature.Inputs(at).TensorIndex()] = signature.Inputs(at).Name().decode()
        for at in range(signature.OutputsLength()):
            outputs[signature.Outputs(at).TensorIndex()] = signature.Outputs(at).Name().decode()
    return FileFacts(
        tuple(_tensor(graph.Tensors(at), name) for at, name in inputs.items()),
        tuple(_tensor(graph.Tensors(at), name) for at, name in outputs.items()),
        operators=sorted_counts(counts),
        parameters=weights,
        weight_bytes=weight_bytes,
        quantised=f"{quantised} tensors with a scale" if quantised else "",
    )


def _operator(code: Any) -> str:
    builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    name = _OPERATORS.get(builtin, f"operator {builtin}")
    return code.CustomCode().decode(errors="replace") if name == "CUSTOM" and code.CustomCode() else name


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.Shape(at) for at in range(tensor.ShapeLength()))


def _tensor(tensor: Any, name: str) -> TensorFacts:
    free = tuple(tensor.ShapeSignature(at) for at in range(tensor.ShapeSignatureLength()))
    kind = _ELEMENTS.get(tensor.Type(), "unknown")
    return TensorFacts(name or tensor.Name().decode(errors="replace"), _TYPES.get(kind, kind), free or _shape(tensor))
