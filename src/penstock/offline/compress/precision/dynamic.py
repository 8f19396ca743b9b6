"""INT8 without calibration: the range of each activation is taken when it is there, over the whole batch.

For products with constant weights only (MatMul, Gemm): ONNX Runtime has a fused kernel for them, and none for Conv, which becomes
several times slower than FP32. What it costs is told in the facts: since the range is that of the batch, a sample's answer depends
on the samples that it is batched with, which a server that merges requests cannot hide.
"""

from __future__ import annotations

import msgspec
import numpy as np
from onnx import helper, numpy_helper

from penstock.artifact import Artifact
from penstock.offline.compress.precision.products import Product, Replacement, products, replaced, with_bias
from penstock.offline.compress.ptq.placement import FloatModel
from penstock.offline.compress.sessions import loaded
from penstock.offline.dataset import Dataset
from penstock.offline.tune.accuracy import sample_errors
from penstock.tensor import Array, DataType

_SAME = 1e-3
"""Relative error up to which two answers are the same: a value beside a rounding border may fall to either side of it."""


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
    model = FloatModel(artifact)
    found = products(model, options.least_weights)
    replacements: dict[str, Replacement] = {}
    quantised: set[str] = set()
    for number, product in enumerate(found):
        # Queries, keys and values read one tensor, which needs to be rounded once.
        first = product.input not in quantised
        quantised.add(product.input)
        replacements[product.node.name] = _integer_product(product, number, first, options)
    written = replaced(model, replacements)
    changed = Artifact.from_bytes(written)
    dependence = batch_dependence(changed, data, options.rows)
    facts = {
        "products": len(found),
        "batch_dependence": round(dependence, 6),
        "batch_invariant": dependence <= _SAME,
        "size_ratio": round(len(written) / artifact.size_bytes, 4),
    }
    return artifact.derive(written, "quantize_dynamic", msgspec.to_builtins(options), facts)


def is_batch_invariant(artifact: Artifact, data: Dataset, rows: int = 8) -> bool:
    """Whether answers are the same whatever they are batched with, as far as ``rows`` samples show."""
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


def _integer_product(product: Product, number: int, first: bool, options: DynamicOptions) -> Replacement:
    """x ── DynamicQuantizeLinear ── MatMulInteger ── Cast ── Mul(scales) ── Add(bias): what ONNX Runtime fuses into one kernel."""
    levels = 63 if options.reduce_range else 127
    scale = np.abs(product.weight).max(axis=0) / np.float32(levels)
    scale[scale == 0] = 1
    integers = np.clip(np.round(product.weight / scale), -levels, levels).astype(np.int8)
    source, name = f"{product.input}_dynamic", f"{product.output}_dynamic{number}"
    weight = f"{product.weight_name}_int8"
    tensors = [
        numpy_helper.from_array(integers, weight),
        numpy_helper.from_array(scale, f"{weight}_scale"),
        numpy_helper.from_array(np.zeros_like(scale, np.int8), f"{weight}_zero"),
    ]
    rounding = helper.make_node("DynamicQuantizeLinear", [product.input], [source, f"{source}_scale", f"{source}_zero"])
    nodes = [
        *([rounding] if first else []),
        helper.make_node("MatMulInteger", [source, weight, f"{source}_zero", f"{weight}_zero"], [f"{name}_sums"]),
        helper.make_node("Cast", [f"{name}_sums"], [f"{name}_float"], to=DataType.FP32.onnx),
        helper.make_node("Mul", [f"{source}_scale", f"{weight}_scale"], [f"{name}_scale"]),
        helper.make_node("Mul", [f"{name}_float", f"{name}_scale"], [f"{name}_product"]),
    ]
    return Replacement(with_bias(product, nodes, f"{name}_product"), tensors)
