"""Pictures of text with known lines: random words in random fonts, slightly rotated, on a noisy ground."""

from __future__ import annotations

import math
import random
import string
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + " "
HEIGHT, WIDTH = 192, 256
_MARGIN = 3
"""Pixels between the ink of a line and its box."""
FONTS = (
    None,
    *sorted(
        str(path) for path in Path("/usr/share/fonts/truetype/dejavu").glob("DejaVu*.ttf") if "Math" not in path.name
    ),
)
"""The font of Pillow and, if they are installed, those of DejaVu."""


class Page(NamedTuple):
    """A picture, uint8 [192, 256, 3], with the texts of its lines and their corners, float32 [n, 4, 2]."""

    pixels: NDArray[np.uint8]
    texts: list[str]
    boxes: NDArray[np.float32]


def words(chance: random.Random) -> str:
    """One to three words or numbers, of at most 14 characters."""
    found = ""
    while not found or chance.random() < 0.5:
        letters = "".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 7)))
        word = chance.choice([letters, letters.capitalize(), letters.upper(), str(chance.randrange(10_000))])
        if len(found) + len(word) > 13:
            break
        found = f"{found} {word}".strip()
    return found


def page(seed: int) -> Page:
    """The page number ``seed``, with one to four lines."""
    chance, noise = random.Random(seed), np.random.default_rng(seed)
    ground, ink = chance.randint(150, 255), chance.randint(0, 70)
    if chance.random() < 0.3:
        ground, ink = ink, ground
    canvas = Image.new("L", (WIDTH, HEIGHT), ground)
    texts, boxes, top = [], [], chance.randint(4, 16)
    while len(texts) < 4:
        text = words(chance)
        line, box = _line(text, chance)
        if top + line.height > HEIGHT:
            break
        left = chance.randint(0, max(0, WIDTH - line.width))
        canvas.paste(ink, (left, top), line)
        texts.append(text)
        boxes.append(box + np.array([left, top]))
        top += line.height + chance.randint(2, 12)
    shade = np.asarray(canvas, np.float32)[..., None] + np.linspace(0, chance.uniform(-40, 40), WIDTH)[:, None]
    pixels = (shade + noise.normal(0, chance.uniform(0, 10), (HEIGHT, WIDTH, 3))).clip(0, 255).astype(np.uint8)
    return Page(pixels, texts, np.array(boxes, np.float32))


def _line(text: str, chance: random.Random) -> tuple[Image.Image, NDArray[np.float64]]:
    """The mask of a line, rotated by up to 4 degrees, and the corners of its box: top left, and on clockwise."""
    path, size, angle = chance.choice(FONTS), chance.randint(16, 32), chance.uniform(-4, 4)
    while (span := _font(path, size).getbbox(text))[2] - span[0] > WIDTH - 24:
        size -= 1
    font = _font(path, size)
    left, top, right, bottom = font.getbbox(text)
    width, height = right - left, bottom - top
    mask = Image.new("L", (math.ceil(width) + 2 * _MARGIN, math.ceil(height) + 2 * _MARGIN))
    ImageDraw.Draw(mask).text((_MARGIN - left, _MARGIN - top), text, fill=255, font=font)
    turned = mask.rotate(angle, Image.Resampling.BICUBIC, expand=True)
    half = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (mask.width / 2, mask.height / 2)
    cos, sin = math.cos(math.radians(-angle)), math.sin(math.radians(-angle))
    return turned, half @ np.array([[cos, sin], [-sin, cos]]) + (turned.width / 2, turned.height / 2)


def _font(path: str | None, size: int) -> Any:
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


def shrunk(boxes: NDArray[np.float32], share: float = 0.3) -> NDArray[np.float32]:
    """Boxes without a border of ``share`` of their height, which the step contour_boxes adds again."""
    along, down = boxes[:, [1]] - boxes[:, [0]], boxes[:, [3]] - boxes[:, [0]]
    height = np.linalg.norm(down, axis=2, keepdims=True)
    right = along / np.linalg.norm(along, axis=2, keepdims=True) * height
    signs = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], np.float32) * share
    moved: NDArray[np.float32] = boxes + signs[:, [0]] * right + signs[:, [1]] * down
    return moved
