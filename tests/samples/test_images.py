from __future__ import annotations

import io
import itertools
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.dataset import Dataset
from penstock.errors import InvalidData, PenstockError, Unsupported
from penstock.samples import folder as folder_module
from penstock.samples.folder import read_folder
from penstock.samples.hints import ImageForm, InputHints
from penstock.samples.images import read_image
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 2)),)
RNG = np.random.default_rng(0)


def spec(*shape: int, datatype: DataType = DataType.FP32) -> TensorSpec:
    return TensorSpec("x", datatype, shape)


def hints(layout: str = "NCHW", low: float = 0.0, high: float = 1.0) -> InputHints:
    return InputHints({}, lambda _: {}, ImageForm("x", layout, low, high, "range assumed"))


def saved(path: Path, pixels: np.ndarray, **options: object) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def pixels(height: int = 6, width: int = 8) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


def read(path: Path, wanted: TensorSpec, known: InputHints | None = None) -> Dataset:
    return read_folder(path, Signature((wanted,), Y), hints=known or hints())


@pytest.mark.parametrize(("name", "options"), [("a.png", {}), ("a.PNG", {}), ("a.webp", {"lossless": True})])
def test_an_image_has_the_layout_and_range_of_the_input(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    given = saved(tmp_path / name, pixels(), **options).astype(np.float32)
    forms = {"NCHW": (-1, 3, -1, -1), "NHWC": (-1, -1, -1, 3), "CHW": (3, 6, 8), "HWC": (6, 8, 3)}
    for layout, (low, high) in itertools.product(forms, [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)]):
        form = ImageForm("x", layout, low, high, "")
        found = read_image(tmp_path / name, spec(*forms[layout]), form)
        wanted = low + (high - low) * given / 255
        wanted = wanted.transpose(2, 0, 1) if "CHW" in layout else wanted
        np.testing.assert_allclose(found[0] if "N" in layout else found, wanted, atol=1e-4)
    whole = read(tmp_path, spec(-1, -1, -1, 3, datatype=DataType.UINT8), hints("NHWC", 0, 255)).sample(0)["x"]
    assert whole.dtype == np.uint8
    np.testing.assert_array_equal(whole[0], given)


def test_a_fixed_size_is_made_by_resizing_and_the_assumptions_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "a.jpg", np.full((50, 70, 3), (250, 120, 10), np.uint8))
    saved(tmp_path / "b.png", np.full((9, 4), 120, np.uint8))
    data = read(tmp_path, spec(-1, 3, 12, 20))
    assert (data.count, data.stacks) == (2, True)
    np.testing.assert_allclose(data.sample(0)["x"][0, :, 5, 5], np.float32([250, 120, 10]) / 255, atol=0.02)
    np.testing.assert_allclose(data.sample(1)["x"], 120 / 255, atol=1e-6)
    assert "images are RGB, resized to 20 × 12, values from 0 to 1, axes NCHW (range assumed)" in caplog.text


def test_images_of_one_channel_are_grey(tmp_path: Path) -> None:
    given = saved(tmp_path / "a.png", pixels())
    found = read(tmp_path, spec(-1, 1, -1, -1)).sample(0)["x"][0, 0]
    np.testing.assert_allclose(found, given @ np.float32([0.299, 0.587, 0.114]) / 255, atol=0.006)


def test_images_keep_their_sizes_if_the_input_is_free(tmp_path: Path) -> None:
    for number, size in enumerate([(4, 5), (6, 7), (4, 5)]):
        saved(tmp_path / f"{number}.png", pixels(*size))
    data = read(tmp_path, spec(-1, 3, -1, -1))
    assert (data.count, data.sizes) == (3, 2)


@pytest.mark.parametrize("spooled", [0, 1 << 20])
def test_subfolders_are_classes(
    tmp_path: Path, spooled: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_module, "_SPOOLED_BYTES", spooled)
    for name, count in (("dog", 2), ("cat", 1), ("owl/deep", 1)):
        for number in range(count):
            saved(tmp_path / name / f"{number}.png", pixels())
    data = read(tmp_path, spec(-1, 3, -1, -1))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 1, 2]
    assert "its 3 subfolders are the labels: 0 cat, 1 dog, 2 owl" in caplog.text
    np.testing.assert_array_equal(data.sample(3)["x"], data.pick(np.array([3])).sample(0)["x"])


