"""Random models in FP16, BF16 and with quantised values, and small faults, to measure what parity finds in them.

A family and a seed give a model. No limit of parity was chosen on these models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import Array, DataType

FAMILIES = ("cnn", "mlp", "transformer", "recurrent")
"""Kinds of modules that ``module`` makes."""
_KINDS = {"float16": DataType.FP16, "bfloat16": DataType.BF16, "float32": DataType.FP32}
_WEIGHTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU")


def model(family: str, seed: int, kind: str) -> ZooModel:
    """A random module that computes in ``kind``: float16 or bfloat16, or float32 with values quantised by torch (``quantised``)."""
    rng = np.random.default_rng([seed, *family.encode(), *kind.encode()])
    made = module(family, seed, rng, is_quantised=kind == "quantised")
    torch = importlib.import_module("torch")
    width = made.width
    dims: dict[str, tuple[int | str, ...]] = {
        "cnn": ("N", width, "H", "W"),
        "mlp": ("N", width),
        "transformer": ("N", "L", width),
        "recurrent": ("N", "L", width),
    }
    if kind != "quantised":
        made = made.to(getattr(torch, kind))
    # Half of the modules take and give FP32, as those under autocast.
    outside = "float32" if kind == "quantised" or rng.random() < 0.5 else kind
    made.outside, made.inside = (getattr(torch, one) for one in (outside, "float32" if kind == "quantised" else kind))
    spec = InputSpec("x", _KINDS[outside], dims[family])
    return ZooModel("torch", lambda folder: made, ConvertOptions(inputs=(spec,)))


def module(family: str, seed: int, rng: np.random.Generator, *, is_quantised: bool = False) -> Any:
    """A random module of the ``family`` in FP32."""
    torch = importlib.import_module("torch")
    torch.manual_seed(seed)
    layers, width = _LAYERS[family](torch.nn, rng)
    if is_quantised:
        layers = [each for layer in layers for each in (_steps(torch, float(rng.uniform(2.5, 4.0))), layer)]
        layers.append(_steps(torch, 4.0))

    class Coarse(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*layers)
            self.width = width
            self.inside = self.outside = torch.float32

        def forward(self, x: Any) -> Any:
            return self.layers(x.to(self.inside)).to(self.outside)

    made = Coarse().eval()
    for one in made.modules():
        if isinstance(one, torch.nn.BatchNorm2d):
            one.running_mean.normal_(0.0, 0.3)
            one.running_var.uniform_(0.3, 2.0)
        if isinstance(one, torch.nn.BatchNorm2d | torch.nn.LayerNorm | torch.nn.GroupNorm):
            torch.nn.init.uniform_(one.weight, 0.5, 1.5)
            torch.nn.init.normal_(one.bias, 0.0, 0.3)
    return made


def _steps(torch: Any, largest: float) -> Any:
    class Steps(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.fake_quantize_per_tensor_affine(x, largest / 127, 0, -128, 127)

    return Steps()


def _activation(nn: Any, rng: np.random.Generator) -> Any:
    return rng.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Hardswish, nn.LeakyReLU])()


def _residual(nn: Any, layers: list[Any]) -> Any:
    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    return Residual()


def _cnn(nn: Any, rng: np.random.Generator) -> tuple[list[Any], int]:
    width = first = int(rng.integers(1, 5))
    layers: list[Any] = []
    for _ in range(rng.integers(2, 6)):
        wide = int(rng.choice([6, 8, 12, 16]))
        layers += [
            nn.Conv2d(width, wide, 3, padding=1, stride=int(rng.choice([1, 1, 2])), bias=bool(rng.random() < 0.5))
        ]
        layers += [rng.choice([nn.BatchNorm2d(wide), nn.GroupNorm(2, wide), nn.Identity()]), _activation(nn, rng)]
        if rng.random() < 0.4:
            layers.append(_residual(nn, [nn.Conv2d(wide, wide, 3, padding=1, groups=wide), _activation(nn, rng)]))
        width = wide
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, int(rng.integers(2, 12)))]
    return layers + (head if rng.random() < 0.6 else [nn.Conv2d(width, 3, 1)]), first


def _mlp(nn: Any, rng: np.random.Generator) -> tuple[list[Any], int]:
    width = first = int(rng.integers(4, 32))
    layers: list[Any] = []
    for _ in range(rng.integers(2, 7)):
        wide = int(rng.choice([8, 16, 24, 48]))
        layers += [nn.Linear(width, wide), _activation(nn, rng)]
        if rng.random() < 0.5:
            layers.append(nn.LayerNorm(wide))
        width = wide
    return [*layers, nn.Linear(width, int(rng.integers(1, 10)))], first


def _transformer(nn: Any, rng: np.random.Generator) -> tuple[list[Any], int]:
    width, heads = int(rng.choice([8, 16, 32])), int(rng.choice([2, 4]))
    options = {"dim_feedforward": 2 * width, "batch_first": True, "norm_first": bool(rng.random() < 0.5)}
    activation = str(rng.choice(["relu", "gelu"]))
    layers = [
        nn.TransformerEncoderLayer(width, heads, activation=activation, dropout=0.0, **options)
        for _ in range(rng.integers(1, 4))
    ]
    return [nn.Linear(width, width), *layers, nn.LayerNorm(width), nn.Linear(width, 5)], width


def _recurrent(nn: Any, rng: np.random.Generator) -> tuple[list[Any], int]:
    class States(nn.Module):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x)[0]

    width, hidden = int(rng.integers(3, 10)), int(rng.choice([4, 8, 12]))
    cell = rng.choice([nn.LSTM, nn.GRU])
    both = bool(rng.random() < 0.4)
    inner = cell(width, hidden, num_layers=int(rng.integers(1, 3)), bidirectional=both, batch_first=True)
    return [States(inner), nn.Linear(hidden * (1 + both), 4)], width


_LAYERS: dict[str, Callable[[Any, np.random.Generator], tuple[list[Any], int]]] = {
    "cnn": _cnn,
    "mlp": _mlp,
    "transformer": _transformer,
    "recurrent": _recurrent,
}


class Weights:
    """The constants of ``proto`` that faults change; a quantised weight is a constant with its scale."""

    def __init__(self, proto: onnx.ModelProto, rng: np.random.Generator) -> None:
        self.proto, self.rng = proto, rng
        self._tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._makers = {name: node for node in proto.graph.node for name in node.output}

    def gain(self, factor: float) -> bool:
        return self._change(1, lambda array: array * factor, self.rng, is_scale=True)

    def row(self) -> bool:
        """One row of a weight is half as large."""

        def change(array: Array) -> Array:
            at = (
                (0, int(self.rng.integers(array.shape[1])))
                if array.ndim == 3
                else int(self.rng.integers(array.shape[0]))
            )
            array[at] = array[at] * 0.5
            return array

        return self._change(1, change, self.rng)

    def bias(self) -> bool:
        """A bias is lost."""
        return self._change(2, np.zeros_like, self.rng)

    def one_bias(self) -> bool:
        """One element of a bias is lost."""

        def change(array: Array) -> Array:
            array.flat[int(np.abs(array.astype(np.float64)).argmax())] = 0
            return array

        return self._change(2, change, self.rng)

    def epsilon(self) -> bool:
        """A hundred times the epsilon of a normalisation."""
        nodes = [node for node in self.proto.graph.node if "Normalization" in node.op_type]
        for node in nodes[:1]:
            at = next((each for each in node.attribute if each.name == "epsilon"), None)
            if at is None:
                at = node.attribute.add(name="epsilon", type=onnx.AttributeProto.FLOAT, f=1e-5)
            at.f *= 100
        return bool(nodes)

    def _change(
        self, at: int, change: Callable[[Array], Array], rng: np.random.Generator, *, is_scale: bool = False
    ) -> bool:
        found = [tensor for node in self.proto.graph.node for tensor in self._read(node, at, is_scale)]
        if not found:
            return False
        tensor = found[int(rng.integers(len(found)))]
        before = np.array(numpy_helper.to_array(tensor))
        after = change(before.copy()).astype(before.dtype)
        tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))
        return not np.array_equal(before, after)

    def _read(self, node: onnx.NodeProto, at: int, is_scale: bool) -> list[onnx.TensorProto]:
        if at == 2 and node.op_type == "Add":
            names = [name for name in node.input if name in self._tensors and len(self._tensors[name].dims) == 1]
        else:
            at = 3 if at == 2 and node.op_type in ("LSTM", "GRU") else at
            names = [node.input[at]] if node.op_type in _WEIGHTS and at < len(node.input) else []
        for given in names:
            name, maker = given, self._makers.get(given)
            while maker is not None and maker.op_type in ("Transpose", "Cast", "DequantizeLinear"):
                is_found = is_scale and maker.op_type == "DequantizeLinear"
                name = maker.input[1 if is_found else 0]
                maker = None if is_found else self._makers.get(name)
            if name in self._tensors:
                return [self._tensors[name]]
        return []


FAULTS: dict[str, Callable[[Weights], bool]] = {
    "gain of 2 %": lambda weights: weights.gain(1.02),
    "gain of 0.5 %": lambda weights: weights.gain(1.005),
    "lost bias": Weights.bias,
    "one lost element of a bias": Weights.one_bias,
    "epsilon": Weights.epsilon,
    "half of a row": Weights.row,
}


def injected(proto: onnx.ModelProto, fault: str, seed: int) -> onnx.ModelProto | None:
    """``proto`` with the ``fault`` at a random place; None if it applies nowhere."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    return changed if FAULTS[fault](Weights(changed, np.random.default_rng(seed))) else None
