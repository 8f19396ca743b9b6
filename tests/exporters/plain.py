# ruff: noqa: E501, N812 - a layer is easier to read in one line
"""Architectures in plain torch modules, after the papers that introduced them, at a fraction of their sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.exporters.architecture import Architecture, Rows, both, images, integers, normal, tokens


def conv(
    c: int,
    d: int,
    k: int | tuple[int, int] = 3,
    stride: int = 1,
    groups: int = 1,
    act: type[nn.Module] | None = nn.ReLU,
    **more: Any,
) -> nn.Sequential:
    """Convolution, normalisation, activation."""
    more = {"padding": k // 2 if isinstance(k, int) else 0, "bias": False} | more
    parts: list[nn.Module] = [nn.Conv2d(c, d, k, stride, groups=groups, **more), nn.BatchNorm2d(d)]
    return nn.Sequential(*parts, *([act()] if act else []))


def head(c: int, classes: int = 10) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes)]


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.shortcut, self.after = nn.Sequential(*inner), shortcut or nn.Identity(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.shortcut(x) + self.inner(x))


class Branches(nn.Module):
    """Branches whose outputs are concatenated; with ``dense``, also their input."""

    def __init__(self, *branches: nn.Module, dense: bool = False) -> None:
        super().__init__()
        self.branches, self.dense = nn.ModuleList(branches), dense

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*([x] if self.dense else []), *(branch(x) for branch in self.branches)], 1)


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, c: int, gate: type[nn.Module] = nn.Sigmoid) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c // 4, 1), nn.ReLU(), nn.Conv2d(c // 4, c, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


class Shuffle(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.right = nn.Sequential(
            conv(c // 2, c // 2, 1), conv(c // 2, c // 2, groups=c // 2, act=None), conv(c // 2, c // 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        x = torch.cat([left, self.right(right)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def inverted(c: int, d: int, stride: int, act: type[nn.Module], squeeze: bool) -> nn.Module:
    parts = [conv(c, 4 * c, 1, act=act), conv(4 * c, 4 * c, stride=stride, groups=4 * c, act=act)]
    parts += [Squeeze(4 * c, nn.Hardsigmoid if act is nn.Hardswish else nn.Sigmoid)] if squeeze else []
    parts.append(conv(4 * c, d, 1, act=None))
    return Residual(*parts) if stride == 1 and c == d else nn.Sequential(*parts)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 16), conv(16, 32)
        self.up1, self.up2 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.d, self.e, self.out = conv(32, 16), conv(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.a(image)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up1(c), b], 1))
        return self.out(self.e(torch.cat([self.up2(d), a], 1)))


class DeepLab(nn.Module):
    """Dilated convolutions beside one another, and bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16, stride=2)
        self.spread = Branches(conv(16, 8, 1), conv(16, 8, dilation=2, padding=2), conv(16, 8, dilation=4, padding=4))
        self.out = nn.Conv2d(24, 5, 1)

    def forward(self, image: Tensor) -> Tensor:
        found = self.out(self.spread(self.stem(image)))
        return F.interpolate(found, size=image.shape[-2:], mode="bilinear", align_corners=False)


