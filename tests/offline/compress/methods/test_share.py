from __future__ import annotations

from pathlib import Path

import pytest

QUICK = ("share", "model.onnx", "--bits", "3", "--conv-bits", "3")


def test_shared_tuned_coded_and_back(penstock, digits: Path) -> None:
    options = ("--tune", "--train", "train.npz", "--epochs", "1", "--coded", "model.coded", "--json")
    done = penstock(*QUICK, *options, "-o", "shared.onnx")
    assert done.code == 0, done.err
    found = done.json
    assert (found["pays"], found["short_of"]) == (True, [])
    assert [step["name"] for step in found["steps"]] == ["optimize", "share", "tune-centroids"]
    sizes = found["sizes"]
    assert list(sizes) == ["original", "optimised", "shared"]
    assert sizes["shared"]["coded_bytes"] == (digits / "model.coded").stat().st_size == found["made"]["coded_bytes"]
    # Three bits of 32, and Huffman codes below that: what general compressors do not find.
    assert sizes["shared"]["coded_bytes"] < 0.12 * sizes["original"]["file_bytes"]
    assert sizes["shared"]["coded_bytes"] < min(sizes["shared"]["zlib_bytes"], sizes["shared"]["lzma_bytes"])
    back = penstock("share", "model.coded", "--decode", "-o", "back.onnx", "--json")
    assert back.code == 0, back.err
    assert back.json["size_bytes"] == found["made"]["size_bytes"]
    assert (digits / "back.onnx").read_bytes() == (digits / "shared.onnx").read_bytes()


def test_bits_by_sensitivity(penstock, folder: Path) -> None:
    options = ("--by-sensitivity", "--train", "data.npz", "-o", "out.onnx", "--json")
    done = penstock("share", "linear.onnx", *options)
    assert done.code == 0, done.err
    assert list(done.json["bits"].values()) <= [8]


@pytest.mark.parametrize(
    ("options", "code", "cause"),
    [
        (("linear.onnx", "--bits", "40"), 2, "--bits must be at most 12, got 40"),
        (("linear.onnx", "--conv-bits", "-1"), 2, "--conv-bits must be at least 0, got -1"),
        (("linear.onnx", "--by-sensitivity"), 2, "needs data"),
        (("linear.onnx", "--epochs", "3"), 2, "--epochs requires --tune"),
        (("linear.onnx", "--decode"), 2, "'linear.onnx' is already an ONNX file"),
        (("data.npz", "--decode"), 5, "'data.npz': this is not a coded model"),
        (("/dev/zero", "--decode"), 2, "'/dev/zero' is not a regular file"),
        (("linear.onnx", "--coded", "/dev/full"), 2, "'/dev/full' cannot be written: it is not a regular file"),
        (("none.coded", "--decode"), 3, "the coded file 'none.coded' does not exist"),
        (("linear.onnx", "--decode", "--tune"), 2, "--tune cannot be combined with --decode"),
        (("linear.onnx", "--coded", "data.npz"), 8, "'data.npz' exists and is not a coded model"),
        (("linear.onnx", "--coded", "linear.onnx"), 2, "would overwrite"),
    ],
)
def test_options_that_make_no_sense(penstock, folder: Path, options: tuple[str, ...], code: int, cause: str) -> None:
    done = penstock("share", *options, "-o", "out.onnx")
    assert done.code == code
    assert cause in " ".join(done.err.replace("│", " ").split())
    assert not (folder / "out.onnx").exists()
