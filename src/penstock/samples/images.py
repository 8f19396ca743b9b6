"""Reads image files with Pillow, which is imported only here."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from penstock.errors import InvalidData, Unsupported, printable
from penstock.samples.hints import ImageForm
from penstock.tensor import Array, TensorSpec

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_MAX_PIXELS = 64_000_000
"""Maximum number of pixels of an image. The header has it, so that a small file cannot fill the memory."""
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""The mode of Pillow by number of channels."""
_EIGHT_BITS = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})
_SAVE = "save it again as PNG or JPEG, or remove it"


def read_image(path: Path, spec: TensorSpec, form: ImageForm) -> Array:
    """The image in a file as the input ``spec`` takes it, in a call of one row: resized if the input has a fixed size, with the
    channels, the order of axes and the range of ``form``.

    Raises InvalidData if the file is no image, is damaged, too large or animated; Unsupported if Pillow is not installed.
    """
    try:
        from PIL import Image  # noqa: PLC0415 - an extra
    except ImportError:
        raise Unsupported(
            f"'{printable(str(path))}' is an image, which needs Pillow",
            "pip install 'penstock[images]', or give arrays in npz files",
        ) from None
    shown = printable(str(path))
    height, width, channels = (spec.shape[form.layout.index(axis)] for axis in "HWC")
    mode = _MODES.get(channels, "RGB")
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=("PNG", "JPEG", "WEBP")) as image:
            size, frames = image.size, getattr(image, "n_frames", 1)
            if size[0] * size[1] > _MAX_PIXELS:
                raise InvalidData(
                    f"'{shown}' has {size[0]} × {size[1]} pixels, at most {_MAX_PIXELS} are read", "make it smaller"
                )
            if frames > 1:
                raise InvalidData(f"'{shown}' is an animation of {frames} images", "save its images as files")
            if image.mode not in _EIGHT_BITS:
                raise InvalidData(
                    f"'{shown}' does not have 8 bits per channel (its mode is {image.mode})",
                    "save it with 8 bits, or give arrays in npz files",
                )
            target = width if width > 0 else size[0], height if height > 0 else size[1]
            found = image.convert(mode)
            pixels = np.asarray(found if target == size else found.resize(target, Image.Resampling.BILINEAR))
    except InvalidData:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow raises arbitrary exceptions for damaged or forged files
        raise InvalidData(f"cannot read '{shown}': {printable(str(error))}", _SAVE) from None
    pixels = pixels.reshape(1, *pixels.shape[:2], -1)
    pixels = pixels.transpose(["NHWC".index(axis) for axis in f"N{form.layout.removeprefix('N')}"])
    pixels = pixels if form.layout.startswith("N") else pixels[0]
    if not spec.datatype.is_float and (form.low, form.high) == (0, 255):
        return pixels.astype(spec.datatype.dtype)
    scaled = form.low + (form.high - form.low) * (pixels.astype(np.float32) / 255)
    return np.ascontiguousarray(scaled.astype(spec.datatype.dtype))


def assumed(spec: TensorSpec, form: ImageForm) -> str:
    """What was assumed about images, as text."""
    height, width, channels = (spec.shape[form.layout.index(axis)] for axis in "HWC")
    size = f"resized to {width} × {height}" if width > 0 and height > 0 else "in their own size"
    return (
        f"images are {_MODES.get(channels, 'RGB')}, {size}, values from {form.low:g} to {form.high:g}, axes {form.layout} "
        f"({form.reason}); if the model was trained on others, give arrays in npz files"
    )
