"""How a program classifies pictures without Penstock: with Pillow, numpy and ONNX Runtime.

The peers' own environments import this module, so it imports only these packages.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 224
_MEAN, _STD = np.array(MEAN, np.float32), np.array(STD, np.float32)

Floats = NDArray[np.float32]


def opened(jpeg: bytes) -> Image.Image:
    """The picture in the file ``jpeg``, in RGB."""
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def tensor(picture: Image.Image) -> Floats:
    """The input of the network for ``picture``, with a batch axis."""
    small = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)
    scaled = ((small / 255 - _MEAN) / _STD).transpose(2, 0, 1)
    found: Floats = np.ascontiguousarray(scaled, np.float32)[None]
    return found


def logits(session: Any, picture: Image.Image) -> Floats:
    """The outputs of an ONNX Runtime session for ``picture``."""
    (found,) = session.run(None, {"input": tensor(picture)})
    row: Floats = found[0]
    return row


def scores(session: Any, picture: Image.Image) -> Floats:
    """The scores of all classes: the softmax of the outputs."""
    row = logits(session, picture)
    powers = np.exp(row - row.max())
    found: Floats = powers / powers.sum()
    return found


def answer(session: Any, picture: Image.Image) -> dict[str, Any]:
    """The answer of a server: the best five classes, their scores, and all scores."""
    found = scores(session, picture)
    best = np.argsort(-found, kind="stable")[:5]
    return {"labels": [str(one) for one in best], "best": found[best].tolist(), "scores": found.tolist()}
