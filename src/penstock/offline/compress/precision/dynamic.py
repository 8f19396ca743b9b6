"""INT8 without calibration: the range of each activation is taken when it is there, over the whole batch.

For products with constant weights only (MatMul, Gemm): ONNX Runtime has a fused kernel for them, and none for Conv, which becomes
several times slower than FP32. The facts say what it costs: since the range is that of the batch, a sample's answer depends
on the samples that it is batched with, which a server that merges requests cannot hide.
"""

from __future__ import annotations

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.precision.products import Product, ProductModel, node
from penstock.offline.judge.metrics import sample_errors
from penstock.offline.sessions import loaded
from penstock.tensor import Array, DataType

_SAME = 1e-3
"""Relative error up to which two answers count as equal, since a value near a rounding border may be rounded either way."""


class DynamicOptions(msgspec.Struct, frozen=True):
    """How ``quantize_dynamic`` quantises."""

    least_weights: int = 4096
    """Products with fewer weights stay float: finding the range would cost more than it saves."""
    reduce_range: bool = False
    """Weights take 7 of their 8 bits. Needed on x86 without VNNI, where ``IntegerScheme.reduce_range`` says so."""
    rows: int = 8
    """Samples that are batched to see whether answers depend on one another."""


def quantize_dynamic(artifact: Artifact, data: Dataset, options: DynamicOptions | None = None) -> Artifact:
    """``artifact`` with its large products in INT8, weights with one scale an output channel.

    The fact ``batch_invariant`` says whether answers on ``data`` stayed the same alone and in a batch: see ``batch_dependence``.
    Raises Unsupported if there is no product to quantise, and as ``FloatModel``.
    """
    options = options or DynamicOptions()
    model = ProductModel(artifact, options.least_weights)
    # Queries, keys and values read one tensor, which needs to be rounded once.
    rounded: dict[ir.Value, ir.Node] = {}
    for product in model.products:
        first = product.input not in rounded
        rounding = rounded.setdefault(product.input, node("DynamicQuantizeLinear", product.input, outputs=3))
        nodes = _integer_product(model, product, rounding, 63 if options.reduce_range else 127)
        model.replace(product, [rounding, *nodes] if first else nodes)
    written = model.write()
    changed = Artifact.from_bytes(written)
    dependence = batch_dependence(changed, data, options.rows)
    facts = {
        "products": len(model.products),
        "batch_dependence": round(dependence, 6),
        "batch_invariant": dependence <= _SAME,
        "size_ratio": round(len(written) / artifact.size_bytes, 4),
    }
    return artifact.derive(written, "quantize_dynamic", msgspec.to_builtins(options), facts)


def is_batch_invariant(artifact: Artifact, data: Dataset, rows: int = 8) -> bool:
    """Whether answers do not depend on the rest of the batch, tested on ``rows`` samples."""
    return batch_dependence(artifact, data, rows) <= _SAME


def batch_dependence(artifact: Artifact, data: Dataset, rows: int = 8) -> float:
    """Largest relative error between a sample's answer alone and in a batch of ``rows`` samples, evenly spaced in ``data``.

    A model that takes no batches of free size has no batch mates to depend on: 0.
    """
    with loaded(artifact) as model:
        if not model.signature.batchable:
            return 0.0
        picks = np.linspace(0, data.count - 1, max(2, rows)).round().astype(np.intp)
        batch: dict[str, Array] = {name: array[picks] for name, array in data.inputs.items()}
        together = model.forward(batch)
        alone = [model.forward({name: array[i : i + 1] for name, array in batch.items()}) for i in range(len(picks))]
    separate = {name: np.concatenate([answer[name] for answer in alone]) for name in together}
    return float(sample_errors(separate, together).max())


def _integer_product(model: ProductModel, product: Product, rounding: ir.Node, levels: int) -> list[ir.Node]:
    """x ── DynamicQuantizeLinear ── MatMulInteger ── Cast ── Mul(scales) ── Add(bias): what ONNX Runtime fuses into one kernel."""
    scale = np.abs(product.weight).max(axis=0) / np.float32(levels)
    scale[scale == 0] = 1
    integers = np.clip(np.round(product.weight / scale), -levels, levels).astype(np.int8)
    name = f"{product.weight_name}_int8"
    weight, scales = model.constant(integers, name), model.constant(scale, f"{name}_scale")
    zeros = model.constant(np.zeros_like(scale, np.int8), f"{name}_zero")
    value, value_scale, value_zero = rounding.outputs
    sums = node("MatMulInteger", value, weight, value_zero, zeros)
    floats = node("Cast", sums.outputs[0], to=DataType.FP32.onnx)
    both = node("Mul", value_scale, scales)
    return [sums, floats, both, node("Mul", floats.outputs[0], both.outputs[0])]
