"""Weight-only quantisation: weights of large products in INT8 or INT4 with one scale per block, and FP32 activations.

Weight-only quantisation suits memory-bound products. They become ONNX Runtime's MatMulNBits, which multiplies without first unpacking
the whole weight matrix. A block is a run of weights along the summed axis. Integers are unsigned, and the middle of their range stands
for zero. In each block, the weight of largest magnitude becomes the integer -2^(bits-1), so that all levels are used. The scale
therefore has the opposite sign of that weight, as in the Q4_0 format of llama.cpp.
"""

from __future__ import annotations

import contextlib
from functools import partial
from math import inf
from typing import Annotated, Literal, get_args

import msgspec
import numpy as np
import onnx_ir as ir

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, Unsupported
from penstock.offline.compress.precision.activation_aware import activation_aware
from penstock.offline.compress.precision.products import MICROSOFT, Product, ProductModel
from penstock.offline.compress.reconstruct.reconstruction import errors_on, reconstruct
from penstock.offline.deadline import BuildDeadline
from penstock.offline.judge.accuracy import answers_of
from penstock.offline.judge.metrics import mean_interval, output_errors
from penstock.offline.sessions import signature_of
from penstock.tensor import Array

BlockSize = Literal[16, 32, 64, 128, 256]
BLOCK_SIZES: tuple[BlockSize, ...] = get_args(BlockSize)
_SAMPLES = 256
"""Maximum number of samples, evenly spaced, to scale channels by."""
_INTEGERS, _FLOATS = 4, 1
"""Values of ONNX Runtime's ``accuracy_level``: activations are rounded to INT8 for each row and block, or stay FP32."""


class WeightOnlyOptions(msgspec.Struct, frozen=True):
    """Options of ``quantize_weights``."""

    bits: Literal[4, 8] = 8
    """Bits per weight."""
    block_size: BlockSize = 32
    """Number of weights that share an FP32 scale. Smaller blocks are more accurate but take more space."""
    method: Literal["nearest", "gptq"] = "gptq"
    """With data, ``gptq`` rounds the weights so that the error of each product's results is small (``reconstruct/``). Without data,
    and with ``nearest``, each weight is rounded to the nearest integer."""
    equalize: bool = True
    """With data, first scale the channels of the products' inputs (``activation_aware.py``) if the outputs' error then falls."""
    integer_products: bool = True
    """Allow the kernel to round activations to INT8. Each row and block is rounded separately, so outputs do not depend on the batch.
    If False, 8-bit weights are far slower than FP32 in ONNX Runtime 1.31 on x86.
    """
    least_weights: Annotated[int, msgspec.Meta(ge=1)] = 1 << 16
    """Products with fewer weights stay float."""


def quantize_weights(
    artifact: Artifact, data: Dataset | None = None, options: WeightOnlyOptions | None = None
) -> Artifact:
    """``artifact`` with the weights of its large products in blocks of integers. Only ONNX Runtime can run the result.

    The provenance step records ``weight_error``, the relative error of the weights. With ``data``, it also records ``output_error``,
    the relative error of the worst output. Raises Unsupported if no product is large enough, and the errors of ``FloatModel``.
    """
    options = options or WeightOnlyOptions()
    made = _rounded_to_nearest(artifact, data, options)
    return made if data is None else improved(artifact, made, data, options)


