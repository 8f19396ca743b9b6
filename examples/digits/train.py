"""Train the digits model and write ``model.onnx``, ``calibrate.npz`` and ``evaluate.npz``.

    pip install -e '.[torch]'
    python examples/digits/train.py [--output DIR]

Test images do not influence the model. The number of epochs is chosen on validation images, which are a part of the training images.
The model is then trained again on all training images. The test images are used once, to print the final accuracy.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import onnx
import torch
from data import Images, load_split
from torch import Tensor, nn
from torch.nn import functional

SEED = 20
EPOCHS = (20, 40)
BATCH_SIZE = 50
OPSET = 18


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm beside a shortcut [He et al., "Deep Residual Learning", 2016]."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels, H / stride, W / stride]."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """A stem, three residual blocks, global average pooling and a linear layer. Widths are multiples of the width of SIMD
    registers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.block1 = ResidualBlock(32, 32)
        self.block2 = ResidualBlock(32, 64, stride=2)
        self.block3 = ResidualBlock(64, 64)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [N, 1, 8, 8] to logits [N, 10]."""
        x = self.block3(self.block2(self.block1(self.stem(image))))
        logits: Tensor = self.classify(self.pool(x).flatten(1))
        return logits


def train(images: Images, epochs: int) -> DigitsNet:
    """Train a new model on ``images``: AdamW, one-cycle cosine schedule, label smoothing, small random motions."""
    torch.manual_seed(SEED)
    model = DigitsNet()
    x, labels = torch.from_numpy(images.image), torch.from_numpy(images.labels)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = epochs * math.ceil(len(x) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(x)).split(BATCH_SIZE):
            loss = functional.cross_entropy(model(move(x[batch])), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        if epoch % 10 == 0:
            print(f"  epoch {epoch:3d} of {epochs}  loss {total / len(x):.4f}", flush=True)
    return model.eval()


def move(x: Tensor) -> Tensor:
    """Rotate each image by up to 10° and shift it by up to one pixel."""
    angle = (torch.rand(len(x)) * 2 - 1) * math.radians(10)
    shift = (torch.rand(len(x), 2) * 2 - 1) * 2 / x.shape[-1]  # the grid spans -1..1, so a pixel is 2 / width
    cos, sin = angle.cos(), angle.sin()
    rotation = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
    grid = functional.affine_grid(torch.cat([rotation, shift[:, :, None]], 2), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, align_corners=False)


@torch.no_grad()
def accuracy(model: DigitsNet, images: Images) -> float:
    """Top-1 accuracy in 0..1."""
    predicted = model(torch.from_numpy(images.image)).argmax(1).numpy()
    return float(np.mean(predicted == images.labels))


def export(model: DigitsNet, path: Path) -> None:
    """Write ``model`` as ONNX with a dynamic batch axis, and keep its BatchNormalization nodes.

    ``penstock build`` folds them, so the exporter must not: ``PRESERVE`` keeps the model in inference mode without the exporter's own
    fusions. Paths of source files that the exporter records are removed.
    """
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, 8, 8),),
        path,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        opset_version=OPSET,
        training=torch.onnx.TrainingMode.PRESERVE,
        do_constant_folding=False,
        dynamo=False,  # the newer exporter either folds BatchNorm or adds about sixty internal nodes
    )
    proto = onnx.load(path)
    for part in (proto, proto.graph, *proto.graph.node):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)


def main() -> None:
    """Choose the number of epochs, train, print the accuracy on the test images and write the three files."""
    parser = argparse.ArgumentParser(description="Train the digits model and write model.onnx and its data.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    output: Path = parser.parse_args().output
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)  # with a fixed number of threads, sums have a fixed order

    split = load_split()
    scores = {}
    for epochs in EPOCHS:
        print(f"{epochs} epochs on {len(split.fit.labels)} images")
        scores[epochs] = accuracy(train(split.fit, epochs), split.validate)
        print(f"  validation accuracy {scores[epochs]:.2%}")
    best = max(scores, key=scores.__getitem__)
    print(f"{best} epochs are best; training again on all {len(split.train.labels)} training images")
    model = train(split.train, best)
    print(f"test accuracy {accuracy(model, split.test):.2%} on {len(split.test.labels)} images")

    output.mkdir(parents=True, exist_ok=True)
    export(model, output / "model.onnx")
    np.savez_compressed(output / "calibrate.npz", **split.calibrate._asdict())
    np.savez_compressed(output / "evaluate.npz", **split.test._asdict())
    print(f"wrote model.onnx, calibrate.npz and evaluate.npz to {output}")


if __name__ == "__main__":
    main()
