"""``penstock new``: every template works at once with a model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing

import models
from penstock.artifact import Artifact
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.pipeline.steps.audio.log_mel import LogMel
from penstock.runtime import Pipeline
from penstock.tensor import Array

FP32, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8
WEIGHTS = np.random.default_rng(5).standard_normal((4096, 8)).astype(np.float32) / 16


def classifier(shape: list[Any], classes: int, *, softmax: bool = False) -> Artifact:
    """A linear model of an input of ``shape``."""
    nodes = [("Flatten", ["x"], ["f"]), ("MatMul", ["f", "w"], ["logits" if softmax else "y"])]
    if softmax:
        nodes.append(("Softmax", ["logits"], ["y"]))
    return models.artifact(
        nodes,
        [("x", FP32, ["N", *shape])],
        [("y", FP32, ["N", classes])],
        {"w": WEIGHTS[: int(np.prod(shape)), :classes]},
    )


def text_model(output: str) -> Artifact:
    """The embeddings of all tokens, or their sum as scores."""
    gather = ("Gather", ["table", "input_ids"], ["tokens"])
    return models.artifact(
        [gather, ("ReduceSum", ["tokens", "one"], ["sum"]), ("Flatten", ["sum"], ["scores"])]
        if output == "scores"
        else [gather],
        [("input_ids", INT64, ["N", "L"])],
        [(output, FP32, ["N", 3])] if output == "scores" else [(output, FP32, ["N", "L", 3])],
        {"table": WEIGHTS[:8, :3], "one": np.array([1])} if output == "scores" else {"table": WEIGHTS[:8, :3]},
    )


def tokenizer(path: Path) -> Tokenizer:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "water": 4, "flows": 5}
    found = Tokenizer(WordLevel(words, "[UNK]"))
    found.pre_tokenizer = Whitespace()
    found.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    found.save(str(path))
    return found


def picture(height: int = 40, width: int = 60) -> tuple[Array, bytes]:
    """A picture, and its file."""
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pixels, file.getvalue()


def opened(folder: str) -> Pipeline:
    pack_pipeline(Path(folder, "pipeline.yaml"), Path(f"{folder}.bundle"))
    return Pipeline.open(f"{folder}.bundle")


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


@pytest.mark.parametrize("is_planar", [True, False])
@pytest.mark.parametrize("has_softmax", [True, False])
def test_image_classifier(penstock, folder: Path, is_planar: bool, has_softmax: bool) -> None:
    shape = [3, 16, 24] if is_planar else [16, 24, 3]
    (folder / "net.onnx").write_bytes(classifier(shape, 4, softmax=has_softmax).data)
    (folder / "names.txt").write_text("ash\nbirch\ncedar\ndate\n")
    done = penstock("new", "image-classifier", "trees", "--model", "net.onnx", "--labels", "names.txt", "--json")
    assert done.code == 0, done.err
    assert done.json["files"] == ["labels.txt", "net.onnx", "pipeline.yaml"]
    assert len(done.json["check"]) == 5 - has_softmax
    pixels, file = picture()
    with opened("trees") as pipeline:
        found = pipeline(file)
    small = np.asarray(Image.fromarray(pixels).resize((24, 16), Image.Resampling.BILINEAR), np.float32) / np.float32(
        255
    )
    flat = (small.transpose(2, 0, 1) if is_planar else small).ravel()
    expected = softmax(flat @ WEIGHTS[: flat.size, :4])
    order = np.argsort(-expected)
    assert found["labels"] == [["ash", "birch", "cedar", "date"][index] for index in order]
    np.testing.assert_allclose(found["scores"], expected[order], rtol=1e-4)


def test_pixels_go_to_a_model_that_takes_them(penstock, folder: Path) -> None:
    nodes = [("DequantizeLinear", ["x", "one"], ["c"]), ("Flatten", ["c"], ["f"]), ("MatMul", ["f", "w"], ["y"])]
    found = models.artifact(
        nodes, [("x", UINT8, ["N", 4, 4, 1])], [("y", FP32, ["N", 3])], {"one": np.float32(1), "w": WEIGHTS[:16, :3]}
    )
    (folder / "net.onnx").write_bytes(found.data)
    assert penstock("new", "image-classifier", "small", "--model", "net.onnx").code == 0
    text = Path("small/pipeline.yaml").read_text()
    assert "normalise" not in text
    assert "colour: grey" in text
    with opened("small") as pipeline:
        assert pipeline(picture()[1])["labels"][0].startswith("class ")


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        ({"head": ["N", 7, 40]}, "version: v8"),
        ({"head": ["N", 40, 8]}, "version: v5"),
        ({"logits": ["N", 40, 3], "boxes": ["N", 40, 4]}, "decode_detr"),
    ],
)
def test_detector(penstock, folder: Path, outputs: dict[str, list[Any]], word: str) -> None:
    nodes: list[Any] = [("ReduceMean", ["x"], ["m"]), ("Mul", ["m", "zero"], ["z"])]
    weights: dict[str, Any] = {"zero": np.float32(0)}
    for name, shape in outputs.items():
        nodes.append(("Add", ["z", f"{name}_values"], [f"{name}_sum"]))
        nodes.append(("Reshape", [f"{name}_sum", f"{name}_shape"], [name]))
        values = np.zeros(shape[1:], np.float32)
        if "v8" in word:
            values[:, 0] = [8, 8, 8, 8, 0.1, 0.9, 0.2]
        elif "v5" in word:
            values[0] = [8, 8, 8, 8, 1, 0.1, 0.9, 0.2]
        elif name == "boxes":
            values[0] = [0.5, 0.5, 0.5, 0.5]
        else:
            values[:], values[0] = -9, [-2, 2, -2]
        weights |= {f"{name}_values": values, f"{name}_shape": np.array([-1, *shape[1:]])}
    found = models.artifact(
        nodes,
        [("x", FP32, [1, 3, 16, 16])],
        [(name, FP32, [1, *shape[1:]]) for name, shape in outputs.items()],
        weights,
    )
    (folder / "net.onnx").write_bytes(found.data)
    done = penstock("new", "detector", "finder", "--model", "net.onnx")
    assert done.code == 0, done.err
    assert word in Path("finder/pipeline.yaml").read_text()
    with opened("finder") as pipeline:
        answer = pipeline(picture(32, 32)[1])
    assert answer["labels"] == ["class 1"]
    np.testing.assert_allclose(answer["boxes"], [[8, 8, 24, 24]], atol=1e-4)


def test_texts(penstock, folder: Path) -> None:
    words = tokenizer(folder / "tokenizer.json")
    ids = words.encode("water flows").ids
    table = WEIGHTS[:8, :3]
    (folder / "scores.onnx").write_bytes(text_model("scores").data)
    (folder / "tokens.onnx").write_bytes(text_model("tokens").data)
    done = penstock("new", "text-classifier", "topics", "--model", "scores.onnx")
    assert done.code == 0, done.err
    with opened("topics") as pipeline:
        expected = softmax(table[ids].sum(axis=0))
        np.testing.assert_allclose(pipeline("water flows")["scores"], np.sort(expected)[::-1], rtol=1e-5)
    assert penstock("new", "embedding", "vectors", "--model", "tokens.onnx").code == 0
    with opened("vectors") as pipeline:
        mean = table[ids].mean(axis=0)
        np.testing.assert_allclose(pipeline("water flows")["embedding"], mean / np.linalg.norm(mean), rtol=1e-5)
    (folder / "tokenizer.json").unlink()
    done = penstock("new", "embedding", "again", "--model", "tokens.onnx")
    assert (done.code, Path("again").exists()) == (3, False)
    assert "--tokenizer" in done.err


def test_an_embedding_of_a_picture(penstock, folder: Path) -> None:
    (folder / "net.onnx").write_bytes(classifier([3, 16, 24], 4).data)
    done = penstock("new", "embedding", "vectors", "--model", "net.onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["files"] == ["net.onnx", "pipeline.yaml"]
    pixels, file = picture()
    small = np.asarray(Image.fromarray(pixels).resize((24, 16), Image.Resampling.BILINEAR), np.float32)
    expected = (small / np.float32(255)).transpose(2, 0, 1).ravel() @ WEIGHTS[: 3 * 16 * 24, :4]
    with opened("vectors") as pipeline:
        np.testing.assert_allclose(pipeline(file)["embedding"], expected / np.linalg.norm(expected), rtol=1e-4)
    (folder / "flat.onnx").write_bytes(classifier([7], 4).data)
    done = penstock("new", "embedding", "none", "--model", "flat.onnx")
    assert "this template needs one input: input_ids of a text, or a picture" in done.err


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ([800], ""),
        ([1, 800], "samples -> 1 samples"),
        ([8, 11], ""),
        ([40, 11], ""),
        ([11, 40], "mels frames -> frames mels"),
        ([1, 8, 11], "mels frames -> 1 mels frames"),
        ([1, 11, 40], "mels frames -> 1 frames mels"),
        ([11, 40, 1], "mels frames -> frames mels 1"),
    ],
)
def test_audio_classifier(penstock, folder: Path, shape: list[int], pattern: str) -> None:
    """The model gets the samples, or the spectrogram, in the order of its axes."""
    (folder / "net.onnx").write_bytes(classifier(shape, 3).data)
    done = penstock("new", "audio-classifier", "sounds", "--model", "net.onnx")
    assert done.code == 0, done.err
    declaration = Path("sounds/pipeline.yaml").read_text()
    assert pattern in declaration
    assert ("rearrange" in declaration) == bool(pattern)
    with opened("sounds") as pipeline:
        for count in (500, 5000):
            sound = np.sin(np.arange(count) ** 1.5).astype(np.float32)
            found = pipeline(sound)
            expected = softmax(_features(sound, shape).ravel() @ WEIGHTS[: int(np.prod(shape)), :3])
            assert found["labels"] == [f"class {index}" for index in np.argsort(-expected)]
            np.testing.assert_allclose(found["scores"], np.sort(expected)[::-1], rtol=1e-4)


def _features(sound: Array, shape: list[int]) -> Array:
    """The samples or the spectrogram that a model of ``shape`` gets, in which there are 11 frames or 800 samples."""
    is_spectrogram = 11 in shape
    length = 1600 if is_spectrogram else 800
    fixed = np.pad(sound[:length], (0, max(0, length - len(sound))))
    if not is_spectrogram:
        return fixed
    mels = next(size for size in shape if size not in (1, 11))
    found = LogMel(rate=16_000, n_fft=400, hop=160, n_mels=mels).run({"value": fixed})["value"]
    return np.asarray(found.T if shape.index(11) < shape.index(mels) else found)


def test_tabular(penstock, folder: Path) -> None:
    assert penstock("new", "tabular", "rows", "--model", "linear.onnx").code == 0
    row = np.array([1, 2, 3], np.float32)
    with opened("rows") as pipeline:
        np.testing.assert_allclose(pipeline(row)["y"], row @ models.linear_weight(3, 2), rtol=1e-5)


def test_ocr(penstock, folder: Path) -> None:
    detector = models.artifact(
        [("ReduceMean", ["x"], ["m"]), ("Mul", ["m", "zero"], ["z"]), ("Add", ["z", "map"], ["y"])],
        [("x", FP32, [1, 3, 32, 32])],
        [("y", FP32, [1, 1, 32, 32])],
        {"zero": np.float32(0), "map": _map()},
    )
    reader = models.artifact(
        [
            ("ReduceMean", ["x"], ["m"]),
            ("Mul", ["m", "zero"], ["z"]),
            ("Add", ["z", "steps"], ["s"]),
            ("Reshape", ["s", "shape"], ["y"]),
        ],
        [("x", FP32, [1, 3, 8, 16])],
        [("y", FP32, [1, 4, 3])],
        {
            "zero": np.float32(0),
            "steps": np.eye(3, dtype=np.float32)[None, [1, 0, 2, 2]] * 9,
            "shape": np.array([1, 4, 3]),
        },
    )
    (folder / "det.onnx").write_bytes(detector.data)
    (folder / "rec.onnx").write_bytes(reader.data)
    (folder / "characters.txt").write_text("h\ni\n")
    done = penstock(
        "new", "ocr", "reader", "--model", "det.onnx", "--recogniser", "rec.onnx", "--labels", "characters.txt"
    )
    assert done.code == 0, done.err
    with opened("reader") as pipeline:
        assert pipeline(picture(64, 64)[1])["texts"] == ["hi"]
    done = penstock("new", "ocr", "again", "--model", "det.onnx")
    assert "give it with --recogniser" in done.err


def _map() -> Array:
    """A probability map with one line of text."""
    found = np.zeros((1, 1, 32, 32), np.float32)
    found[..., 10:18, 6:26] = 0.9
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("image-clasifier", "d", "--model", "linear.onnx"), "did you mean 'image-classifier'"),
        (("image-classifier", "d", "--model", "none.onnx"), "there is no model 'none.onnx'"),
        (("image-classifier", "d", "--model", "linear.onnx"), "this template needs one input: a picture"),
        (("text-classifier", "d", "--model", "linear.onnx"), "the model has the inputs x"),
        (("detector", "d", "--model", "linear.onnx"), "this template needs"),
    ],
)
def test_mistakes_write_nothing(penstock, folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = penstock("new", *arguments)
    assert done.code in (2, 3)
    assert message in done.err
    assert not Path("d").exists()


def test_a_folder_is_not_overwritten(penstock, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("keep")
    assert penstock("new", "tabular", "mine", "--model", "linear.onnx").code == 8
    assert (folder / "mine" / "notes.txt").read_text() == "keep"
