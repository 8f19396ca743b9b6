"""INT8 without calibration: the range of each activation is computed at run time, over the whole batch.

Only products with constant weights (MatMul, Gemm) become integer. ONNX Runtime has a fused kernel for these products. It has no such
kernel for Conv, which would become several times slower. Because the range is computed over the batch, the outputs for a sample depend
on the other samples in its batch (``batch_dependence``). In a server that batches requests, a response thus depends on other requests.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.precision.products import Product, ProductModel, node
from penstock.offline.judge.metrics import sample_errors
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

_SAME = 1e-3
"""Outputs count as equal up to this relative error. A value near a rounding border can be rounded either way."""

_ROWS = 8
"""Number of samples in the batch that tests whether outputs depend on the batch."""


class DynamicOptions(msgspec.Struct, frozen=True):
    """Options of ``quantize_dynamic``."""

    least_weights: int = 4096
    """Products with fewer weights stay float, since finding the range costs more than it saves."""
    reduce_range: bool = True
    """Weights use 7 of their 8 bits, so that every CPU and engine multiplies exactly; see ``IntegerScheme``."""


def quantize_dynamic(artifact: Artifact, data: Dataset, options: DynamicOptions | None = None) -> Artifact:
    """``artifact`` with its large products in INT8. Weights have one scale per output channel.

    The provenance step records ``batch_invariant``: true if each sample of ``data`` has the same outputs alone and in a batch.
    Raises Unsupported if there is no product to quantise, and the errors of ``FloatModel``.
    """
    options = options or DynamicOptions()
    model = ProductModel(artifact, options.least_weights)
    # The projections of queries, keys and values have the same input, which is rounded once.
    rounded: dict[ir.Value, ir.Node] = {}
    for product in model.products:
        first = product.input not in rounded
        rounding = rounded.setdefault(product.input, node("DynamicQuantizeLinear", product.input, outputs=3))
        nodes = _integer_product(model, product, rounding, 63 if options.reduce_range else 127)
        model.replace(product, [rounding, *nodes] if first else nodes)
    written = model.write()
    facts = {"products": len(model.products), **dependence_facts(artifact, written, data)}
    return artifact.derive(written, "quantize_dynamic", msgspec.to_builtins(options), facts)


def dependence_facts(artifact: Artifact, written: Artifact, data: Dataset) -> dict[str, Any]:
    """Facts on the model ``written``, made of ``artifact``: its size, and whether samples depend on others in their batch."""
    dependence = batch_dependence(written, data)
    return {
        "batch_dependence": round(dependence, 6),
        "batch_invariant": dependence <= _SAME,
        "size_ratio": round(written.size_bytes / artifact.size_bytes, 4),
    }


def is_batch_invariant(artifact: Artifact, data: Dataset) -> bool:
    """True if the outputs for each sample of ``data`` do not depend on the other samples in its batch (``batch_dependence``)."""
    return batch_dependence(artifact, data) <= _SAME


def batch_dependence(artifact: Artifact, data: Dataset) -> float:
    """Largest relative error between the outputs for a sample alone and in a batch of 8 samples, evenly spaced in ``data``.

    The samples have equal shapes. The result is 0 for a model with a fixed batch size. Outputs without a batch axis are ignored.
    """
    with loaded(artifact) as model:
        if not model.signature.batchable or not data.joins:
            return 0.0
        batch = data.alike().pick_evenly(_ROWS)
        together = model.forward(batch.inputs)
        alone = [model.forward(batch.rows(row, row + 1)) for row in range(_ROWS)]
    separate = {name: np.concatenate([np.atleast_1d(answer[name]) for answer in alone]) for name in together}
    like = {name: array for name, array in together.items() if array.shape == separate[name].shape}
    rows = {name: array for name, array in like.items() if array.size and len(array) == _ROWS}
    return float(sample_errors(rows, separate).max()) if rows else 0.0


def _integer_product(model: ProductModel, product: Product, rounding: ir.Node, levels: int) -> list[ir.Node]:
    """x ── DynamicQuantizeLinear ── MatMulInteger ── Cast ── Mul(scales) ── Add(bias), which ONNX Runtime fuses into one kernel."""
    scale = np.abs(product.weight).max(axis=0) / np.float32(levels)
    scale[scale == 0] = 1
    integers = np.clip(np.round(product.weight / scale), -levels, levels).astype(np.int8)
    name = f"{product.weight_name}_int8"
    weight, scales = model.constant(integers, name), model.constant(scale, f"{name}_scale")
    value, value_scale, value_zero = rounding.outputs
    sums = node("MatMulInteger", value, weight, value_zero)
    floats = node("Cast", sums.outputs[0], to=DataType.FP32.onnx)
    both = node("Mul", value_scale, scales)
    return [sums, floats, both, node("Mul", floats.outputs[0], both.outputs[0])]