class Pyramid(nn.Module):
    """A feature pyramid: nearest upsampling and lateral additions; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8, stride=2), conv(8, 16, stride=2), conv(16, 32, stride=2)
        self.sides = nn.ModuleList(nn.Conv2d(c, 8, 1) for c in (8, 16, 32))
        self.out = nn.ModuleList(nn.Conv2d(8, 6, 3, padding=1) for _ in range(3))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        a = self.a(image)
        b = self.b(a)
        c = self.c(b)
        top = self.sides[2](c)
        middle = self.sides[1](b) + F.interpolate(top, scale_factor=2.0, mode="nearest")
        low = self.sides[0](a) + F.interpolate(middle, scale_factor=2.0, mode="nearest")
        return tuple(out(x) for out, x in zip(self.out, (low, middle, top), strict=True))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if memory is not None:
            _, k, v = self.qkv(memory).chunk(3, -1)
        q, k, v = (y.reshape(n, -1, self.heads, width // self.heads).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        if bias is not None:
            scores = scores + bias
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """A transformer's block, with normalisation before or after."""

    def __init__(
        self, width: int, *, before: bool = True, causal: bool = False, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.attention, self.before = Attention(width, causal=causal), before
        self.norms = nn.ModuleList(norm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.before:
            x = x + self.attention(self.norms[0](x), bias=bias)
            return x + self.mlp(self.norms[1](x))
        x = self.norms[0](x + self.attention(x, bias=bias))
        return self.norms[1](x + self.mlp(x))


class RootNorm(nn.Module):
    """RMS normalisation from single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class HandNorm(nn.Module):
    """Layer normalisation from single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.randn(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 17, width))
        self.blocks, self.norm, self.out = (
            nn.Sequential(Block(width), Block(width)),
            nn.LayerNorm(width),
            nn.Linear(width, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.out(self.norm(self.blocks(x))[:, 0]).softmax(-1)


class Windows(nn.Module):
    """Attention within windows that are shifted by half of their size."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch, self.block, self.out = nn.Conv2d(3, width, 4, 4), Block(width), nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).permute(0, 2, 3, 1)
        for shift in (0, 2):
            x = torch.roll(x, (-shift, -shift), (1, 2))
            n, h, w, c = x.shape
            y = x.reshape(n, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
            y = self.block(y).reshape(n, h // 4, w // 4, 4, 4, c).transpose(2, 3)
            x = torch.roll(y.reshape(n, h, w, c), (shift, shift), (1, 2))
        return self.out(x.mean((1, 2)))


class Mixer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.out = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2)
        x = (x + self.places(x)).transpose(1, 2)
        return self.out((x + self.channels(x)).mean(1))


class Words(nn.Module):
    """Embeddings, blocks, and a head: an encoder or a causal decoder, with tied weights if asked for."""

    def __init__(
        self,
        *,
        causal: bool = False,
        tied: bool = False,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        before: bool = True,
    ) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(100, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block(32, before=before, causal=causal, norm=norm) for _ in range(2))
        self.norm, self.out = norm(32), nn.Linear(32, 100 if causal else 3, bias=not tied)
        if tied:
            self.out.weight = self.word.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.word(input_ids) + self.place(torch.arange(input_ids.shape[1]))
        bias = (1.0 - attention_mask[:, None, None].to(x.dtype)) * -10000.0
        for block in self.blocks:
            x = block(x, bias)
        return self.out(self.norm(x))


class Translator(nn.Module):
    """An encoder and a decoder with relative positions, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.relative = nn.Embedding(100, 32), nn.Embedding(31, 4)
        self.encoder, self.decoder = Block(32, norm=RootNorm), Block(32, norm=RootNorm, causal=True)
        self.cross, self.out = Attention(32), nn.Linear(32, 100)

    def forward(self, input_ids: Tensor, decoder_ids: Tensor) -> Tensor:
        at = torch.arange(16)
        bias = self.relative(at[None] - at[:, None] + 15).permute(2, 0, 1)[None]
        memory = self.encoder(self.word(input_ids), bias)
        x = self.decoder(self.word(decoder_ids), bias)
        return self.out(x + self.cross(x, memory))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **more: Any) -> None:
        super().__init__()
        self.cell = kind(8, 16, batch_first=True, **more)
        self.out = nn.Linear(32 if more.get("bidirectional") else 16, 5)

    def forward(self, series: Tensor) -> Tensor:
        return self.out(self.cell(series)[0][:, -1])


class Reader(nn.Module):
    """Text in images: convolutions, then a recurrent network over columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell = (
            nn.Sequential(conv(1, 8, stride=2), conv(8, 16, stride=2)),
            nn.LSTM(128, 16, bidirectional=True, batch_first=True),
        )
        self.out = nn.Linear(32, 20)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.out(self.cell(x.permute(0, 3, 1, 2).flatten(2))[0]).log_softmax(-1)


class Causal(nn.Module):
    """Dilated causal convolutions over time; gated as in WaveNet if asked for."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gated, self.start = gated, nn.Conv1d(8, 16, 1)
        self.steps = nn.ModuleList(nn.Conv1d(16, 32 if gated else 16, 2, dilation=2**i) for i in range(4))
        self.mix, self.out = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4)), nn.Conv1d(16, 5, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.start(series.transpose(1, 2))
        total = torch.zeros_like(x)
        for number, (step, mix) in enumerate(zip(self.steps, self.mix, strict=True)):
            y = step(F.pad(x, (2**number, 0)))
            if self.gated:
                a, b = y.chunk(2, 1)
                y = a.tanh() * b.sigmoid()
            else:
                y = y.relu()
            y = mix(y)
            x, total = x + y, total + y
        return self.out(total.relu() if self.gated else x)


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(50, 8), nn.Embedding(50, 1)
        self.deep = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, fields: Tensor) -> Tensor:
        e = self.embed(fields)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1, keepdim=True)
        return (self.first(fields).sum(1) + pairs + self.deep(e.flatten(1))).sigmoid()


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(4))
        self.bottom, self.top = (
            nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()),
            nn.Sequential(nn.Linear(26, 32), nn.ReLU(), nn.Linear(32, 1)),
        )
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).sigmoid()


