"""Data sets that need no download: scikit-learn's digits, characters rendered from installed fonts, and texts of the standard
library. MNIST is used if the user has a folder with it.

Every set is split once by a fixed seed, or as it came, into samples to train, to calibrate (part of the former), to choose by, and
to test on. Nothing is fitted or chosen on the test samples.
"""

from __future__ import annotations

import encodings
import functools
import gzip
import importlib
import inspect
import struct
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from penstock.dataset import Dataset, make_dataset
from penstock.tensor import Array

CALIBRATION = 100
"""Number of calibration samples. It is small, because users often have few samples."""
TOKENS = 64
"""Number of characters in a text sample."""
_SEED = 0
_VALIDATION = 0.2
"""Share of the samples to train on that choices are made by instead."""
_FONTS = Path("/usr/share/fonts")
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest")
_WINDOWS = 900
"""Maximum number of samples per class of texts, so that all classes have similar sizes."""


class Split(NamedTuple):
    """A data set, split into samples for training, calibration and testing."""

    train: Dataset
    calibrate: Dataset
    validate: Dataset
    """For choices: a ranking, or which models are accurate enough."""
    test: Dataset
    """For the figures of what was chosen."""


@functools.cache
def digits() -> Split:
    """1,797 real images of handwritten digits: ``input`` [N, 1, 8, 8] in 0..1; 800 to train, 200 to choose by, 797 to test."""
    images, labels = load_digits(return_X_y=True)
    return _split((images.reshape(-1, 1, 8, 8) / 16).astype(np.float32), labels, 797)


@functools.cache
def digits28() -> Split:
    """The same images scaled up to [N, 1, 28, 28], the size of MNIST's; 1,040 to train, 260 to choose by, 497 to test."""
    images, labels = load_digits(return_X_y=True)
    large = ndimage.zoom(images.reshape(-1, 8, 8) / 16, (1, 3.5, 3.5), order=1)
    return _split(large[:, None].astype(np.float32), labels, 497)


@functools.cache
def patterns() -> Split:
    """The digits as vectors [N, 64], for autoencoders. There are no labels."""
    split = digits()
    return Split(*(make_dataset({"input": part.inputs["input"].reshape(-1, 64)}, None) for part in split))


