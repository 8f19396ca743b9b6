"""Small Caffe networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.zoo.caffe import Network
from converted import differences, export
from penstock.offline.convert.base import ConvertOptions, FrameworkModel
from penstock.offline.convert.frameworks.caffe import CONVERTER
from penstock.tensor import Array


def opened(net: Network, folder: Path, options: ConvertOptions = ConvertOptions()) -> FrameworkModel:  # noqa: B008 - frozen
    return CONVERTER.open(net.write(folder, "net"), options)


def image(*shape: int) -> Network:
    dims = " ".join(f"dim: {dim}" for dim in shape)
    return Network(f'input: "data" input_shape {{ {dims} }}\n')


def compare(net: Network, folder: Path, array: Array, **more: Array) -> dict[str, Array]:
    """The outputs of ``net`` in numpy. Checks that its ONNX model gives the same."""
    source = opened(net, folder)
    exported = export(source, folder / "model.onnx")
    inputs = {"data": np.asarray(array, np.float32), **more}
    assert not differences(source, exported, folder / "model.onnx", inputs)
    return source.forward(inputs)
