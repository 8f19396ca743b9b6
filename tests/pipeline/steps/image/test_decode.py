"""Decoding against Pillow and OpenCV, and hostile files."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any, Literal

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from penstock.errors import InvalidConfig, InvalidInput
from penstock.pipeline.steps.image.decode import DecodeImage
from penstock.pipeline.value import FILE, TEXT, Media
from penstock.tensor import Array
from pictures import encoded, pictures, random_pixels

FLAGS = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR, "grey": cv2.IMREAD_GRAYSCALE}
RGBA = random_pixels(20, 31, 4)
RGB = Image.fromarray(RGBA[..., :3].copy())
FILES = {
    "rgb.png": encoded(RGB),
    "rgba.png": encoded(RGBA),
    "grey_alpha.png": encoded(Image.fromarray(RGBA).convert("LA")),
    "grey.png": encoded(RGB.convert("L")),
    "bits.png": encoded(RGB.convert("1")),
    "palette.png": encoded(RGB.quantize(16)),
    "transparent_palette.png": encoded(RGB.quantize(16), transparency=3),
    "transparent_colour.png": encoded(RGB, transparency=(1, 2, 3)),
    "rgb16.png": cv2.imencode(".png", RGBA[..., :3].astype(np.uint16) * 259 + 7)[1].tobytes(),
    "animated.png": encoded(RGB, save_all=True, append_images=[RGB.rotate(180)]),
    "lossy.webp": encoded(RGB, "WEBP"),
    "rgba.webp": encoded(RGBA, "WEBP", lossless=True),
    "animated.webp": encoded(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(180)]),
    "grey.jpg": encoded(RGB.convert("L"), "JPEG"),
    "cmyk.jpg": encoded(RGB.convert("CMYK"), "JPEG"),
    "unsubsampled.jpg": encoded(RGB, "JPEG", subsampling=0),
    "progressive.jpg": encoded(RGB, "JPEG", progressive=True),
    "rgb.jpg": encoded(RGB, "JPEG", keep_rgb=True),
}


def decoded(content: bytes | Array, **options: Any) -> Array:
    """The result of the step."""
    found: Array = DecodeImage(**options).run({"value": content})["value"]
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    return found


def by_pillow(content: bytes, colour: str) -> Array:
    """What code with Pillow reads."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    pixels = np.asarray(picture.convert("L" if colour == "grey" else "RGB"))
    return pixels[..., ::-1] if colour == "bgr" else pixels.reshape(*pixels.shape[:2], -1)


def by_opencv(content: bytes, colour: str) -> Array:
    """What code with OpenCV reads."""
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), FLAGS[colour])
    assert pixels is not None
    return pixels.reshape(*pixels.shape[:2], -1)


@pytest.mark.parametrize("colour", ["rgb", "bgr", "grey"])
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_equals_both_libraries(name: str, colour: str) -> None:
    content = FILES[name]
    np.testing.assert_array_equal(decoded(content, colour=colour), by_pillow(content, colour))
    np.testing.assert_array_equal(decoded(content, colour=colour, like="opencv"), by_opencv(content, colour))


@settings(deadline=None, max_examples=60)
@given(
    pictures(),
    st.sampled_from([0, 1, 2]),
    st.integers(1, 100),
    st.booleans(),
    st.sampled_from(["rgb", "bgr", "grey"]),
)
def test_jpegs_equal_both_libraries(
    pixels: Array, subsampling: int, quality: int, progressive: bool, colour: str
) -> None:
    content = encoded(pixels, "JPEG", subsampling=subsampling, quality=quality, progressive=progressive)
    np.testing.assert_array_equal(decoded(content, colour=colour), by_pillow(content, colour))
    np.testing.assert_array_equal(decoded(content, colour=colour, like="opencv"), by_opencv(content, colour))


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_pictures_are_turned_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(random_pixels(9, 17), format, exif=exif)
    np.testing.assert_array_equal(decoded(content), by_pillow(content, "rgb"))
    if 1 <= orientation <= 8:
        np.testing.assert_array_equal(decoded(content, like="opencv"), by_opencv(content, "rgb"))
    assert decoded(content, orient=False).shape == (9, 17, 3)


XMP = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description
xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""


def exif_data(order: str, kind: int, orientation: int) -> bytes:
    """EXIF data in the byte ``order`` with an orientation of the TIFF type ``kind``: 1 is BYTE, 3 is SHORT, 4 is LONG."""
    form = {1: "Bxxx", 3: "Hxx", 4: "I"}[kind]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IHHHI", 8, 1, 0x0112, kind, 1)
    return b"Exif\0\0" + head + struct.pack(f"{order}{form}I", orientation, 0)