@functools.cache
def glyphs(count: int = 12_000) -> Split:
    """Digits and capital letters (36 classes), rendered from all installed fonts, rotated, shifted and with noise. ``input`` is
    [N, 1, 28, 28] with values from 0 to 1. A sixth of the images is for testing.

    Raises RuntimeError if no font is installed.
    """
    fonts = [font for path in sorted(_FONTS.rglob("*.ttf")) for font in _sizes(path)]
    if not fonts:
        raise RuntimeError(f"no TrueType font below {_FONTS}: install fonts-dejavu")
    rng = np.random.default_rng(_SEED)
    labels = rng.integers(0, len(_CHARACTERS), count)
    images = np.stack([_render(_CHARACTERS[label], fonts[rng.integers(len(fonts))], rng) for label in labels])
    return _split(images[:, None], labels, count // 6)


@functools.cache
def texts() -> Split:
    """Texts of the standard library in four classes: code, docstrings, the language reference, and tables of encodings. ``input``
    is int64 [N, 64] and contains character codes below 128. The samples do not overlap.
    """
    modules = [importlib.import_module(name) for name in _PACKAGES]
    files = [file for module in modules for file in sorted(Path(module.__path__[0]).glob("*.py"))]
    kinds = (
        "".join(file.read_text() for file in files),
        "\n".join(text for module in modules for text in _docstrings(module)),
        "\n".join(topics.topics.values()),
        "".join(file.read_text() for file in sorted(Path(encodings.__path__[0]).glob("cp*.py"))),
    )
    windows = []
    rng = np.random.default_rng(_SEED)
    for text in kinds:
        codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int64)
        found = codes[: len(codes) // TOKENS * TOKENS].reshape(-1, TOKENS)
        windows.append(rng.permutation(found)[:_WINDOWS])
    labels = np.repeat(np.arange(len(windows)), [len(part) for part in windows])
    return _split(np.concatenate(windows), labels, 0.25)


def mnist(folder: Path) -> Split:
    """The data set in a folder with MNIST's four IDX files, which may be gzipped. Raises RuntimeError if a file is missing or not
    an IDX file.
    """
    arrays = [
        _idx(folder, f"{part}-{kind}")
        for part in ("train", "t10k")
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    images, labels, test_images, test_labels = arrays
    train, test = (
        make_dataset({"input": (x[:, None] / np.float32(255)).astype(np.float32)}, y.astype(np.int64))
        for x, y in ((images, labels), (test_images, test_labels))
    )
    return _held_out(train, test)


def take(data: Dataset, count: int) -> Dataset:
    """The first ``count`` samples."""
    return make_dataset(data.rows(0, count), None if data.labels is None else data.labels[:count])


def contaminated(data: Dataset, share: float = 0.1, factor: float = 40.0) -> Dataset:
    """``data`` in which the fraction ``share`` of the samples, evenly spaced, is multiplied by ``factor``, as by a broken sensor."""
    step = round(1 / share)
    inputs = {}
    for name, array in data.inputs.items():
        inputs[name] = array.copy()
        inputs[name][::step] *= factor
    return make_dataset(inputs, data.labels)


def _split(inputs: Array, labels: Array, test: float) -> Split:
    x, x_test, y, y_test = train_test_split(inputs, labels, test_size=test, random_state=_SEED, stratify=labels)
    train, held_out = make_dataset({"input": x}, y), make_dataset({"input": x_test}, y_test)
    return _held_out(train, held_out)


def _held_out(train: Dataset, test: Dataset) -> Split:
    train, validate = train.split_shuffled(_VALIDATION, seed=_SEED)
    return Split(train, take(train, CALIBRATION), validate, test)


def _sizes(path: Path) -> list[ImageFont.FreeTypeFont]:
    fonts = [ImageFont.truetype(str(path), size) for size in (18, 20, 22)]
    # Symbol fonts draw letters as empty images, or all as the same box.
    shapes = {bytes(fonts[0].getmask(character)) for character in "A08K"}
    return fonts if len(shapes) == 4 else []


def _render(character: str, font: ImageFont.FreeTypeFont, rng: np.random.Generator) -> Array:
    image = Image.new("L", (28, 28))
    x, y = rng.uniform(-2, 2, 2)
    ImageDraw.Draw(image).text((14 + x, 14 + y), character, fill=255, font=font, anchor="mm")
    turned = image.rotate(rng.uniform(-15, 15), Image.Resampling.BILINEAR)
    noisy = np.asarray(turned, np.float32) / 255 + rng.normal(0, 0.1, (28, 28))
    return noisy.clip(0, 1).astype(np.float32)


def _docstrings(module: ModuleType) -> Iterator[str]:
    """The docstrings of ``module``, its submodules, classes and functions, without repetitions."""
    seen: set[str] = set()
    files = sorted(Path(module.__path__[0]).glob("[a-z]*.py")) if hasattr(module, "__path__") else []
    # Some submodules can be imported only on Windows.
    names = [file.stem for file in files if not file.stem.startswith("windows")]
    parts = [module, *(importlib.import_module(f"{module.__name__}.{name}") for name in names)]
    for part in parts:
        things = [part, *(thing for _, thing in inspect.getmembers(part))]
        things += [member for thing in things if inspect.isclass(thing) for _, member in inspect.getmembers(thing)]
        for thing in things:
            owner = getattr(thing, "__module__", getattr(thing, "__name__", "")) or ""
            text = inspect.getdoc(thing) if callable(thing) or inspect.ismodule(thing) else None
            if text and isinstance(owner, str) and owner.split(".")[0] == module.__name__ and text not in seen:
                seen.add(text)
                yield " ".join(text.split())


def _idx(folder: Path, name: str) -> Array:
    """Read an IDX file: two zero bytes, the type, the number of axes, the lengths of the axes, and the data."""
    plain, zipped = folder / name, folder / f"{name}.gz"
    try:
        data = plain.read_bytes() if plain.exists() else gzip.decompress(zipped.read_bytes())
        axes = struct.unpack(">HBB", data[:4])[2]
        shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
        return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, struct.error, ValueError) as error:
        raise RuntimeError(f"'{plain}' is no IDX file of MNIST: {error}") from error