def improved(
    artifact: Artifact, made: Artifact, data: Dataset, options: WeightOnlyOptions, time_s: float = inf
) -> Artifact:
    """``made``, which is ``artifact`` rounded to nearest with ``options``, with channels scaled and weights rounded by ``data``.

    Channels are scaled only if the error of the outputs provably falls. After ``time_s`` seconds, the remaining products stay as
    they are; the result then depends on the machine.
    """
    deadline, pairs = BuildDeadline(time_s), [(artifact, made)]
    with contextlib.suppress(Unsupported, InvalidData):  # tensors that are not finite, for example
        if options.equalize:
            few = data.few(_SAMPLES, signature_of(artifact).smallest_batch)
            scaled = activation_aware(artifact, few, partial(_rounded, options), partial(deadline.is_past, 0.5))
            if any(link["alpha"] for link in scaled.provenance[-1].facts["links"].values()):
                pairs.append((scaled, _rounded_to_nearest(scaled, few, options)))
    each_s = (time_s - deadline.used_s) / len(pairs)
    found = [reconstruct(*pair, data, each_s) if options.method == "gptq" else pair[1] for pair in pairs]
    with contextlib.suppress(Unsupported):  # outputs without a batch axis
        errors = errors_on(data, artifact, *found) if len(found) > 1 else []
        if errors and mean_interval(errors[0] - errors[1]).low > 0:
            return found[1]
    return found[0]


def _rounded_to_nearest(artifact: Artifact, data: Dataset | None, options: WeightOnlyOptions) -> Artifact:
    model = ProductModel(artifact, options.least_weights)
    lost = total = 0.0
    for product in model.products:
        integers, scales = block_integers(product.weight, options)
        error = block_values(integers, scales, len(product.weight), options.bits) - product.weight
        lost += float(np.square(error, dtype=np.float64).sum())
        total += float(np.square(product.weight, dtype=np.float64).sum())
        model.replace(product, [_block_product(model, product, integers, scales, options)])
    written = model.write(MICROSOFT)
    facts = {
        "products": len(model.products),
        "weights": sum(product.weight.size for product in model.products),
        "weight_error": round((lost / total) ** 0.5, 6) if total else 0.0,
        "size_ratio": round(written.size_bytes / artifact.size_bytes, 4),
    }
    if data is not None:
        reference, outputs = (answers_of(model, data) for model in (artifact, written))
        facts["output_error"] = round(max(output_errors(reference, outputs).values()), 6)
    return artifact.derive(written, "quantize_weights", msgspec.to_builtins(options), facts)


def _rounded(options: WeightOnlyOptions, weight: Array) -> Array:
    """``weight`` [K, N] as the product multiplies it."""
    if weight.size < options.least_weights:
        return weight
    return block_values(*block_integers(weight.astype(np.float32), options), len(weight), options.bits)


def block_integers(weight: Array, options: WeightOnlyOptions) -> tuple[Array, Array]:
    """``weight`` [K, N] as integers, uint8 [N, blocks, block size], padded with zeros, and scales, FP32 [N, blocks]."""
    rows, columns = weight.shape
    blocks = -(-rows // options.block_size)
    padded = np.zeros((columns, blocks * options.block_size), np.float32)
    padded[:, :rows] = weight.T
    values = padded.reshape(columns, blocks, options.block_size)
    middle = 1 << (options.bits - 1)
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=2)[..., None], axis=2)
    scales = -largest / middle
    scales = scales.astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    return (np.clip(np.round(values / safe), -middle, middle - 1) + middle).astype(np.uint8), scales[..., 0]


def block_values(integers: Array, scales: Array, rows: int, bits: int) -> Array:
    """The dequantised weights of ``block_integers``, FP32 [rows, N]."""
    values = (integers.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    return values.reshape(len(integers), -1)[:, :rows].T


def _block_product(
    model: ProductModel, product: Product, integers: Array, scales: Array, options: WeightOnlyOptions
) -> ir.Node:
    # Two integers share a byte; the first one is in the low half.
    packed = integers if options.bits == 8 else integers[..., ::2] | (integers[..., 1::2] << 4)
    name = f"{product.weight_name}_int{options.bits}"
    attributes = {
        "K": product.weight.shape[0],
        "N": product.weight.shape[1],
        "bits": options.bits,
        "block_size": options.block_size,
        "accuracy_level": _INTEGERS if options.integer_products else _FLOATS,
    }
    return ir.Node(
        MICROSOFT,
        "MatMulNBits",
        [product.input, model.constant(packed, name), model.constant(scales, f"{name}_scale")],
        [ir.AttrInt64(*one) for one in attributes.items()],
        num_outputs=1,
        name=product.node.name,
    )