@pytest.mark.parametrize("options", [{"xmp": XMP}, *({"exif": exif_data(o, k, 6)} for o in "<>" for k in (1, 3, 4))])
@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_each_library_reads_other_forms_of_the_orientation(format: str, options: dict[str, bytes]) -> None:
    content = encoded(random_pixels(9, 17), format, **options)
    for colour in ("rgb", "grey"):
        np.testing.assert_array_equal(decoded(content, colour=colour), by_pillow(content, colour))
        np.testing.assert_array_equal(decoded(content, colour=colour, like="opencv"), by_opencv(content, colour))


def test_grey_of_16_bits_is_not_clipped() -> None:
    content = cv2.imencode(".png", np.array([[0, 255, 256, 40_000]], np.uint16))[1].tobytes()
    with pytest.raises(InvalidInput, match="16-bit grey values, which Pillow would clip"):
        decoded(content)
    assert decoded(content, like="opencv", colour="grey").tolist() == [[[0], [0], [1], [156]]]


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG file that says it has this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    end = b"IEND"
    data = b"IDAT" + zlib.compress(b"\0" * 100)
    parts = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (chunk, data, end)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(10_000, 10_000), (2**31 - 1, 2**31 - 1), (64_000_001, 1)])
@pytest.mark.parametrize("like", ["pillow", "opencv"])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int], like: Literal["pillow", "opencv"]) -> None:
    with pytest.raises(InvalidInput, match="pixels, but the limit is 64000000"):
        decoded(png_header(*size), like=like)


def test_a_jpeg_of_100_megapixels_is_refused() -> None:
    content = bytearray(FILES["progressive.jpg"])
    frame = content.index(b"\xff\xc2")
    content[frame + 5 : frame + 9] = struct.pack(">HH", 10_000, 10_000)
    with pytest.raises(InvalidInput, match="10000 × 10000 pixels"):
        decoded(bytes(content))
    with pytest.raises(InvalidInput, match="20 pixels"):
        decoded(FILES["rgb.png"], max_pixels=600)


@pytest.mark.parametrize("like", ["pillow", "opencv"])
@pytest.mark.parametrize("name", FILES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_damaged_files_are_errors_or_pictures(
    name: str, like: Literal["pillow", "opencv"], data: st.DataObject
) -> None:
    content = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(content)))
    try:
        found = decoded(bytes(content[:length]), like=like, max_pixels=1_000_000)
    except InvalidInput:
        return
    assert found.ndim == 3


@pytest.mark.parametrize("like", ["pillow", "opencv"])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_an_error(name: str, like: Literal["pillow", "opencv"]) -> None:
    content = FILES[name]
    for part in (0.3, 0.4) if name == "animated.png" else (0.5, 0.8):  # its first frame is half of the file
        with pytest.raises(InvalidInput, match="the picture"):
            decoded(content[: int(len(content) * part)], like=like)


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP"]
)
def test_what_is_no_picture_is_an_error(content: bytes) -> None:
    with pytest.raises(InvalidInput, match="the picture is (not|damaged)"):
        decoded(content)


@given(pictures(channels=(1, 3, 4)), st.sampled_from(["rgb", "bgr", "grey"]), st.sampled_from(["pillow", "opencv"]))
@settings(deadline=None)
def test_pixels_are_converted_as_a_file_of_them(pixels: Array, colour: str, like: str) -> None:
    file = decoded(encoded(pixels), colour=colour, like=like)
    found = decoded(pixels, colour=colour, like=like)
    if like == "pillow" or colour != "grey" or pixels.shape[2] == 1:
        np.testing.assert_array_equal(found, file)
    else:  # OpenCV reads a grey PNG by the formula of libpng, and converts pixels by another
        np.testing.assert_allclose(found, file, atol=1)


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((2, 2), np.float32), np.zeros((2, 2, 2), np.uint8), np.zeros(3, np.uint8), np.zeros((0, 2, 3), np.uint8)],
)
def test_other_arrays_are_no_pixels(pixels: Array) -> None:
    with pytest.raises(InvalidInput, match="the picture is an array of"):
        decoded(pixels)


def test_types() -> None:
    found = DecodeImage(colour="grey").check({"value": FILE})["value"]
    assert (found.media, found.shape, found.colour) == (Media.IMAGE, (-1, -1, 1), "grey")
    with pytest.raises(InvalidConfig, match="needs a file or a picture"):
        DecodeImage().check({"value": TEXT})


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_base64_is_named_with_the_fix(format: str, head: str) -> None:
    content = io.BytesIO()
    Image.new("RGB", (40, 30)).save(content, format)
    for encode in (base64.b64encode, base64.encodebytes, base64.urlsafe_b64encode):
        with pytest.raises(InvalidInput, match="the picture is text in base64") as raised:
            DecodeImage().run({"value": head.encode() + encode(content.getvalue())})
        assert "base64.b64decode" in raised.value.hint