class Graph(nn.Module):
    """Messages along the edges of graphs of eight nodes, summed by a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = nn.Linear(12, 12), nn.Linear(24, 12), nn.Linear(12, 3)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        wide = targets[..., None].expand(-1, -1, 12)
        for _ in range(2):
            sent = self.message(nodes).gather(1, sources[..., None].expand(-1, -1, 12)).relu()
            nodes = self.update(torch.cat([nodes, torch.zeros_like(nodes).scatter_add(1, wide, sent)], -1)).tanh()
        return self.out(nodes.mean(1))


class Yolo(nn.Module):
    """Grid cells decoded to boxes with objectness and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = (
            nn.Sequential(
                conv(3, 8, stride=2, act=nn.SiLU),
                conv(8, 16, stride=2, act=nn.SiLU),
                conv(16, 32, stride=2, act=nn.SiLU),
            ),
            nn.Conv2d(32, 24, 1),
        )
        y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
        self.register_buffer("grid", torch.stack([x, y], -1).view(1, 1, 4, 4, 2))
        self.register_buffer("anchors", torch.rand(1, 3, 1, 1, 2) * 8 + 4)

    def forward(self, image: Tensor) -> Tensor:
        y = self.out(self.stem(image)).view(-1, 3, 8, 4, 4).permute(0, 1, 3, 4, 2).sigmoid()
        xy, wh, rest = y.split((2, 2, 4), -1)
        return torch.cat([(xy * 2 - 0.5 + self.grid) * 8, (wh * 2) ** 2 * self.anchors, rest], -1).view(-1, 48, 8)


class Ssd(nn.Module):
    """Boxes and classes of two maps; the best boxes by score."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(conv(3, 16, stride=4)), conv(16, 32, stride=2)
        self.boxes, self.scores = (nn.ModuleList(nn.Conv2d(c, k, 3, padding=1) for c in (16, 32)) for k in (4, 5))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        maps = [self.a(image)]
        maps.append(self.b(maps[0]))
        boxes, scores = (
            torch.cat([head(m).flatten(2) for head, m in zip(heads, maps, strict=True)], 2).transpose(1, 2)
            for heads in (self.boxes, self.scores)
        )
        best, at = scores.softmax(-1)[..., 1:].amax(-1).topk(10, 1)
        return boxes.gather(1, at[..., None].expand(-1, -1, 4)), best


class Variational(nn.Module):
    """A variational autoencoder with its mean as the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(1024, 16),
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 1024),
            nn.Unflatten(1, (16, 8, 8)),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Sigmoid(),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(image).chunk(2, 1)
        return self.decoder(mean), mean, spread.exp()


