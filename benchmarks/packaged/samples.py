"""Samples like those that the packages give to their models: rendered text, photographs, speech-like sound, files.

Each function yields calls with one row, in float32 unless said otherwise. All are reproducible.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images

from penstock.tensor import Array

Call = dict[str, Array]
RATE = 16_000
"""Samples of sound per second."""
_FONTS = Path("/usr/share/fonts")
_INK = 160
"""Maximum brightness of text."""
_BYTES, _PADDING = 1024, 256
"""Bytes from each end of a file, and the number that stands for a missing byte."""


def lines(name: str, height: int, count: int, *, channels: int = 3, width: int | None = None) -> Iterator[Call]:
    """Lines of text as images [1, channels, height, W], from -1 to 1. Without ``width``, W follows the text, in steps of 64."""
    rng = random.Random(1)
    for _ in range(count):
        picture = _line(" ".join(rng.sample(_words(), rng.randint(1, 4))), height, rng)
        wide = width or -(-picture.width // 64) * 64
        page = Image.new("RGB", (wide, height), picture.getpixel((0, 0)))
        page.paste(picture.crop((0, 0, wide, height)))
        if width and rng.random() < 0.5:
            page = page.rotate(180)
        yield {name: _planes(page.convert("RGB" if channels == 3 else "L")) / 127.5 - 1}


def pages(name: str, size: tuple[int, int], count: int) -> Iterator[Call]:
    """Pages with paragraphs [1, 3, height, width], from -1 to 1; ``size`` is (height, width)."""
    rng = random.Random(2)
    for _ in range(count):
        page = Image.new("RGB", size[::-1], (rng.randint(200, 255),) * 3)
        top = rng.randint(5, 40)
        while top < size[0] - 40:
            text = _line(" ".join(rng.sample(_words(), rng.randint(2, 9))), rng.randint(14, 34), rng)
            page.paste(text, (rng.randint(5, 60), top))
            top += text.height + rng.randint(2, 30)
        yield {name: _planes(page) / 127.5 - 1}


def photographs(name: str, size: tuple[int, int], count: int, high: float = 1.0) -> Iterator[Call]:
    """Parts of two photographs [1, 3, height, width], from 0 to ``high``, mirrored, brighter and darker."""
    rng = random.Random(3)
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    for _ in range(count):
        photo = rng.choice(photos)
        side = rng.randint(120, min(photo.size))
        left, top = rng.randint(0, photo.width - side), rng.randint(0, photo.height - side)
        part = photo.crop((left, top, left + side, top + side)).resize(size[::-1])
        if rng.random() < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        yield {name: np.clip(_planes(part) * rng.uniform(0.6, 1.3), 0, 255) * np.float32(high / 255)}


def sounds(count: int, length: int, rate: int = RATE) -> Iterator[Array]:
    """Speech-like sound [length], from -1 to 1: voiced parts with formants, hissing parts and pauses, with noise."""
    rng = np.random.default_rng(4)
    for _ in range(count):
        parts, total = list[Array](), 0
        while total < length:
            part = _syllable(rng, int(rng.uniform(0.05, 0.3) * rate), rate)
            parts.append(part)
            total += len(part)
        noise = rng.standard_normal(length) * 10 ** rng.uniform(-4, -1.5)
        yield (np.concatenate(parts)[:length] * rng.uniform(0.1, 0.9) + noise).clip(-1, 1).astype(np.float32)


def embedded_sounds(name: str, chain: tuple[Path, Path], frames: int, count: int) -> Iterator[Call]:
    """Features of sound [1, frames, 96], made by two models: a mel spectrogram and an embedding of 76 of its frames."""
    mel, embed = (ort.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in chain)
    for sound in sounds(count, RATE * 2 + frames * 1280):
        spectrum = mel.run(None, {"input": sound[None] * 32767})[0].squeeze() / 10 + 2
        windows = np.stack([spectrum[8 * start : 8 * start + 76] for start in range(frames)])[..., None]
        yield {name: embed.run(None, {"input_1": windows.astype(np.float32)})[0].reshape(1, frames, 96)}


def spectra(name: str, mel: Path, count: int) -> Iterator[Call]:
    """Mel spectrograms of sound [1, 76, 32, 1]."""
    session = ort.InferenceSession(mel, providers=["CPUExecutionProvider"])
    for sound in sounds(count, RATE):
        spectrum = session.run(None, {"input": sound[None] * 32767})[0].squeeze() / 10 + 2
        yield {name: spectrum[None, :76, :, None].astype(np.float32)}


def files(name: str, count: int) -> Iterator[Call]:
    """The first and the last 1,024 bytes of files of this Python, int32 [1, 2048]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 64)
    for path in random.Random(5).sample(found, count):
        data = np.frombuffer(path.read_bytes().strip(), np.uint8)
        row = np.full(2 * _BYTES, _PADDING, np.int32)
        head, tail = data[:_BYTES], data[-_BYTES:]
        row[: len(head)], row[2 * _BYTES - len(tail) :] = head, tail
        yield {name: row[None]}


def _syllable(rng: np.random.Generator, length: int, rate: int) -> Array:
    kind = rng.random()
    envelope = np.hanning(length)
    if kind < 0.2:
        return np.zeros(length)
    if kind < 0.4:
        return np.diff(rng.standard_normal(length + 1)) * 0.1 * envelope
    pitch = rng.uniform(80, 250) * (1 + 0.1 * np.sin(np.linspace(0, rng.uniform(1, 6), length)))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = rng.uniform((300, 900, 2200), (800, 2200, 3000))
    voice = np.zeros(length)
    for harmonic in range(1, 30):
        level = sum(np.exp(-(((harmonic * pitch.mean() - one) / 200) ** 2)) for one in formants)
        voice += (level + 0.02) / harmonic**0.5 * np.sin(harmonic * phase)
    return voice / max(1e-9, np.abs(voice).max()) * envelope


@functools.cache
def _words() -> tuple[str, ...]:
    text = inspect.getsource(argparse)
    return tuple(sorted({word for word in text.split() if word.isalpha() and len(word) > 2}))


@functools.cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


@functools.cache
def _font_files() -> tuple[Path, ...]:
    found = sorted(path for path in _FONTS.rglob("*.ttf") if "Sans" in path.name or "Serif" in path.name)
    if not found:
        raise FileNotFoundError(f"no TrueType fonts in {_FONTS}: install fonts-dejavu-core")
    return tuple(found)


def _line(text: str, height: int, rng: random.Random) -> Image.Image:
    """``text`` as an image of this height, with random font, colours and noise."""
    font = _font(rng.choice(_font_files()), int(height * 0.7))
    width = int(font.getlength(text)) + height
    picture = Image.new("RGB", (width, height), (rng.randint(190, 255),) * 3)
    ink = tuple(rng.randint(0, _INK) for _ in range(3))
    ImageDraw.Draw(picture).text((height // 2, height // 10), text, font=font, fill=ink)
    return picture


def _planes(picture: Image.Image) -> Array:
    pixels = np.asarray(picture, np.float32)
    return pixels[None, None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)[None]
