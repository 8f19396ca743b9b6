"""The torch modules of the zoo. Each is made with a fixed seed and has a few thousand weights at most."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name


def conv(c: int, d: int, k: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, normalisation with statistics other than 0 and 1, activation."""
    norm = nn.BatchNorm2d(d)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    return nn.Sequential(nn.Conv2d(c, d, k, stride, k // 2, groups=groups, bias=False), norm, nn.ReLU())


class Residual(nn.Module):
    def __init__(self, c: int, d: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(conv(c, d, 3, stride), nn.Conv2d(d, d, 3, padding=1))
        self.shortcut = nn.Conv2d(c, d, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depth, self.squeeze = conv(3, 12, 1), conv(12, 12, 3, 2, 12), nn.Conv2d(12, 8, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
        self.head = nn.Sequential(nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, image: Tensor) -> Tensor:
        x = self.squeeze(self.depth(self.expand(image)))
        return self.head(x * self.gate(x))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = conv(3, 4, 1), nn.Sequential(conv(3, 4, 1), conv(4, 4))
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.last = nn.MaxPool2d(3, 2, ceil_mode=True)

    def forward(self, image: Tensor) -> Tensor:
        return F.log_softmax(self.last(torch.cat([self.one(image), self.three(image), self.pool(image)], 1)), 1)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.right = conv(3, 8), nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, image: Tensor) -> Tensor:
        left, right = self.first(image).chunk(2, 1)
        x = torch.cat([left, self.right(right)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = conv(1, 4, 3, 2), nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1)
        self.last = nn.Conv2d(9, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        low = self.down(image)
        smooth = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(torch.cat([image, self.up(low), smooth], 1)).sigmoid()


def iou(boxes: Tensor) -> Tensor:
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low, high = (
        torch.maximum(boxes[:, None, :2], boxes[None, :, :2]),
        torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:]),
    )
    shared = (high - low).clamp(min=0).prod(2)
    return shared / (area[:, None] + area[None] - shared)


class Detector(nn.Module):
    """Boxes and scores for one image, and the boxes that suppression keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes, self.scores = conv(3, 6, 3, 4), nn.Conv2d(6, 4, 1), nn.Conv2d(6, 1, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(image)
        corner, size = self.boxes(x)[0].flatten(1).t().split([2, 2], 1)
        scores = self.scores(x)[0].flatten().sigmoid()
        order = scores.argsort(descending=True)
        boxes = torch.cat([corner, corner + F.softplus(size)], 1)[order]
        overlap = (iou(boxes) > 0.5).float().triu(1)
        keep = torch.ones(boxes.shape[0])
        for row in range(boxes.shape[0]):
            keep = keep * (1 - overlap[row] * keep[row])
        kept = keep > 0
        return boxes[kept], scores[order][kept]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.rnn = kind(6, 5, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(5 * (1 + bidirectional), 3)

    def forward(self, sequence: Tensor) -> tuple[Tensor, Tensor]:
        steps, state = self.rnn(sequence)
        return self.head(steps[:, -1]), state[0] if isinstance(state, tuple) else state


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)


class DecoderStep(nn.Module):
    """One step of a decoder: a token, and the keys and values of the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 8), nn.ModuleList(), nn.Linear(8, 20)
        self.qkv.extend(nn.Linear(8, 24) for _ in range(2))

    def forward(self, token: Tensor, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, after = self.embed(token), []
        for layer, (keys, values) in zip(self.qkv, cache, strict=True):
            q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in layer(x).chunk(3, 2))
            after.append((torch.cat([keys, k], 2), torch.cat([values, v], 2)))
            x = x + F.scaled_dot_product_attention(q, *after[-1]).transpose(1, 2).flatten(2)
        return self.out(x), after


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        found, _ = self.attention(x, x, x, attn_mask=mask)
        return self.norm(x + found)


class Decision(nn.Module):
    """A branch that depends on values, which only scripting preserves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if bool(x.sum() > 0) else self.right(x).tanh()


class Repeat(nn.Module):
    """A loop whose length depends on values."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        for _ in range(int(count)):
            x = x * 0.5 + 1
        return x


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (self.layer(x),))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(1.5 * x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class CustomAutograd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(self.layer(x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 6, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class Warp(nn.Module):
    """A spatial transformer: an affine grid, and samples of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Linear(3, 6)

    def forward(self, image: Tensor) -> Tensor:
        theta = self.theta(image.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)


class Deformable(nn.Module):
    """Samples at learned offsets before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        n, _, h, w = image.shape
        rows, columns = torch.linspace(-1, 1, h), torch.linspace(-1, 1, w)
        base = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], 2).expand(n, h, w, 2)
        return self.last(F.grid_sample(image, base + 0.1 * self.offsets(image).permute(0, 2, 3, 1), align_corners=True))


class Spectrum(nn.Module):
    def forward(self, signal: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.fft.rfft(signal)
        return found.abs(), torch.view_as_real(found)


class Stft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, signal: Tensor) -> Tensor:
        found = torch.stft(signal, 16, 8, window=self.window, center=False, return_complex=True)
        return found.abs().pow(2).clamp(min=1e-5).log()


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,hjk,blk->bhil", x, self.weight, x @ torch.ones(4, 5))


class Scatter(nn.Module):
    """Mean of messages over the edges of a graph."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        start, end = edges[0], edges[1]
        total = torch.zeros_like(nodes).index_add(0, end, nodes[start])
        ones = torch.ones(end.shape[0], dtype=nodes.dtype)
        count = torch.zeros(nodes.shape[0]).scatter_add(0, end, ones)
        return total / count.clamp(min=1)[:, None]


class Nested(nn.Module):
    def forward(self, batch: dict[str, Tensor], pair: tuple[Tensor, Tensor]) -> dict[str, Tensor | list[Tensor]]:
        total = batch["left"] + batch["right"]
        return {"total": total, "parts": [total * pair[0], total - pair[1]], "nothing": None}


@dataclasses.dataclass
class Prediction:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 2.0) -> Prediction:
        y = self.layer(x)
        return Prediction(y * scale, (x, y))


class Tied(nn.Module):
    """The output layer has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids))


class Counter(nn.Module):
    """Changes its buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x - self.mean, self.calls


class Noisy(nn.Module):
    """Dropout that is active in inference mode, beside an output that does not depend on it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), x * 2


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect"), nn.PixelShuffle(2), nn.PReLU()
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image).clamp(0, 1)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance, self.local = (
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.LocalResponseNorm(3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self.instance(self.group(x)))


class Ranking(nn.Module):
    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        best, places = scores.topk(3, 1)
        return best, places, scores.sort(1, descending=True).values.cumsum(1)


class Patches(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        patches = F.unfold(image, 2, stride=2)
        return F.fold(patches * 2, image.shape[2:], 2, stride=2)


class Wave(nn.Module):
    """Dilated causal convolutions with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**depth) for depth in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for depth, layer in enumerate(self.layers):
            filtered, gate = layer(F.pad(x, (2**depth, 0))).chunk(2, 1)
            x = x + filtered.tanh() * gate.sigmoid()
        return x


class Rotary(nn.Module):
    """RMS normalisation and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.register_buffer("rates", torch.exp(torch.arange(4) * -math.log(100.0) / 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.rates
        left, right = self.norm(x).chunk(2, 2)
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], 2)


class Unconvertible(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x) + torch.special.i1(x).sum()


def seeded(cls: type[nn.Module], *arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return cls(*arguments).eval()
