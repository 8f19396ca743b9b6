"""What tests of the conversion of TensorFlow do with its models."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

pytest.importorskip("tf2onnx")
tf = pytest.importorskip("tensorflow")

from benchmarks.zoo.tensorflow import MODELS  # noqa: E402
from penstock.offline.convert.base import ConvertOptions, FrameworkModel  # noqa: E402
from penstock.offline.convert.frameworks.tensorflow import CONVERTER  # noqa: E402
from penstock.tensor import DataType, Signature  # noqa: E402

_WORDS = np.array(["cat", "zebra", "bird"], object)


def opened(name: str, folder: Path, **options: Any) -> FrameworkModel:
    model = MODELS[name]
    place = folder / name
    place.mkdir(exist_ok=True)
    source: Any = model.make(place)
    if isinstance(source, str):
        module, _, made = source.partition(":")
        source = getattr(importlib.import_module(module), made)()
    return CONVERTER.open(source, ConvertOptions(**options) if options else model.options)


def inputs_for(signature: Signature, rows: int = 3, size: int = 7) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for spec in signature.inputs:
        shape = [dim if dim >= 0 else size if axis else rows for axis, dim in enumerate(spec.shape)]
        if spec.datatype is DataType.BYTES:
            made[spec.name] = np.resize(_WORDS, shape)
        elif spec.datatype.is_float:
            made[spec.name] = rng.normal(size=shape).astype(spec.datatype.dtype)
        else:
            made[spec.name] = rng.integers(0, 4, shape).astype(spec.datatype.dtype)
    return made


def run(path: Path | bytes, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    read = {one.name for one in session.get_inputs()}
    values = session.run(None, {name: array for name, array in inputs.items() if name in read})
    return dict(zip([one.name for one in session.get_outputs()], values, strict=True))