class Points(nn.Module):
    """PointNet: shared layers for all points, then their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.out = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, points: Tensor) -> Tensor:
        return self.out(self.each(points.transpose(1, 2)).amax(-1))


class Embedder(nn.Module):
    """Embeddings of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            conv(3, 16, stride=2, act=nn.PReLU), conv(16, 32, stride=2, act=nn.PReLU), nn.Flatten(), nn.Linear(2048, 64)
        )

    def forward(self, image: Tensor) -> Tensor:
        return F.normalize(self.trunk(image), dim=1)


class Experts(nn.Module):
    """A mixture of experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ne,nd,edo->no", self.gate(x).softmax(-1), x, self.experts)


class ConvNext(nn.Module):
    def __init__(self, c: int = 24) -> None:
        super().__init__()
        self.stem, self.deep, self.norm = (
            nn.Conv2d(3, c, 4, 4),
            nn.Conv2d(c, c, 7, padding=3, groups=c),
            nn.LayerNorm(c),
        )
        self.mlp, self.gamma, self.out = (
            nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)),
            nn.Parameter(torch.ones(c) / 2),
            nn.Linear(c, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        y = self.gamma * self.mlp(self.norm(self.deep(x).permute(0, 2, 3, 1)))
        return self.out((x + y.permute(0, 3, 1, 2)).mean((2, 3)))


class Gated(nn.Module):
    """A sequence model with a rotary embedding and a gated product, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.norm, self.norm2, self.qkv = (
            nn.Embedding(100, 32),
            RootNorm(32),
            RootNorm(32),
            nn.Linear(32, 96, bias=False),
        )
        self.up, self.gate, self.down, self.out = (
            nn.Linear(32, 64, bias=False),
            nn.Linear(32, 64, bias=False),
            nn.Linear(64, 32, bias=False),
            nn.Linear(32, 100, bias=False),
        )
        angles = torch.arange(16.0)[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.word(input_ids)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        y = self.norm2(x)
        return self.out(x + self.down(F.silu(self.gate(y)) * self.up(y)))


def _sequence(*parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*parts)


def _image(*parts: Callable[[], nn.Module] | Any) -> Callable[[], nn.Module]:
    """A module whose input is called ``image``, made of the parts that the functions make."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(module for part in parts for module in part()))

        def forward(self, image: Tensor) -> Tensor:
            return self.body(image)

    return Image


class Table(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _convolutional() -> dict[str, Callable[[], list[nn.Module]]]:
    return {
        "lenet": lambda: [nn.Conv2d(3, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(400, 84), nn.Tanh(), nn.Linear(84, 10)],
        "vgg": lambda: [conv(3, 16), conv(16, 16), nn.MaxPool2d(2), conv(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)],
        "resnet": lambda: [conv(3, 16, stride=2), Residual(conv(16, 16), conv(16, 16, act=None), after=nn.ReLU()), Residual(conv(16, 32, stride=2), conv(32, 32, act=None), shortcut=conv(16, 32, 1, 2, act=None), after=nn.ReLU()), *head(32)],
        "resnext": lambda: [conv(3, 32, stride=2), Residual(conv(32, 32, 1), conv(32, 32, groups=8), conv(32, 32, 1, act=None), after=nn.ReLU()), *head(32)],
        "mobilenet-v1": lambda: [conv(3, 8, stride=2), *(part for c in (8, 16, 32) for part in (conv(c, c, groups=c), conv(c, 2 * c, 1))), *head(64)],
        "mobilenet-v2": lambda: [conv(3, 8, stride=2, act=nn.ReLU6), inverted(8, 8, 1, nn.ReLU6, False), inverted(8, 16, 2, nn.ReLU6, False), *head(16)],
        "mobilenet-v3": lambda: [conv(3, 8, stride=2, act=nn.Hardswish), inverted(8, 8, 1, nn.Hardswish, True), inverted(8, 16, 2, nn.Hardswish, True), *head(16)],
        "efficientnet": lambda: [conv(3, 8, stride=2, act=nn.SiLU), inverted(8, 8, 1, nn.SiLU, True), inverted(8, 16, 2, nn.SiLU, True), *head(16)],
        "densenet": lambda: [conv(3, 16, stride=2), Branches(conv(16, 8), dense=True), Branches(conv(24, 8), dense=True), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 1), nn.AvgPool2d(2), *head(16)],
        "shufflenet": lambda: [conv(3, 16, stride=2), Shuffle(16), Shuffle(16), *head(16)],
        "squeezenet": lambda: [conv(3, 16, stride=2), conv(16, 8, 1), Branches(conv(8, 16, 1), conv(8, 16)), nn.Conv2d(32, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
        "inception": lambda: [conv(3, 16, stride=2), Branches(conv(16, 8, 1), nn.Sequential(conv(16, 8, 1), conv(8, 8, 3)), nn.Sequential(conv(16, 4, 1), conv(4, 8, (1, 7), padding=(0, 3)), conv(8, 8, (7, 1), padding=(3, 0))), nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(16, 8, 1))), *head(32)],  # type: ignore[arg-type]
        "group-norm": lambda: [nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ELU(), nn.Conv2d(16, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.Mish(), *head(16)],
        "autoencoder": lambda: [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 8, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3, 2, 1, 1), nn.Tanh()],
        "super-resolution": lambda: [nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2)],
        "style": lambda: [nn.ReflectionPad2d(4), nn.Conv2d(3, 16, 9), nn.InstanceNorm2d(16), nn.ReLU(), Residual(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16)), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, padding=1)],
    }  # fmt: skip


def _others() -> dict[str, tuple[Callable[[], nn.Module], Rows]]:
    series = normal(series=(24, 8))
    edges = both(normal(nodes=(8, 12)), integers(sources=((20,), 8), targets=((20,), 8)))
    return {
        "mlp": (lambda: Table(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 3)), normal(x=(20,))),
        "tabular-norm": (lambda: Table(nn.BatchNorm1d(20), nn.Linear(20, 32), nn.SELU(), nn.Linear(32, 1)), normal(x=(20,))),
        "experts": (Experts, normal(x=(16,))),
        "unet": (UNet, images()),
        "deeplab": (DeepLab, images()),
        "feature-pyramid": (Pyramid, images()),
        "vit": (VisionTransformer, images()),
        "swin": (Windows, images()),
        "mixer": (Mixer, images()),
        "convnext": (ConvNext, images()),
        "bert": (lambda: Words(before=False), tokens()),
        "bert-by-hand": (lambda: Words(before=False, norm=HandNorm), tokens()),
        "gpt": (lambda: Words(causal=True), tokens()),
        "gpt-tied": (lambda: Words(causal=True, tied=True, norm=HandNorm), tokens()),
        "llama": (Gated, tokens(masked=False)),
        "t5": (Translator, both(tokens(masked=False), tokens(name="decoder_ids", masked=False))),
        "torch-encoder": (_encoder, normal(series=(24, 32))),
        "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), series),
        "bilstm": (lambda: Recurrent(nn.LSTM, bidirectional=True), series),
        "gru": (lambda: Recurrent(nn.GRU), series),
        "rnn": (lambda: Recurrent(nn.RNN), series),
        "crnn": (Reader, images(1)),
        "tcn": (lambda: Causal(gated=False), series),
        "wavenet": (lambda: Causal(gated=True), series),
        "deepfm": (DeepFM, integers(fields=((6,), 50))),
        "dlrm": (Dlrm, both(normal(dense=(13,)), integers(sparse=((4,), 50)))),
        "graph-network": (Graph, edges),
        "yolo": (Yolo, images()),
        "ssd": (Ssd, images()),
        "vae": (Variational, images()),
        "pointnet": (Points, normal(points=(40, 3))),
        "face-embedder": (Embedder, images()),
    }  # fmt: skip


def _encoder() -> nn.Module:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
            )
            self.out = nn.Linear(32, 4)

        def forward(self, series: Tensor) -> Tensor:
            return self.out(self.layers(series).mean(1))

    return Encoder()


def architectures() -> list[Architecture]:
    found = [Architecture(name, "torch", _image(make), images()) for name, make in _convolutional().items()]
    return found + [Architecture(name, "torch", make, rows) for name, (make, rows) in _others().items()]
