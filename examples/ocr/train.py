"""The two networks of the example, and their training on rendered pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
import torch
from text import CHARACTERS, HEIGHT, WIDTH, Page, shrunk
from torch import Tensor, nn
from torch.nn import functional

from penstock.pipeline.steps.boxes.cut import WarpBoxes
from penstock.pipeline.steps.image.geometry import Letterbox


def layer(channels_in: int, channels: int, stride: int | tuple[int, int] = 1) -> nn.Sequential:
    """A 3×3 convolution with BatchNorm and ReLU."""
    convolution = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


class Detector(nn.Module):
    """A small U-Net: [N, 3, 192, 256] to the probability of text [N, 1, 192, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = layer(3, 16, 2), layer(16, 32, 2), layer(32, 48, 2)
        self.middle, self.up2, self.up1 = layer(48, 48), layer(80, 32), layer(48, 16)
        self.head = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        """Logits in training, otherwise probabilities."""
        half = self.down1(image)
        quarter = self.down2(half)
        wide = self.middle(self.down3(quarter))
        wide = self.up2(torch.cat([_doubled(wide), quarter], 1))
        found: Tensor = _doubled(self.head(self.up1(torch.cat([_doubled(wide), half], 1))))
        return found if self.training else found.sigmoid()


class Recogniser(nn.Module):
    """Convolutions down to a height of 1: a line [N, 3, 32, 256] to logits [N, 64, 64] of the blank and the characters."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Sequential(layer(3, 32, 2), layer(32, 64, 2), layer(64, 96, (2, 1)), layer(96, 128, (2, 1)))
        # With two axes, though the height is 1: ONNX Runtime divides a convolution along one axis among its threads if a line is
        # alone, and then adds in another order than in a batch.
        self.context = nn.Sequential(nn.Conv2d(256, 192, (1, 5), padding=(0, 2)), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Conv2d(192, len(CHARACTERS) + 1, (1, 3), padding=(0, 1))

    def forward(self, line: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.head(self.context(self.columns(line).flatten(1, 2)[:, :, None]))
        return logits[:, :, 0].transpose(1, 2)


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2.0, mode="bilinear")


def planes(pictures: list[Any]) -> Tensor:
    """As the steps normalise and layout do."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def detector_batches(pages: list[Page], chance: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures, and where the shrunk boxes of their lines are."""
    while True:
        chosen = [pages[number] for number in chance.choice(len(pages), 8)]
        maps = [
            cv2.fillPoly(np.zeros((HEIGHT, WIDTH), np.float32), list(shrunk(one.boxes).astype(np.int32)), 1)
            for one in chosen
        ]
        yield planes([one.pixels for one in chosen]), torch.from_numpy(np.stack(maps))[:, None]


def line_batches(pages: list[Page], chance: np.random.Generator) -> Iterator[tuple[Tensor, list[str]]]:
    """Lines, cut out by the steps of the pipeline at boxes that are inexact as those of a detector, and their texts."""
    box = Letterbox(size=(32, 256), like="yolox")
    while True:
        lines, texts = [], []
        for number in chance.choice(len(pages), 12):
            one = pages[number]
            boxes = one.boxes + chance.normal(0, 1.2, one.boxes.shape).astype(np.float32)
            crops = WarpBoxes(turn_tall=False).run({"image": one.pixels, "boxes": boxes})["crops"]
            lines += [box.run({"value": crop})["value"] for crop in crops]
            texts += one.texts
        yield planes(lines), texts


def detector_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy, and the overlap of the regions."""
    found = logits.sigmoid()
    overlap = 2 * (found * truth).sum() / (found.sum() + truth.sum() + 1)
    return functional.binary_cross_entropy_with_logits(logits, truth) + 1 - overlap


def ctc_loss(logits: Tensor, texts: list[str]) -> Tensor:
    """Connectionist temporal classification; class 0 is the blank."""
    targets = torch.tensor([CHARACTERS.index(each) + 1 for text in texts for each in text])
    lengths = torch.tensor([len(text) for text in texts])
    times = torch.full((len(texts),), logits.shape[1])
    return functional.ctc_loss(logits.log_softmax(2).transpose(0, 1), targets, times, lengths, zero_infinity=True)


def train(model: nn.Module, batches: Iterator[tuple[Tensor, Any]], loss_of: Callable[..., Tensor], steps: int) -> None:
    """AdamW with a one-cycle schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps + 1)
    for step in range(1, steps + 1):
        x, truth = next(batches)
        optimizer.zero_grad()
        loss = loss_of(model(x), truth)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"  {type(model).__name__} step {step} of {steps}  loss {loss.item():.4f}", flush=True)
    model.eval()
