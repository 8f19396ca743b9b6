"""Modules of torch, and what tests of their conversion do with them."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.artifact import Artifact
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.offline.sessions import loaded
from penstock.tensor import DataType

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
nn = torch.nn

from penstock.offline.convert.frameworks.torch import CONVERTER  # noqa: E402


def x(*shape: int | str, name: str = "x", datatype: DataType = DataType.FP32) -> InputSpec:
    return InputSpec(name, datatype, shape)


def opened(module, *inputs: InputSpec, **options):
    return CONVERTER.open(module, ConvertOptions(inputs=inputs, **options))


def feeds_of(source, size: int, seed: int) -> dict[str, np.ndarray]:
    """Plausible inputs whose free dimensions have ``size``."""
    generator, feeds = np.random.default_rng(seed), {}
    for spec in source.signature.inputs:
        low = {axis.index: axis.low for axis in source.axes.get(spec.name, ())}
        shape = [max(size, low[axis]) if dim < 0 else dim for axis, dim in enumerate(spec.shape)]
        made = generator.normal(size=shape) if spec.datatype.is_float else generator.integers(0, min(size, 2), shape)
        feeds[spec.name] = np.asarray(made, spec.datatype.dtype)
    return feeds


def run(path: Path, feeds: dict[str, np.ndarray], tensors: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The outputs of the ONNX model, and its inner ``tensors``."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    known = {value.name for value in model.graph.output}
    for tensor in dict.fromkeys(tensors):
        if tensor not in known:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(tensor))
    model = onnx.shape_inference.infer_shapes(model)
    types = {value.name: value for value in model.graph.value_info}
    for place, value in enumerate(model.graph.output):
        if value.name in types:
            model.graph.output[place].CopyFrom(types[value.name])
    with loaded(Artifact.from_bytes(model.SerializeToString()), as_written=True) as session:
        return session.forward(feeds)


class Affine(nn.Module):
    """Is in training mode, and behaves differently there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return {"scores": self.norm(self.layer(x)), "mean": x.mean(1)}


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None


class Packed(nn.Module):
    def forward(self, pair: Pair, rest: list[torch.Tensor], scale: float = 2.0):
        assert isinstance(pair, Pair)
        assert isinstance(rest, list)
        return pair.left * scale + rest[0] - rest[1], None, {"size": pair.left.shape[0]}
