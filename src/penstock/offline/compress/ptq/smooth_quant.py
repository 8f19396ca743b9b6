"""SmoothQuant: move outliers from the channels of a matrix product's input into its weights. In float, the result is the same.

The method is that of G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", ICML
2023, §4: s_j = max|X_j|^α / max|W_j|^(1-α). The LayerNormalization, Mul or product that writes X is divided by s. The weights of all
products that read X (queries, keys and values together) are multiplied by s. Each tensor gets the α with the lowest error of the
quantised products on data. If no α lowers the error, the tensor stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.ptq.equalize import factors, verify
from penstock.offline.compress.ptq.rescale import Link, Rescaling
from penstock.offline.compress.taps import Taps
from penstock.offline.deadline import IsLate, never_late
from penstock.offline.optimize.model import infer_shapes, read_proto
from penstock.tensor import Array

_PRODUCTS = frozenset({"MatMul", "Gemm"})
_ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Values of α: the fraction of the activations' uneven ranges that moves into the weights."""
_LIMIT = 1e3
"""Maximum factor by which a channel is scaled, up or down."""
_ROWS = 256
"""Number of rows of each tensor on which the error is measured. The rows are kept in memory."""
_WORTH_IT = 0.99
"""A link is rescaled only if its error falls below this fraction of its previous error. A smaller gain is noise."""


class Seen(NamedTuple):
    """Statistics of a link's tensor on the data."""

    low: Array
    """The smallest value of each channel, FP64. It is at most 0, since every quantised range contains 0."""
    high: Array
    rows: Array
    """Some rows, shape (rows, channels)."""


_Scales = Callable[[Link, Seen, float], Array]
"""Returns the divisors of a link's channels for an α."""
_Error = Callable[[Link, Seen, Array], float]
"""Returns the error of a link's products with some divisors."""


def smooth_quant(artifact: Artifact, data: Dataset) -> Artifact:
    """Return a model with the same outputs whose matrix products are more accurate in INT8. ``artifact`` is FP32.

    Raises InvalidModel or Unsupported if the model cannot be read, InvalidData if the data do not fit.
    """

    def scales(link: Link, seen: Seen, alpha: float) -> Array:
        return factors(np.maximum(-seen.low, seen.high), link.read_ranges(), alpha)

    return rescale_products(artifact, data, "smooth-quant", scales, quantized_error)


def rescale_products(
    artifact: Artifact,
    data: Dataset,
    step: str,
    scales: _Scales,
    error: _Error,
    is_late: IsLate = never_late,
) -> Artifact:
    """Divide the inputs of matrix products by the ``scales`` of the α with the least ``error``, and multiply the weights by them.

    Once ``is_late``, the remaining links stay unchanged. Raises the errors of ``smooth_quant``.
    """
    rescaling = Rescaling(infer_shapes(read_proto(artifact)))
    links = [link for link in rescaling.links if _is_smoothable(link)]
    seen = _observe(artifact, links, data)
    facts = {link.name: _smooth(link, seen[link.name], scales, error) for link in links if not is_late()}
    changed = rescaling.write()
    most = verify(artifact, changed, data) if any(fact["alpha"] for fact in facts.values()) else 0.0
    return artifact.derive(changed, step, {"data": data.digest}, {"links": facts, "max_relative_error": most})


def _is_smoothable(link: Link) -> bool:
    """True if only matrix products consume the link, and all of them read the same input tensor, which has several channels."""
    return (
        not link.clips
        and link.channels > 1
        and len({read.tensor for read in link.reads}) == 1
        and all(read.node.op_type in _PRODUCTS and read.block == 1 for read in link.reads)
    )


def _observe(artifact: Artifact, links: list[Link], data: Dataset) -> dict[str, Seen]:
    by_tensor = {link.reads[0].tensor: link for link in links}
    taps = Taps(artifact, data)
    quota = -(-_ROWS // taps.batches.count)
    low, high = ({link.name: np.zeros(link.channels) for link in links} for _ in range(2))
    kept: dict[str, list[Array]] = {link.name: [] for link in links}
    for tensor, array in taps.run(list(by_tensor)):
        name, rows = by_tensor[tensor].name, array.reshape(-1, array.shape[-1])
        low[name] = np.minimum(low[name], rows.min(axis=0))
        high[name] = np.maximum(high[name], rows.max(axis=0))
        kept[name].append(rows[np.linspace(0, len(rows) - 1, min(quota, len(rows))).astype(np.int64)])
    return {name: Seen(low[name], high[name], np.concatenate(parts)) for name, parts in kept.items()}


def _smooth(link: Link, seen: Seen, scales: _Scales, error: _Error) -> dict[str, object]:
    """Rescale ``link`` by the best α if that lowers the error enough. Returns the record for the provenance step."""
    chosen: float | None = None
    best_s = np.ones(link.channels)
    before = best = error(link, seen, best_s)
    for alpha in _ALPHAS:
        s = np.clip(scales(link, seen, alpha), 1 / _LIMIT, _LIMIT)
        found = error(link, seen, s)
        if found < min(best, _WORTH_IT * before):
            best, chosen, best_s = found, alpha, s
    link.rescale(best_s)
    return {
        "readers": [f"{read.node.outputs[0].name}" for read in link.reads],
        "alpha": chosen,
        "error": [before, best],
        "scales": [float(best_s.min()), float(best_s.max())],
    }


def quantized_error(link: Link, seen: Seen, s: Array) -> float:
    """Relative error of the link's products in INT8 if the link is divided by ``s``.

    Activations are rounded to 256 levels from the smallest to the largest value of all channels. The weights of each output have 127
    levels on each side of zero.
    """
    bottom, top = float((seen.low / s).min()), float((seen.high / s).max())
    scale = (top - bottom) / 255 or 1.0
    zero_point = round(-bottom / scale)
    integers = np.clip(np.round(seen.rows / s / scale) + zero_point, 0, 255)
    return products_error(link, seen.rows, (integers - zero_point) * scale, s, _rounded)


def products_error(link: Link, rows: Array, coarse: Array, s: Array, rounded: Callable[[Array], Array]) -> float:
    """Relative error of the link's products of ``coarse``, which approximates ``rows / s``, and weights that are ``rounded``.

    The squared error of each consumer is divided by its squared result. The error is the square root of the mean over the consumers.
    """
    shares = []
    for read in link.reads:
        array, side = read.side.operand.array, read.side
        weights = array if side.scale[0] == link.channels else array.T
        exact = rows @ weights
        got = coarse @ rounded(weights * s[:, None])
        shares.append(((got - exact) ** 2).sum() / max(float((exact**2).sum()), 1e-30))
    return float(np.sqrt(np.mean(shares)))


def _rounded(weights: Array) -> Array:
    """``weights``, shape (inputs, outputs), rounded to INT8 with one scale per output."""
    scale = np.abs(weights).max(axis=0) / 127
    scale[scale == 0] = 1.0
    return np.asarray(np.round(weights / scale) * scale)
