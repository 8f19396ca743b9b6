"""Draw boxes and labels on a picture."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import ClassVar, Literal

from PIL import Image, ImageDraw, ImageFont

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import Step, wrong_type
from penstock.pipeline.steps.boxes.arrays import boxes_of, check_array
from penstock.pipeline.steps.image.channels import converted
from penstock.pipeline.steps.image.pixels import CHANNELS, image_type, pixels_of
from penstock.pipeline.value import FILE, Media, Value, ValueType
from penstock.tensor import DataType

_COLOURS = ((230, 25, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (0, 128, 128), (60, 140, 60), (128, 0, 0))


class Draw(Step, frozen=True, kw_only=True):
    """Draw boxes on a picture, with a label and a score for each, and return a PNG file.

    Boxes are [n, 4], or quadrilaterals [n, 4, 2]. Equal labels have equal colours. The same inputs give the same file with the same
    version of Pillow.
    """

    inputs: ClassVar[tuple[str, ...]] = ("image", "boxes", "labels", "scores")
    optional: ClassVar[frozenset[str]] = frozenset({"labels", "scores"})
    outputs: ClassVar[tuple[str, ...]] = ("picture",)

    colour: Literal["rgb", "bgr", "grey"] = "rgb"
    """Order of the picture's channels."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A file. Raises InvalidConfig if an input has another type."""
        image = image_type("draw", inputs, "image")
        if image.datatype is not DataType.UINT8 or image.shape[2] not in (-1, CHANNELS[self.colour]):
            raise wrong_type("draw", "image", f"a picture of UINT8 with {CHANNELS[self.colour]} channels", image)
        check_array("draw", "boxes", inputs, (-1, 4), (-1, 4, 2))
        labels = inputs.get("labels")
        if labels is not None and not (labels.many and labels.media is Media.TEXT):
            raise wrong_type("draw", "labels", "a list of text", labels)
        if "scores" in inputs:
            check_array("draw", "scores", inputs, (-1,))
        return {"picture": FILE}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The file. Raises InvalidInput if there are not as many labels or scores as boxes."""
        pixels, boxes = pixels_of(inputs["image"], "image", self.colour), boxes_of(inputs["boxes"], quads=True)
        for name in ("labels", "scores"):
            if name in inputs and len(inputs[name]) != len(boxes):
                raise InvalidInput(f"there are {len(boxes)} boxes, but {len(inputs[name])} {name}")
        picture = Image.fromarray(converted(pixels, self.colour, "rgb", "pillow"))
        canvas = ImageDraw.Draw(picture)
        labels: Sequence[str] = inputs.get("labels", [""] * len(boxes))
        # Far outside the picture, a coordinate only shows a direction; Pillow would walk all of the line.
        far = 4 * max(picture.size)
        line = max(2, round(min(picture.size) / 200))
        font = ImageFont.load_default(max(10, round(min(picture.size) / 32)))
        for box, label, score in zip(boxes.clip(-far, far), labels, inputs.get("scores", repeat(None)), strict=False):
            colour = _COLOURS[zlib.crc32(label.encode()) % len(_COLOURS)]
            points = box if box.ndim == 2 else box[[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2)
            outline = [tuple(point) for point in points.tolist()]
            canvas.line([*outline, *outline[:2]], fill=colour, width=line)
            text = " ".join(filter(None, [label[:100].split("\n")[0], "" if score is None else f"{float(score):.2f}"]))
            _write(canvas, text, points.min(axis=0).tolist(), colour, font)
        file = io.BytesIO()
        picture.save(file, "PNG")
        return {"picture": file.getvalue()}


def _write(
    canvas: ImageDraw.ImageDraw,
    text: str,
    place: list[float],
    colour: tuple[int, int, int],
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Write ``text`` on a coloured ground above ``place``, or below it at the upper border of the picture."""
    if not text:
        return
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    x, y = max(0.0, place[0]), place[1] - (bottom - top) - 6
    y = max(0.0, place[1]) if y < 0 else y
    canvas.rectangle([x, y, x + right - left + 6, y + bottom - top + 6], fill=colour)
    canvas.text((x + 3 - left, y + 3 - top), text, fill=(255, 255, 255), font=font)
