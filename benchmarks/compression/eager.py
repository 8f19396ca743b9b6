"""The networks of the ladder as a user of torch writes them, with the weights of their ONNX files: its first rung."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import onnx
from onnx import TensorProto, numpy_helper

from benchmarks.compression.data import TOKENS
from penstock.artifact import Artifact
from penstock.offline.compress.training.torch import Tensor, functional, nn, torch


def eager(name: str, artifact: Artifact) -> nn.Module:
    """The network ``name`` with the weights of ``artifact``, ready for inference. Its only argument is the input."""
    with torch.random.fork_rng(devices=[]):
        network = NETWORKS[name]()
    weights = _weights(artifact)
    with torch.no_grad():
        for part in network.modules():
            for parameter in _parameters(part):
                value = next(weights)
                parameter.copy_(value.T if isinstance(part, nn.Linear) and value.ndim == 2 else value)
    assert next(weights, None) is None, f"'{name}' has fewer weights than its ONNX file"
    return network.eval()


class Residual(nn.Module):
    """A trunk beside a shortcut, and a ReLU after their sum unless ``relu`` is False."""

    def __init__(self, trunk: nn.Module, shortcut: nn.Module | None = None, relu: bool = True) -> None:
        super().__init__()
        self.trunk, self.shortcut, self.relu = trunk, shortcut, relu

    def forward(self, x: Tensor) -> Tensor:
        y = self.trunk(x) + (x if self.shortcut is None else self.shortcut(x))
        return functional.relu(y) if self.relu else y


class EncoderLayer(nn.Module):
    """A post-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.first_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.second_norm = nn.LayerNorm(width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values))
        mixed = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
        x = self.first_norm(x + self.mix(mixed.transpose(1, 2).flatten(2)))
        return self.second_norm(x + self.down(functional.gelu(self.up(x))))


class Positions(nn.Module):
    """Adds what it learned about each position."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Mean(nn.Module):
    """The mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def _conv(channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution and BatchNormalization."""
    sizes = {"stride": stride, "padding": kernel // 2, "groups": groups}
    return [nn.Conv2d(channels_in, channels, kernel, bias=False, **sizes), nn.BatchNorm2d(channels)]


def _layer(channels_in: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution and ReLU."""
    return [nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups), nn.ReLU()]


def _pooled(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def _resnet18() -> nn.Module:
    parts = [*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for channels in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and channels > 64 else 1
            trunk = [*_conv(channels_in, channels, 3, stride), nn.ReLU(), *_conv(channels, channels, 3)]
            same = stride == 1 and channels_in == channels
            shortcut = None if same else nn.Sequential(*_conv(channels_in, channels, 1, stride))
            parts.append(Residual(nn.Sequential(*trunk), shortcut))
            channels_in = channels
    return nn.Sequential(*parts, *_pooled(512, 1000))


def _mobilenet() -> nn.Module:
    parts = [*_conv(3, 32, 3, 2), nn.ReLU6()]
    channels_in = 32
    for expansion, channels, blocks, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for block in range(blocks):
            width, step = expansion * channels_in, stride if block == 0 else 1
            trunk = [*_conv(channels_in, width, 1), nn.ReLU6()] if expansion > 1 else []
            trunk += [*_conv(width, width, 3, step, width), nn.ReLU6(), *_conv(width, channels, 1)]
            same = step == 1 and channels_in == channels
            parts.append(Residual(nn.Sequential(*trunk), relu=False) if same else nn.Sequential(*trunk))
            channels_in = channels
    return nn.Sequential(*parts, *_conv(320, 1280, 1), nn.ReLU6(), *_pooled(1280, 1000))


def _encoder() -> nn.Module:
    return nn.Sequential(*(EncoderLayer(384, 6) for _ in range(6)))


def _residual() -> nn.Module:
    parts = _layer(1, 32, 3)
    for channels_in, channels, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1)):
        trunk = nn.Sequential(*_layer(channels_in, channels, 3, stride), nn.Conv2d(channels, channels, 3, 1, 1))
        same = channels_in == channels
        parts.append(Residual(trunk, None if same else nn.Conv2d(channels_in, channels, 1, stride)))
    return nn.Sequential(*parts, *_pooled(64, 10))


def _depthwise() -> nn.Module:
    parts = _layer(1, 32, 3)
    for channels_in, channels, stride in ((32, 48, 1), (48, 64, 2), (64, 96, 1)):
        parts += [*_layer(channels_in, channels_in, 3, stride, channels_in), *_layer(channels_in, channels, 1)]
    return nn.Sequential(*parts, *_pooled(96, 10))


def _text_encoder() -> nn.Module:
    layers = (EncoderLayer(64, 4) for _ in range(2))
    return nn.Sequential(nn.Embedding(128, 64), Positions(TOKENS, 64), *layers, Mean(), nn.Linear(64, 4))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": _resnet18,
    "MobileNet-v2-like": _mobilenet,
    "6-layer encoder": _encoder,
    "residual": _residual,
    "depthwise": _depthwise,
    "encoder": _text_encoder,
    "MLP": _mlp,
}
"""By their names in the ladder."""


def _parameters(part: nn.Module) -> list[Tensor]:
    """The tensors of ``part`` itself, in the order in which the ONNX networks make theirs."""
    if isinstance(part, nn.BatchNorm2d):
        return [part.weight, part.running_var, part.bias, part.running_mean]
    return list(part.parameters(recurse=False))


def _weights(artifact: Artifact) -> Iterator[Tensor]:
    """The trained tensors of ``artifact`` as they were made; not its shapes and scalars."""
    tensors = onnx.load_model_from_string(artifact.data).graph.initializer
    kept = [tensor for tensor in tensors if tensor.data_type == TensorProto.FLOAT and tensor.dims]
    for tensor in sorted(kept, key=lambda one: int(re.sub(r"\D", "", one.name))):
        yield torch.from_numpy(numpy_helper.to_array(tensor).copy())
