"""Train a classifier of synthetic sounds on the spectrograms of the pipeline's own step, and measure it at several levels of noise.

pip install 'penstock[audio,torch]'
python examples/sound_classes/sounds.py --output sounds
penstock infer sounds/sounds.bundle sounds/*.wav
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.pipeline.steps.audio.log_mel import LogMel
from penstock.runtime import Pipeline

EXAMPLE = Path(__file__).parent
RATE = 8000
CLASSES = ("tone", "chirp", "siren", "chord", "clicks", "hiss")
SPECTROGRAM = LogMel(rate=RATE, n_fft=512, hop=160, n_mels=48)
"""The step of the pipeline, with the same options."""


def sound(kind: str, chance: np.random.Generator, noise_db: float) -> NDArray[np.float32]:
    """A second of a random sound, with white noise whose power is ``noise_db`` relative to that of the sound."""
    time = np.arange(RATE) / RATE
    start = chance.uniform(200, 1500)
    if kind == "tone":
        wave = np.sin(2 * np.pi * start * time + chance.uniform(0, 6))
    elif kind == "chirp":
        wave = np.sin(2 * np.pi * (start * time + chance.choice([-1, 1]) * chance.uniform(0.2, 0.45) * start * time**2))
    elif kind == "siren":
        depth, speed = chance.uniform(0.15, 0.4) * start, chance.uniform(2, 6)
        wave = np.sin(2 * np.pi * start * time + depth / speed * np.sin(2 * np.pi * speed * time))
    elif kind == "chord":
        ratios = np.array([[1], [1.26], [1.5]]) * start
        wave = np.sin(2 * np.pi * ratios * time).sum(0)
    elif kind == "clicks":
        wave = np.zeros(RATE)
        wave[:: int(chance.uniform(300, 1500))] = 1
        wave = np.convolve(wave, np.exp(-np.arange(60) / 12), "same")
    else:
        hiss = chance.normal(size=RATE)
        wave = hiss - 0.95 * np.roll(hiss, 1)  # brighter than the white noise that is added to all sounds
    wave = wave / np.sqrt(np.mean(wave**2)) + 10 ** (noise_db / 20) * chance.normal(size=RATE)
    quiet: NDArray[np.float32] = (wave / np.abs(wave).max() * chance.uniform(0.1, 0.9)).astype(np.float32)
    return quiet


def some(count: int, seed: int, noise_db: tuple[float, float]) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    """Sounds of all classes in turn, and their classes."""
    chance, labels = np.random.default_rng(seed), np.arange(count) % len(CLASSES)
    return [sound(CLASSES[label], chance, chance.uniform(*noise_db)) for label in labels], labels


class Classifier(nn.Module):
    """Three convolutions over a spectrogram [N, 48, frames], and the mean over what they find."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (1, 16, 32, 48)
        layers = [
            nn.Sequential(nn.Conv2d(sizes[i], sizes[i + 1], 3, 2, 1), nn.BatchNorm2d(sizes[i + 1]), nn.ReLU())
            for i in range(3)
        ]
        self.layers, self.classify = nn.Sequential(*layers), nn.Linear(48, len(CLASSES))

    def forward(self, spectrogram: Tensor) -> Tensor:
        """The logits [N, classes]."""
        logits: Tensor = self.classify(self.layers(spectrogram[:, None] / 40 + 0.5).mean((2, 3)))
        return logits


def train(count: int, epochs: int) -> Classifier:
    """AdamW on ``count`` sounds, whose noise has up to thirty times their power."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums have a fixed order, and small layers gain nothing from more threads
    sounds, classes = some(count, 0, (-25, 15))
    x = torch.from_numpy(np.stack([SPECTROGRAM.run({"value": one})["value"] for one in sounds]))
    labels, model = torch.from_numpy(classes), Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(count).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def write(folder: Path, count: int = 1500, epochs: int = 20) -> Path:
    """Train, and write a WAV file for each class, the pipeline and its bundle to ``folder``. Returns the bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    model = train(count, epochs)
    axes = {"spectrogram": {0: "batch"}, "logits": {0: "batch"}}
    names = {"input_names": ["spectrogram"], "output_names": ["logits"], "dynamic_axes": axes}
    torch.onnx.export(model, (torch.zeros(1, 48, 51),), folder / "model.onnx", opset_version=18, dynamo=False, **names)
    (folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    for one, label in zip(*some(len(CLASSES), 1, (-20, -10)), strict=True):
        soundfile.write(folder / f"{CLASSES[label]}.wav", one, RATE)
    shutil.copyfile(EXAMPLE / "pipeline.yaml", folder / "pipeline.yaml")
    pack_pipeline(folder / "pipeline.yaml", folder / "sounds.bundle", overwrite=True)
    return folder / "sounds.bundle"


def accuracy(bundle: Path, count: int, noise_db: float) -> float:
    """Share of ``count`` new sounds with noise whose best label is right."""
    sounds, labels = some(count, 2, (noise_db, noise_db))
    with Pipeline.open(bundle) as pipeline:
        best = [answer["labels"][0] for answer in pipeline.stream(sounds)]
    return float(np.mean([CLASSES[label] == name for label, name in zip(labels, best, strict=True)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, pack and measure a classifier of sounds.")
    parser.add_argument("--output", type=Path, default=Path("sounds"), help="folder to write to")
    written = write(parser.parse_args().output)
    for level in (-20, 0, 5, 10):
        print(f"noise of {level:+d} dB: accuracy {accuracy(written, 300, level):.1%}; chance is {1 / len(CLASSES):.1%}")
    print(f"wrote {written}")
