"""Decode pictures. The header limits what is decoded, and damaged files are errors."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import cv2
import msgspec
import numpy as np
import simplejpeg
from PIL.Image import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from penstock.errors import InvalidInput
from penstock.pipeline.steps.base import BASE64_HINT, Step, is_base64, wrong_type
from penstock.pipeline.steps.image.channels import converted
from penstock.pipeline.steps.image.pixels import CHANNELS, Channels, Library
from penstock.pipeline.value import Media, Value, ValueType
from penstock.tensor import Array, DataType

_ORIENTATION = 0x0112
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError),
    *(EOFError, AssertionError, RuntimeError, struct.error, zlib.error, MemoryError, cv2.error),
)
"""What the libraries raise for damaged files."""


class DecodeImage(Step, frozen=True, kw_only=True):
    """Decode a JPEG, PNG or WebP file to pixels.

    - The channels are 8-bit. Transparency is dropped, not blended, and palettes are expanded. Colour profiles are ignored.
    - An animation gives its first frame.
    - Of 16-bit channels, the upper byte is kept. A grey 16-bit PNG needs ``like: opencv``, because Pillow would clip its values.
    - Damaged and truncated files are errors.
    - Pixels that are passed instead of a file, [height, width] or [height, width, channels] of UINT8 in the order grey, RGB or
      RGBA, are only converted to ``colour``.
    """

    colour: Channels = "rgb"
    """Order of the channels: ``rgb``, ``bgr``, or ``grey`` (one channel)."""
    like: Library = "pillow"
    """Library whose result is reproduced to the bit. The libraries differ in ``grey`` and for CMYK."""
    orient: bool = True
    """Turn the picture upright if its metadata contain an orientation, as ``ImageOps.exif_transpose`` or ``cv2.imread`` does: Pillow
    also reads that of XMP."""
    max_pixels: Annotated[int, msgspec.Meta(ge=1)] = 64_000_000
    """Maximum number of pixels. The header is checked before any pixel is decoded."""

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        """A picture of unknown size. Raises InvalidConfig unless the input is a file or a picture."""
        given = inputs["value"]
        if given.many or given.media not in (Media.FILE, Media.IMAGE):
            raise wrong_type("decode_image", "value", "a file or a picture", given)
        height, width = (*given.shape, -1, -1)[:2]
        shape = (height, width, CHANNELS[self.colour])
        return {"value": ValueType(Media.IMAGE, DataType.UINT8, shape, colour=self.colour)}

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """The pixels. Raises InvalidInput for other formats, damaged files and pictures over ``max_pixels``."""
        content = inputs["value"]
        if isinstance(content, np.ndarray):
            return {"value": self._from_pixels(content)}
        content = bytes(content)
        try:
            picture = _reader(content)(io.BytesIO(content))
            self._check_size(*picture.size)
            pixels = self._decoded(content, picture)
            turns = self.orient and self.like == "pillow" and _has_metadata(content, picture)
            return {"value": _upright(pixels, picture) if turns else pixels}
        except _DAMAGED as error:
            reason = f": {error}" if str(error) else ""
            raise InvalidInput(f"the picture is damaged{reason}", "send a complete file") from None

    def _from_pixels(self, pixels: Array) -> Array:
        shaped = pixels[..., None] if pixels.ndim == 2 else pixels
        if pixels.dtype != np.uint8 or shaped.ndim != 3 or shaped.shape[2] not in (1, 3, 4) or not pixels.size:
            what = f"{pixels.dtype} {list(pixels.shape)}"
            raise InvalidInput(
                f"the picture is an array of {what}",
                "pass uint8 of shape [height, width, channels], 1, 3 or 4 channels",
            )
        self._check_size(shaped.shape[1], shaped.shape[0])
        order = {1: "grey", 3: "rgb", 4: "rgba"}[shaped.shape[2]]
        return converted(shaped, order, self.colour, self.like)

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise InvalidInput(
                f"the picture has {width} × {height} pixels, but the limit is {self.max_pixels}",
                "send a smaller picture, or raise 'max_pixels' of decode_image",
            )

    def _decoded(self, content: bytes, picture: Image) -> Array:
        if isinstance(picture, JpegImageFile) and (pixels := self._fast_jpeg(content, picture)) is not None:
            return pixels
        if self.like == "opencv":
            flag = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR, "grey": cv2.IMREAD_GRAYSCALE}[self.colour]
            turn = 0 if self.orient else cv2.IMREAD_IGNORE_ORIENTATION
            found = cv2.imdecode(np.frombuffer(content, np.uint8), flag | turn)
            if found is None:
                raise ValueError
            return found.reshape(*found.shape[:2], -1)
        if picture.mode.startswith(("I", "F")):
            raise InvalidInput(
                "the picture has 16-bit grey values, which Pillow would clip",
                "convert it to 8 bits, or set 'like: opencv', which keeps the upper byte",
            )
        pixels = np.asarray(picture.convert("L" if self.colour == "grey" else "RGB"))
        if self.colour == "bgr":
            return np.ascontiguousarray(pixels[..., ::-1])
        return pixels.reshape(*pixels.shape[:2], -1)

    def _fast_jpeg(self, content: bytes, picture: Image) -> Array | None:
        """The result of libjpeg without the library around it, which is the same. None if it does not read the file, or if OpenCV
        may turn it: OpenCV reads fewer forms of the orientation than Pillow.
        """
        if self.like == "opencv" and self.orient and "exif" in picture.info:
            return None
        if picture.mode not in ("RGB", "L") or (
            self.colour == "grey" and self.like == "pillow" and picture.mode == "RGB"
        ):
            return None
        space = "GRAY" if self.colour == "grey" else self.colour.upper()
        try:
            found: Array = simplejpeg.decode_jpeg(content, space)
        except ValueError:
            return None  # a warning of libjpeg, which the library may tolerate
        return found


_TURNS: dict[int, Callable[[Array], Array]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}
"""How a picture of each orientation is turned upright."""


def _has_metadata(content: bytes, picture: Image) -> bool:
    """False for a PNG file without EXIF and XMP data. Pillow knows that only after it has decoded the pixels."""
    if not isinstance(picture, PngImageFile):
        return True
    place = 8
    while place + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        if kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            return True
        place += length + 12
    return False


def _upright(pixels: Array, picture: Image) -> Array:
    turn = _TURNS.get(picture.getexif().get(_ORIENTATION, 1))
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _reader(content: bytes) -> type[Any]:
    """The class that reads the header. ``Image.open`` would try all formats, and has limits that are global to the process."""
    if content.startswith(b"\xff\xd8\xff"):
        return JpegImageFile
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return WebPImageFile
    if is_base64(content):
        raise InvalidInput("the picture is text in base64, not a JPEG, PNG or WebP file", BASE64_HINT)
    found = f"begins with {content[:8]!r}" if content else "is empty"
    raise InvalidInput(f"the picture is not a JPEG, PNG or WebP file: it {found}", "convert it to one of these formats")
