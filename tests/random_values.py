"""Random inputs of pipelines: pictures, sounds, texts and tensors, and others that no pipeline takes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import DataType
from pictures import random_pixels

_TEXTS = (
    *(
        "",
        " ",
        "water",
        "the pumps",
        "Übergröße naïve 東京都",
        "🐟🏳️‍🌈 fish",
        "\0nul\0",
        "a\tb\nc\r\n",
        "no!",
        "[SEP] [PAD]",
        "\u202ertl\u202c",
    ),
    *("pump " * 40, "é" * 300, "é", "\ufeffbom", "\x1b[31m", "null", "１２"),
)
_SIDES = (1, 1, 2, 3, 7, 16, 31, 64)
_MODES = ("L", "LA", "RGB", "RGB", "RGBA", "P", "1", "CMYK", "I;16")


def random_inputs(random: Random, kinds: Mapping[str, ValueType], media: Mapping[str, Media]) -> dict[str, Value]:
    """Inputs of the types ``kinds``, whose files are of ``media``. Their content is often wrong."""
    return {name: _value(random, kind, media[name]) for name, kind in kinds.items()}


def wrong_inputs(random: Random, given: Mapping[str, Value]) -> dict[str, Any]:
    """``given`` with one mistake that every pipeline refuses."""
    wrong = dict(given)
    name = random.choice(list(given) or ["x"])
    match random.choice(("missing", "unknown", "type")):
        case "missing" if given:
            del wrong[name]
        case "unknown":
            wrong["unknown " + name] = 1
        case _:
            wrong[name] = random.choice((None, 1, [], {}, object(), np.zeros((1,) * 7, np.complex128)))
    return wrong


def _value(random: Random, kind: ValueType, media: Media) -> Value:
    match media:
        case Media.TEXT:
            return "x water " * 131_072 if random.random() < 0.01 else random.choice(_TEXTS)
        case Media.IMAGE:
            return _pixels(random) if random.random() < 0.1 else _file(random, picture(random))
        case Media.AUDIO:
            return _samples(random) if random.random() < 0.1 else _file(random, sound(random))
        case Media.FILE:
            return _file(random, random.choice((picture, sound))(random))
    return tensor(random, kind)


def _file(random: Random, content: bytes) -> bytes:
    """``content``, sometimes damaged."""
    match random.randrange(20):
        case 0:
            return content[: random.randrange(len(content))]
        case 1:
            place = random.randrange(len(content))
            return content[:place] + random.randbytes(3) + content[place + 3 :]
        case 2:
            return random.choice((b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", random.randbytes(50)))
    return content


def picture(random: Random) -> bytes:
    """A picture in a file."""
    height, width, mode = random.choice(_SIDES), random.choice(_SIDES), random.choice(_MODES)
    if mode == "I;16":
        image = Image.fromarray(random_pixels(height, width, 1)[..., 0].astype(np.uint16) * 257)
    else:
        image = Image.fromarray(random_pixels(height, width, 3, random.randrange(10))).convert(mode)
    allowed = {"L": "PNG JPEG", "RGB": "PNG JPEG WEBP", "RGBA": "PNG WEBP", "CMYK": "JPEG"}.get(mode, "PNG")
    options: dict[str, Any] = {}
    if random.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = random.randint(0, 9)
        options["exif"] = exif
    if (form := random.choice(allowed.split())) == "JPEG":
        options |= {"quality": random.choice((30, 90)), "progressive": random.random() < 0.2}
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _pixels(random: Random) -> Value:
    """Pixels instead of a picture, which are sometimes wrong."""
    shape = [random.choice((0, *_SIDES)), random.choice(_SIDES), random.choice((1, 2, 3, 3, 3, 4))]
    found = random_pixels(*shape)
    return random.choice(
        (found, found, found[..., 0], found.astype(np.float32), found[0:1, 0], np.asfortranarray(found))
    )


def sound(random: Random) -> bytes:
    """A sound in a file."""
    rate, channels = random.choice((8000, 16000, 44100)), random.choice((1, 1, 2))
    samples = np.random.default_rng(random.randrange(9)).uniform(-1, 1, (random.choice((1, 10, 500, 4000)), channels))
    form, kind = random.choice((("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")))
    if kind == "FLOAT" and random.random() < 0.2:
        samples[0] = random.choice((np.nan, np.inf, 3.0))
    file = io.BytesIO()
    soundfile.write(file, samples, rate, kind, format=form)
    return file.getvalue()


def _samples(random: Random) -> Value:
    count = random.choice((0, 1, 700))
    return random.choice((np.zeros(count, np.float32), np.linspace(-1, 1, count, dtype=np.float32), np.zeros(count)))


def tensor(random: Random, kind: ValueType) -> Value:
    """An array of the type ``kind``, with NaN, infinity or extreme numbers now and then."""
    shape = tuple(random.choice((0, 1, 2, 3, 4, 9, 40, 300)) if size == -1 else size for size in kind.shape)
    if np.prod(shape) > 10_000:
        shape = tuple(min(size, 9) for size in shape)
    rng, dtype = np.random.default_rng(random.randrange(1000)), kind.datatype.dtype
    if kind.datatype is DataType.BYTES:
        found = np.empty(shape, object)
        for place in np.ndindex(shape):
            found[place] = random.choice((b"", b"water", b"\xff\xfe", b"\0", "ü".encode()))
        return found
    if kind.datatype.dtype.kind in "biu":
        found = rng.integers(0, random.choice((2, 5, 100)), shape)
        return found.astype(dtype)
    found = rng.uniform(0, 1, shape) if random.random() < 0.6 else rng.normal(0, random.choice((1, 30)), shape)
    found = np.asarray(found)
    if found.size and random.random() < 0.15:
        found.reshape(-1)[rng.integers(found.size)] = random.choice((np.nan, np.inf, -np.inf, 0.0, 1e30, -1e-30))
    with np.errstate(over="ignore"):
        return found.astype(dtype)
