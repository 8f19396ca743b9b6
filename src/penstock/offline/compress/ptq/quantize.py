"""Post-training quantisation: write the INT8 version of an FP32 model, given the ranges of its tensors.

Activations have one scale and zero point per tensor. Weights have one scale per output channel, from the largest magnitude. Biases
are INT32. The model is in QDQ form (QuantizeLinear, DequantizeLinear around float operators), which ONNX Runtime and OpenVINO turn
into integer kernels. ONNX Runtime's writer places the pairs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import TensorData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.quant_utils import add_infer_metadata

from penstock.artifact import Artifact, sha256
from penstock.offline.compress.ptq.qdq_placement import (
    LINEAR_OPS,
    FloatModel,
    QdqPlacement,
    float_model,
    nothing_to_quantise,
)
from penstock.offline.compress.ptq.ranges.histogram import Range
from penstock.offline.compress.ptq.scheme import IntegerScheme
from penstock.tensor import DataType

_QUANT_TYPES = {DataType.UINT8: QuantType.QUInt8, DataType.INT8: QuantType.QInt8}


def quantize(
    artifact: Artifact,
    ranges: Mapping[str, Range],
    scheme: IntegerScheme,
    placement: QdqPlacement = QdqPlacement.LINEAR,
    keep_float: Collection[str] = (),
) -> Artifact:
    """The INT8 version of ``artifact``: the same FP32 inputs and outputs, the same dynamic axes, and about a quarter of the size.

    An operator that reads or writes a tensor without a range stays float. So do the nodes in ``keep_float``, given by their names
    in a ``FloatModel`` of ``artifact``. If the only consumer of a tensor is a Relu or Clip, the tensor gets the range of that
    operator's output. Fold BatchNormalization first. The same arguments give the same bytes. Raises Unsupported if no operator can
    become integer, InvalidModel if the model cannot be read, InvalidArgument for an unknown name in ``keep_float``.
    """
    model = float_model(artifact)
    nodes = [node for node in model.integer_nodes(placement, keep_float) if _has_ranges(model, node, ranges, placement)]
    linear = [node for node in nodes if node.op_type in LINEAR_OPS]
    if not linear:
        raise nothing_to_quantise()
    data = _write(model, nodes, ranges, scheme, placement)
    options = {
        "activation": scheme.activation.value,
        "weight": scheme.weight.value,
        "reduce_range": scheme.reduce_range,
        "placement": placement.value,
        "keep_float": sorted(set(keep_float)),
        "ranges": sha256(msgspec.json.encode(dict(ranges), order="sorted")),
    }
    facts = {
        "onnxruntime": onnxruntime.__version__,
        "integer_operators": len(nodes),
        "linear_operators": len(linear),
        "operators": len(model.nodes),
        "size_ratio": round(len(data) / artifact.size_bytes, 4),
    }
    return artifact.derive(data, "quantize", options, facts)


def _has_ranges(model: FloatModel, node: onnx.NodeProto, ranges: Mapping[str, Range], placement: QdqPlacement) -> bool:
    needed = model.activations([node])
    if node.op_type in placement.float_outputs:
        needed = [name for name in needed if name not in node.output]
    return all(name in ranges for name in needed)


def _write(
    model: FloatModel,
    nodes: list[onnx.NodeProto],
    ranges: Mapping[str, Range],
    scheme: IntegerScheme,
    placement: QdqPlacement,
) -> bytes:
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    # Marks shapes as inferred; otherwise the writer infers them again through a temporary file.
    add_infer_metadata(proto)
    with _silent():
        quantizer = QDQQuantizer(
            proto,
            per_channel=True,
            reduce_range=scheme.reduce_range,
            weight_qType=_QUANT_TYPES[scheme.weight],
            activation_qType=_QUANT_TYPES[scheme.activation],
            tensors_range={name: _tensor_data(range) for name, range in ranges.items()},
            nodes_to_quantize=[node.name for node in nodes],
            nodes_to_exclude=[],
            op_types_to_quantize=sorted({node.op_type for node in nodes}),
            extra_options={"OpTypesToExcludeOutputQuantization": placement.float_outputs},
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    written = quantizer.model.model
    del written.metadata_props[:]
    written.metadata_props.extend(model.proto.metadata_props)
    # Shapes of tensors that were renamed or removed would contradict the new graph.
    del written.graph.value_info[:]
    return bytes(written.SerializeToString(deterministic=True))


def _tensor_data(range: Range) -> TensorData:
    return TensorData(lowest=np.array(range.low, np.float32), highest=np.array(range.high, np.float32))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress the messages that the writer logs to the root logger. The writer also adds a handler if the root logger has none; this
    is undone.
    """

    def is_ours(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    root, handler = logging.getLogger(), logging.NullHandler()
    root.addFilter(is_ours)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.removeFilter(is_ours)
