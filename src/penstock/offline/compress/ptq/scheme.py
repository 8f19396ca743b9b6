"""Chooses integer types for a quantised model that the CPU multiplies fast and without saturation."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.resources import INTEGER_DOT_PRODUCT, MachineFacts
from penstock.tensor import Array, DataType

_X86 = {"x86_64", "amd64", "i686"}
_ARM = {"aarch64", "arm64"}


class IntegerScheme(msgspec.Struct, frozen=True):
    """Integer types of activations (one scale and zero point per tensor) and weights (symmetric, by default one scale per output
    channel).

    Activations have a zero point, so that the values of a ReLU use every integer. Clipping at the smallest integer then replaces the
    ReLU. Only in this case do engines compute the ReLU in integers. With ``symmetric``, this holds for ranges without negative values.
    """

    activation: DataType
    weight: DataType
    reduce_range: bool
    """Weights use 7 of their 8 bits, so that the sum of two products does not saturate in 16 bits."""
    reason: str
    per_tensor: bool = False
    """Each matrix product has one scale for all its weights. This is less accurate, but faster in ONNX Runtime if there are few rows:
    with a scale per channel, ONNX Runtime also processes a zero point per channel. Convolutions always have scales per channel."""

    transposed: bool = True
    """Transposed convolutions become integer too, if the placement allows it. ONNX Runtime has no integer kernel for them."""

    symmetric: bool = False
    """Activations with negative values have the zero point 0. Their steps can be up to twice as wide, but OpenVINO multiplies two of
    them without a correction for zero points."""

    @property
    def activation_limits(self) -> tuple[int, int]:
        """The smallest and the largest integer of an activation. QuantizeLinear clips to these limits."""
        return (0, 255) if self.activation is DataType.UINT8 else (-128, 127)

    @property
    def weight_limit(self) -> int:
        """The largest magnitude of an integer weight."""
        return 64 if self.reduce_range else 127

    def parameters(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Scale and zero point (integers as float64) of activations from ``low`` to ``high``. An empty range has the scale 1."""
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        if self.symmetric:
            reach = np.maximum(-low, high)
            low, high = np.where(low < 0, -reach * 128 / 127, low), np.where(low < 0, reach, high)
        width = high - low
        scale = np.where(width > 0, width / 255, 1.0)
        return scale, np.round(self.activation_limits[0] - low / scale)


def integer_scheme(machine: MachineFacts) -> IntegerScheme:
    """The scheme whose products are exact on ``machine``. It is not always faster than FP32."""
    architecture = machine.architecture.lower()
    if architecture in _ARM:
        kernels = "dot-product instructions" if machine.has_integer_dot_product else "NEON kernels"
        return IntegerScheme(DataType.INT8, DataType.INT8, False, f"ARM: {kernels} multiply signed by signed bytes")
    if architecture in _X86 and machine.has_integer_dot_product:
        return IntegerScheme(
            DataType.UINT8, DataType.INT8, False, "x86 with VNNI or AMX: unsigned by signed bytes, added in 32 bits"
        )
    return IntegerScheme(
        DataType.UINT8,
        DataType.INT8,
        True,
        "weights of 7 bits, because it adds pairs of products in 16 bits, which weights of 8 bits saturate (no VNNI or AMX)",
    )


def symmetric(scheme: IntegerScheme) -> IntegerScheme:
    """``scheme`` with signed, symmetric activations."""
    return msgspec.structs.replace(scheme, activation=DataType.INT8, symmetric=True)


def required_isa(scheme: IntegerScheme, machine: MachineFacts) -> tuple[str, ...]:
    """The instruction sets that a CPU needs for exact results with a model of ``scheme`` made on ``machine``.

    8-bit weights saturate on CPUs without an integer dot product. 7-bit weights are exact on every CPU.
    """
    return (INTEGER_DOT_PRODUCT,) if machine.has_integer_dot_product and not scheme.reduce_range else ()
