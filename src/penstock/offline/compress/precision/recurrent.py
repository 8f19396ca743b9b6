"""LSTM with weights in INT8 and ranges of activations computed at run time, by ONNX Runtime's ``DynamicQuantizeLSTM``.

The range of the layer's input is computed over all time steps and samples, and that of the state over the samples of each step. So the
outputs for a sample depend on the other samples in its batch. There is no such operator for GRU and RNN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import Unsupported
from penstock.offline.compress.precision.dynamic import DynamicOptions, dependence_facts, quantize_dynamic
from penstock.offline.compress.precision.products import MICROSOFT
from penstock.offline.compress.ptq.qdq_placement import KEPT_FLOAT, attributes_of
from penstock.offline.optimize.mapped import array_of, artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.optimize.names import FreshNames, reads
from penstock.tensor import Array, DataType

_TINY = np.finfo(np.float32).tiny


def quantize_all_dynamic(artifact: Artifact, data: Dataset, options: DynamicOptions | None = None) -> Artifact:
    """``artifact`` with its large products and LSTMs in INT8. Raises Unsupported if it has neither."""
    try:
        products = quantize_dynamic(artifact, data, options)
    except Unsupported as error:
        with contextlib.suppress(Unsupported):
            return quantize_recurrent(artifact, data, options)
        raise error from None
    with contextlib.suppress(Unsupported):
        return quantize_recurrent(products, data, options)
    return products


def quantize_recurrent(artifact: Artifact, data: Dataset, options: DynamicOptions | None = None) -> Artifact:
    """``artifact``, which may be quantised otherwise, with its large LSTMs in INT8. Weights have one scale per gate and unit.

    The provenance step has the facts of ``quantize_dynamic``. Raises Unsupported if there is no LSTM to quantise.
    """
    options = options or DynamicOptions()
    proto = read_proto(artifact)
    weights = recurrent_weights(proto)
    found = [node for node in proto.graph.node if is_integer_lstm(node, weights, options.least_weights)]
    if not found:
        raise Unsupported(
            f"the model has no LSTM with at least {options.least_weights} constant FP32 weights",
            "its other operators can be quantised: penstock quantize --calibrate",
        )
    fresh = FreshNames(proto.graph)
    levels = 63 if options.reduce_range else 127
    made: dict[str, tuple[str, str, str]] = {}
    for node in found:
        for name in node.input[1:3]:
            if name not in made:
                arrays = _integers(array_of(weights[name]), levels)
                names = tuple(fresh(f"{name}_{what}") for what in ("int8", "int8_scale", "int8_zero"))
                proto.graph.initializer.extend(map(numpy_helper.from_array, arrays, names))
                made[name] = names  # type: ignore[assignment]
        matrices, states = [made[name] for name in node.input[1:3]], [*node.input[3:], *[""] * 5][:5]
        inputs = [node.input[0], *(names[0] for names in matrices), *states]
        del node.input[:]
        node.input.extend([*inputs, *(name for names in matrices for name in names[1:])])
        node.domain, node.op_type = MICROSOFT, "DynamicQuantizeLSTM"
        attributes = [one for one in node.attribute if one.name != "layout"]  # always 0, see is_integer_lstm
        del node.attribute[:]
        node.attribute.extend(attributes)
    if all(one.domain != MICROSOFT for one in proto.opset_import):
        proto.opset_import.add(domain=MICROSOFT, version=1)
    used = {value.name for value in proto.graph.output}.union(*map(reads, proto.graph.node))
    for place in reversed(range(len(proto.graph.initializer))):
        if (name := proto.graph.initializer[place].name) in made and name not in used:
            del proto.graph.initializer[place]
    written = artifact_of(proto)
    facts = {"layers": len(found), **dependence_facts(artifact, written, data)}
    return artifact.derive(written, "quantize_recurrent", msgspec.to_builtins(options), facts)


def has_integer_lstm(artifact: Artifact, options: DynamicOptions | None = None) -> bool:
    """True if ``quantize_recurrent`` finds an LSTM to quantise."""
    proto = read_proto(artifact)
    weights, least = recurrent_weights(proto), (options or DynamicOptions()).least_weights
    return any(is_integer_lstm(node, weights, least) for node in proto.graph.node)


def recurrent_weights(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The FP32 constants that the model's caller cannot replace."""
    given = {value.name for value in proto.graph.input}
    floats = (one for one in proto.graph.initializer if one.data_type == DataType.FP32.onnx)
    return {tensor.name: tensor for tensor in floats if tensor.name not in given}


def is_integer_lstm(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto], least_weights: int) -> bool:
    """True if ``node`` is an LSTM that can become integer."""
    if node.op_type != "LSTM" or node.domain not in ("", "ai.onnx") or node.doc_string == KEPT_FLOAT:
        return False
    if attributes_of(node).get("layout", 0):
        return False
    arrays = [weights.get(name) for name in node.input[1:3]]
    if any(array is None for array in arrays):
        return False
    values = [array_of(array) for array in arrays]
    return sum(value.size for value in values) >= least_weights and all(np.isfinite(value).all() for value in values)


def _integers(weight: Array, levels: int) -> tuple[Array, Array, Array]:
    """The integers of ``weight`` [directions, 4 · hidden, inputs], transposed, with their scales and zero points."""
    largest = np.abs(weight).max(axis=2)
    scale = np.where(largest == 0, 1, np.maximum(largest / levels, _TINY)).astype(np.float32)
    integers = np.rint(weight / scale[..., None]).clip(-levels, levels).astype(np.int8)
    return np.ascontiguousarray(integers.swapaxes(1, 2)), scale, np.zeros(scale.shape, np.int8)