def test_subfolders_named_by_numbers_have_these_numbers(tmp_path: Path) -> None:
    for name in ("7", "281"):
        saved(tmp_path / name / "a.png", pixels())
    data = read(tmp_path, spec(-1, 3, -1, -1))
    assert data.labels is not None
    assert sorted(data.labels.tolist()) == [7, 281]


def test_one_subfolder_or_files_beside_subfolders_are_no_classes(tmp_path: Path) -> None:
    saved(tmp_path / "all" / "a.png", pixels())
    assert read(tmp_path, spec(-1, 3, -1, -1)).labels is None
    saved(tmp_path / "more" / "a.png", pixels())
    saved(tmp_path / "b.png", pixels())
    assert read(tmp_path, spec(-1, 3, -1, -1)).labels is None


def bomb(width: int, height: int) -> bytes:
    """A small PNG file whose header promises a large image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def animation() -> bytes:
    file = io.BytesIO()
    first, second = (Image.fromarray(pixels()) for _ in range(2))
    first.save(file, "WEBP", save_all=True, append_images=[second])
    return file.getvalue()


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "cannot read"),
        (b"junk", "cannot read"),
        (png(pixels())[:-40], "cannot read"),
        (png(pixels(64, 64))[:4000], "cannot read"),
        (bomb(50_000, 50_000), "pixels, at most 64000000 are read|cannot read"),
        (bomb(9_000, 9_000), "9000 × 9000 pixels, at most 64000000 are read"),
        (bomb(2_000, 2_000), "cannot read"),
        (animation(), "is an animation of 2 images"),
        (png(np.full((4, 4), 40_000, np.uint16)), "does not have 8 bits per channel"),
        (b"GIF89a" + bytes(20), "cannot read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot read"),
    ],
)
def test_hostile_files_are_rejected_by_name(tmp_path: Path, content: bytes, cause: str) -> None:
    saved(tmp_path / "a.png", pixels())
    (tmp_path / "z.png").write_bytes(content)
    with pytest.raises(InvalidData, match=f"z.png'.*({cause})|({cause}).*z.png"):
        read(tmp_path, spec(-1, 3, -1, -1))


def test_changed_bytes_are_an_error_or_an_image(tmp_path: Path) -> None:
    path, wanted = tmp_path / "a.jpg", spec(-1, 3, 8, 8)
    form = hints().images
    assert form is not None
    for suffix, seed in itertools.product(("PNG", "JPEG", "WEBP"), range(40)):
        file = io.BytesIO()
        Image.fromarray(pixels(16, 16)).save(file, suffix)
        content, rng = bytearray(file.getvalue()), np.random.default_rng(seed)
        for _ in range(3):
            content[int(rng.integers(len(content)))] = int(rng.integers(256))
        path.write_bytes(content)
        try:
            found = read_image(path, wanted, form)
        except PenstockError:
            continue
        assert found.shape == (1, 3, 8, 8)
        assert found.min() >= 0
        assert found.max() <= 1


def test_links_out_of_the_folder_pipes_and_odd_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = tmp_path / "images"
    saved(images / "a.png", pixels())
    saved(tmp_path / "secret.png", pixels())
    (images / "out.png").symlink_to(tmp_path / "secret.png")
    (images / "in.png").symlink_to(images / "a.png")
    (images / "gone.png").symlink_to(images / "none.png")
    os.mkfifo(images / "pipe.png")
    odd = os.fsencode(images) + b"/\xff\n\x1b[31m.png"
    Path(os.fsdecode(odd)).write_bytes((images / "a.png").read_bytes())
    assert read(images, spec(-1, 3, -1, -1)).count == 3
    assert "3 file(s) that are not image are ignored: gone.png, out.png, pipe.png" in caplog.text
    Path(os.fsdecode(odd)).write_bytes(b"junk")
    with pytest.raises(InvalidData, match="cannot read") as error:
        read(images, spec(-1, 3, -1, -1))
    assert error.value.message.isprintable()
    error.value.message.encode()


def test_models_without_a_known_image_say_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path / "a.png", pixels())
    with pytest.raises(InvalidData, match="image files, but no input of the model is known to take them"):
        read_folder(tmp_path, Signature((spec(-1, 3, -1, -1),), Y))
    two = Signature((spec(-1, 3, -1, -1), TensorSpec("size", DataType.INT64, (-1, 2))), Y)
    with pytest.raises(InvalidData, match=r"they give no value for the inputs \['size'\]"):
        read_folder(tmp_path, two, hints=hints())


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "a.png", pixels())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Unsupported, match=r"pip install 'penstock\[images\]'"):
        read(tmp_path, spec(-1, 3, -1, -1))
