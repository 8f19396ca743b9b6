"""The pipelines of ``examples/`` with models of text, sound, lines and frames, which are trained in place, and items for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from benchmarks.pipelines.scripts import script
from penstock.pipeline.value import Value
from penstock.pipeline.video import read_frames
from penstock.tensor import Array


def trained(folder: Path, count: int) -> dict[str, tuple[Path, Sequence[Value]]]:
    """The bundle and ``count`` items of each example. The models are trained briefly, so their answers are poor, but not trivial."""
    with script("text_classes/libraries.py") as example:
        texts, _ = example["write"](folder / "text_classes", epochs=1)
        known, _ = example["sentences"]()
    sentences = [one.text for one in known[:: len(known) // count][:count]]
    with script("sound_classes/sounds.py") as example:
        sounds = example["write"](folder / "sound_classes", count=120, epochs=2)
        waves, _ = example["some"](count, 3, (-20, 10))
        rate = example["RATE"]
    with script("ocr/ocr.py") as example:
        ocr = example["write"](folder / "ocr", 20, 40, 120)
        pages = [example["page"](10**6 + seed) for seed in range(count // 2)]
    with script("video_quality/quality.py") as example:
        quality = example["write"](folder / "video_quality", count=60, epochs=1)
    clip = islice(read_frames(folder / "video_quality" / "clip.mp4"), count)
    return {
        "sentences, classified": (texts, sentences),
        "sounds, classified": (sounds, [_wav(wave, rate) for wave in waves]),
        "pages, read": (ocr, [one.pixels for one in pages] + [_first_line(one) for one in pages]),
        "frames, judged": (quality, [frame.pixels for frame in clip]),
    }


def _first_line(page: Any) -> Array:
    """The page without its other lines. A single line is a batch of one, unless other items are in progress."""
    (left, top), (right, bottom) = np.clip([page.boxes[0].min(0) - 4, page.boxes[0].max(0) + 4], 0, None).astype(int)
    alone: Array = np.full_like(page.pixels, np.median(page.pixels))
    alone[top:bottom, left:right] = page.pixels[top:bottom, left:right]
    return alone


def _wav(wave: Any, rate: int) -> bytes:
    soundfile.write(file := io.BytesIO(), wave, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
