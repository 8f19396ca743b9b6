"""Activation-aware scaling: round those weights more finely that meet large activations. In float, the result is the same.

The method is that of J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys 2024,
§3.2: s_j = mean|X_j|^α. The operator that writes X is divided by s, and the weights of all products that read X are multiplied by s.
So an error of a weight in channel j counts s_j times less. Each tensor gets the α with the lowest error of the products with rounded
weights on data, as in SmoothQuant. If no α lowers the error, the tensor stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.offline.compress.ptq.equalize import factors
from penstock.offline.compress.ptq.rescale import Link
from penstock.offline.compress.ptq.smooth_quant import Seen, products_error, rescale_products
from penstock.offline.deadline import IsLate, never_late
from penstock.tensor import Array


def activation_aware(
    artifact: Artifact, data: Dataset, rounded: Callable[[Array], Array], is_late: IsLate = never_late
) -> Artifact:
    """``artifact`` with the same outputs, and with products that are more accurate if their weights [K, N] are ``rounded``.

    Raises the errors of ``smooth_quant``.
    """

    def scales(_: Link, seen: Seen, alpha: float) -> Array:
        s = factors(np.abs(seen.rows).mean(axis=0, dtype=np.float64), np.ones(seen.rows.shape[1]), alpha)
        return np.asarray(s / np.sqrt(s.max() * s.min()))

    def error(link: Link, seen: Seen, s: Array) -> float:
        return products_error(link, seen.rows, seen.rows / s, s, rounded)

    return rescale_products(artifact, data, "awq", scales, error, is_late)
