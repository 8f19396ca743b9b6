"""Train an estimator of the quality of frames, and run it over a clip whose quality falls.

pip install 'penstock[image,video,torch]'
python examples/video_quality/quality.py --output quality
penstock video quality/quality.bundle quality/clip.mp4 -o quality/scores.csv
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frames import SIZE, damaged, scene, some, write_clip
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.runtime import Pipeline

EXAMPLE = Path(__file__).parent


class Regressor(nn.Module):
    """Convolutions, and the mean and the maximum over the frame of what they find: [N, 1, H, W] to a quality [N, 1] in 0..1."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(1, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.coarse = nn.Sequential(nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.estimate = nn.Sequential(nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, image: Tensor) -> Tensor:
        """The quality."""
        fine = self.fine(image)
        features = [found for part in (fine, self.coarse(fine)) for found in (part.mean((2, 3)), part.amax((2, 3)) / 4)]
        quality: Tensor = self.estimate(torch.cat(features, 1))
        return quality


def train(count: int, epochs: int) -> Regressor:
    """AdamW with a one-cycle schedule, on mirrored frames too."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums have a fixed order, and small layers gain nothing from more threads
    frames, truths = some(count, 0)
    x, y, model = (
        torch.from_numpy(np.stack(frames))[:, None].float() / 63.75 - 2,
        torch.from_numpy(truths)[:, None],
        Regressor(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=epochs * -(-count // 16))
    for epoch in range(epochs):
        for batch in torch.randperm(count).split(16):
            optimizer.zero_grad()
            functional.smooth_l1_loss(
                model(x[batch].flip(3) if epoch % 2 else x[batch]), y[batch], beta=0.02
            ).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def write(folder: Path, count: int = 800, epochs: int = 8) -> Path:
    """Train, and write a clip, two frames, the pipeline and its bundle to ``folder``. Returns the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    axes = {"image": {0: "batch", 2: "height", 3: "width"}, "quality": {0: "batch"}}
    names: dict[str, Any] = {"input_names": ["image"], "output_names": ["quality"], "dynamic_axes": axes}
    torch.onnx.export(
        train(count, epochs),
        (torch.zeros(1, 1, SIZE, SIZE),),
        folder / "model.onnx",
        opset_version=18,
        dynamo=False,
        **names,
    )
    Image.fromarray(scene(1_000_000)).save(folder / "sharp.png")
    Image.fromarray(damaged(scene(1_000_000), 1.5, 8)).save(folder / "damaged.png")
    write_clip(folder / "clip.mp4")
    shutil.copyfile(EXAMPLE / "pipeline.yaml", folder / "pipeline.yaml")
    pack_pipeline(folder / "pipeline.yaml", folder / "quality.bundle", overwrite=True)
    return folder / "quality.bundle"


def measure(bundle: Path, count: int = 300) -> tuple[float, float]:
    """Rank correlation and mean absolute error of the estimates on frames of new scenes."""
    frames, truths = some(count, 3_000_000)
    with Pipeline.open(bundle) as pipeline:
        found = np.array([answer["quality"].item() for answer in pipeline.stream(frames)])
    ranks = np.corrcoef(found.argsort().argsort(), truths.argsort().argsort())[0, 1]
    return float(ranks), float(np.abs(found - truths).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, pack and measure an estimator of quality.")
    parser.add_argument("--output", type=Path, default=Path("quality"), help="folder to write to")
    written = write(parser.parse_args().output)
    print("on new scenes: rank correlation {:.3f}, mean error {:.3f}".format(*measure(written)))
    print(f"wrote {written}")
