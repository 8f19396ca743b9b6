from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from commands import Command
from pipelines import SCORES, scores_bundle

ONE, TWO = "[1, 2, 3]", "[0, -1, 0.5]"
BOXES = """\
name: boxes
inputs:
  image: {media: image}
steps:
  - {step: constant, value: [[2.0, 3.0, 20.0, 15.0]], out: boxes}
  - {step: decode_image, in: image, out: pixels}
  - {step: constant, value: [0.5], out: scores}
  - {step: draw, in: {image: pixels, boxes: boxes, scores: scores}, out: picture}
outputs: [boxes, scores, picture]
"""


@pytest.fixture
def picture(folder: Path) -> Path:
    images = pytest.importorskip("PIL.Image")
    images.fromarray(np.full((32, 48, 3), 200, np.uint8)).save(folder / "photo.png")
    return folder / "photo.png"


def test_one_item_is_printed_as_a_server_answers(penstock: Command, folder: Path) -> None:
    scores_bundle(folder)
    done = penstock("infer", "scores.bundle", ONE)
    assert done.code == 0
    assert set(json.loads(done.out)) == {"label", "p"}
    (folder / "one.json").write_text(ONE)
    np.save(folder / "one.npy", np.array([1, 2, 3], np.float32))
    for word in ("one.json", "one.npy", f"features={ONE}"):
        assert json.loads(penstock("infer", "scores.bundle", word).out) == json.loads(done.out)


def test_the_standard_input_is_an_item(
    penstock: Command, folder: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_bundle(folder)
    one = penstock("infer", "scores.bundle", ONE).out
    (folder / "text.yaml").write_text(
        "name: text\ninputs: {x: {media: text}}\nsteps: [{step: normalise_text, in: x, out: y}]\noutputs: [y]\n"
    )
    (folder / "boxes.yaml").write_text(BOXES)
    for name in ("text", "boxes"):
        assert penstock("pack", f"{name}.yaml", "-o", f"{name}.bundle").code == 0

    def answer(bundle: str, content: bytes, *arguments: str) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        done = penstock("infer", bundle, *arguments)
        assert done.code == 0, done.err
        return done.out

    assert answer("scores.bundle", ONE.encode(), "-") == one
    assert answer("scores.bundle", ONE.encode(), "features=/dev/stdin") == one
    assert json.loads(answer("text.bundle", "zwölf".encode(), "-")) == {"y": "zwölf"}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ONE.encode())))
    assert "the standard input is empty" in penstock("infer", "scores.bundle", "-", "-").err
    monkeypatch.setattr("sys.stdin", None)
    assert "the standard input is empty" in penstock("infer", "scores.bundle", "-").err
    monkeypatch.setattr("penstock.cli.views.answers.MAX_FILE_BYTES", 3)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[1, 2]")))
    assert "the standard input has more than 3 bytes" in penstock("infer", "scores.bundle", "-").err
    monkeypatch.setattr("penstock.cli.views.answers.MAX_FILE_BYTES", 1 << 30)
    assert "picture" in answer("boxes.bundle", picture.read_bytes(), "-", "--draw", "drawn.png")
    assert (folder / "drawn.png").exists()


def test_a_row_of_an_array_is_one_line(penstock: Command, folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(
        "name: rows\ninputs: {x: {shape: [-1, 2]}}\nsteps: [{step: softmax, in: x, out: y}]\noutputs: [y]\n"
    )
    assert penstock("pack", "pipeline.yaml", "-o", "rows.bundle").code == 0
    assert penstock("infer", "rows.bundle", "[[0, 0], [1, 1]]").out == (
        '{\n  "y": [\n    [0.5, 0.5],\n    [0.5, 0.5]\n  ]\n}\n'
    )
    assert json.loads(penstock("infer", "rows.bundle", "[[3, 0], [1, 1]]").out)["y"][1] == [0.5, 0.5]


def test_several_items_are_lines_and_a_failure_does_not_stop_the_others(penstock: Command, folder: Path) -> None:
    scores_bundle(folder)
    done = penstock("infer", "scores.bundle", ONE, "[1]", TWO)
    assert done.code == 2
    assert "error: [1]: unexpected shape" in done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [sorted(line) for line in lines] == [["item", "outputs"], ["error", "item"], ["item", "outputs"]]
    facts = penstock("infer", "scores.bundle", ONE, TWO, "--json").json
    assert [item["outputs"] for item in facts["items"]] == [lines[0]["outputs"], lines[2]["outputs"]]


def test_nan_is_not_null(penstock: Command, folder: Path) -> None:
    scores_bundle(folder, SCORES.partition("  - step: top_k")[0] + "outputs: [p]\n")
    done = penstock("infer", "scores.bundle", "[NaN, 1, 2]")
    assert done.code == 0
    assert "NaN" in done.out
    assert "null" not in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no item to run"),
        (("pipe.npy",), "it is a pipe"),
        (("-",), "the standard input is not an array of FP32 in JSON"),
        (("features=[1,2,3]", "features=[1,2,3]"), "input 'features' is given twice"),
        (("--text", "x"), "input 'features' is tensor, not text"),
        ((ONE, TWO, "--draw", "a.png"), "--draw takes one item, but 2 are given"),
        ((ONE, "--draw", "a.png"), "--draw needs a picture"),
        (("--inputs", "data.npz"), "is a pipeline, which takes files"),
        (("picture=one.jpg",), "there is no input 'picture'\n  fix: the input is 'features'"),
    ],
)
def test_mistakes(
    penstock: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    scores_bundle(folder)
    os.mkfifo("pipe.npy")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    done = penstock("infer", "scores.bundle", *arguments)
    assert (done.code, "Traceback" in done.err) == (2, False)
    assert message in done.err


def test_a_missing_file_is_named(penstock: Command, folder: Path) -> None:
    scores_bundle(folder)
    done = penstock("infer", "scores.bundle", "none.npy")
    assert (done.code, "no data file 'none.npy'" in done.err) == (3, True)


def test_a_model_takes_tensors(penstock: Command, folder: Path) -> None:
    scores_bundle(folder)
    assert "is a model, which takes tensors" in penstock("infer", "linear.onnx", "photo.jpg").err
    assert "--inputs is missing" in penstock("infer", "linear.onnx").err


@pytest.mark.parametrize("outputs", ["[boxes, scores, picture]", "[boxes, scores]"])
def test_boxes_are_drawn(penstock: Command, folder: Path, picture: Path, outputs: str) -> None:
    text = BOXES.replace("[boxes, scores, picture]", outputs)
    if "picture" not in outputs:
        text = "".join(
            line for line in text.splitlines(keepends=True) if "decode_image" not in line and "step: draw" not in line
        )
        text = (
            text.replace("image: {media: image}", "image: {media: image}")
            .replace("outputs:", "  - {step: decode_image, in: image, out: pixels}\noutputs:")
            .replace("[boxes, scores]", "[boxes, scores, pixels]")
        )
    scores_bundle(folder, text)
    done = penstock("infer", "scores.bundle", picture, "--draw", "out.png")
    assert done.err == "drawn to out.png\n"
    assert done.code == 0, done.err
    images = pytest.importorskip("PIL.Image")
    drawn = np.asarray(images.open(folder / "out.png"))
    assert drawn.shape == (32, 48, 3)
    assert (drawn != 200).any()
