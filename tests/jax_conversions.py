"""What tests of the conversion of JAX do with its functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax2onnx")


from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.convert.frameworks.jax import CONVERTER, JaxModel
from penstock.tensor import Array, DataType

SIZES = {"N": 4, "T": 7}


def inputs_of(source: JaxModel, sizes: dict[str, int] = SIZES) -> dict[str, Array]:
    rng, found = np.random.default_rng(1), {}
    for spec in source.signature.inputs:
        names = {axis.index: axis.name for axis in source.axes[spec.name]}
        shape = [sizes[names[i]] if dim == -1 else dim for i, dim in enumerate(spec.shape)]
        value = rng.standard_normal(shape) if spec.datatype.is_float else rng.integers(0, 9, shape)
        found[spec.name] = value.astype(spec.datatype.dtype)
    return found


def opened(function: Any, **inputs: tuple[int | str, ...]) -> JaxModel:
    specs = tuple(InputSpec(name, DataType.FP32, shape) for name, shape in inputs.items())
    return CONVERTER.open(function, ConvertOptions(inputs=specs))
