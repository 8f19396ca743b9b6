"""Declarations from the files of a Hugging Face folder."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.errors import Unsupported
from penstock.pipeline.declaration import parse
from penstock.pipeline.source import read_source
from penstock.pipeline.templates.fill import Given
from penstock.pipeline.templates.huggingface import from_folder
from penstock.tensor import DataType, Signature, TensorSpec

LOGITS = TensorSpec("logits", DataType.FP32, (-1, 2))
PICTURES = Given(
    name="net",
    model="net.onnx",
    signature=Signature((TensorSpec("pixel_values", DataType.FP32, (-1, 3, 8, 8)),), (LOGITS,)),
)
TEXTS = Given(
    name="net",
    model="net.onnx",
    signature=Signature((TensorSpec("input_ids", DataType.INT64, (-1, -1)),), (LOGITS,)),
)
LABELS = {"1": "dog", "0": "cat"}
CONFIG: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "size": {"height": 8, "width": 8},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def steps_of(text: str) -> dict[str, dict[str, Any]]:
    source = read_source(text.encode(), "pipeline.yaml")
    parse(source)
    return {step["step"]: step for step in source.data["steps"] if "step" in step}


def test_a_picture_is_prepared_as_the_folder_says() -> None:
    found = from_folder(PICTURES, LABELS, {"preprocessor_config.json": CONFIG})
    assert (found.kind, found.labels) == ("image-classifier", ("cat", "dog"))
    steps = steps_of(found.text)
    assert (steps["resize"]["size"], steps["resize"]["filter"]) == ([8, 8], "bicubic")
    assert (steps["normalise"]["mean"], steps["normalise"]["std"]) == ([0.5] * 3, [0.25] * 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"do_flip": True}, "the preprocessing has 'do_flip'"),
        ({"do_resize": False}, "does not resize pictures to one size"),
        ({"crop_pct": 0.9}, "does not resize pictures to one size"),
        ({"resample": 17}, "has the filter 17"),
        ({"image_mean": None}, "does not tell image_mean and image_std"),
        ({"size": {"longest_edge": 8}}, "does not resize pictures to one size"),
    ],
)
def test_a_part_without_a_step_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        from_folder(PICTURES, LABELS, {"preprocessor_config.json": CONFIG | changes})


def test_missing_files_and_labels_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"no preprocessor_config\.json"):
        from_folder(PICTURES, LABELS, {})
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        from_folder(TEXTS, LABELS, {})
    with pytest.raises(Unsupported, match="2 classes, but its folder names 1"):
        from_folder(PICTURES, {"0": "cat"}, {"preprocessor_config.json": CONFIG})


def test_a_text_is_cut_as_the_folder_says() -> None:
    files = {"tokenizer.json": {}, "tokenizer_config.json": {"model_max_length": 77, "truncation_side": "left"}}
    found = from_folder(TEXTS, LABELS, files)
    assert found.kind == "text-classifier"
    tokenise = steps_of(found.text)["tokenise"]
    assert (tokenise["max_length"], tokenise["truncation_side"]) == (77, "left")


def test_the_problem_decides_what_scores_mean() -> None:
    files = {"preprocessor_config.json": CONFIG}
    single = steps_of(from_folder(PICTURES, LABELS, files, "single_label_classification").text)
    assert {"softmax", "top_k"} <= single.keys()
    assert not {"sigmoid", "threshold"} & single.keys()
    multi = steps_of(from_folder(PICTURES, LABELS, files, "multi_label_classification").text)
    assert {"sigmoid", "threshold"} <= multi.keys()
    assert not {"softmax", "top_k"} & multi.keys()
    with pytest.raises(Unsupported, match="the model is a regression"):
        from_folder(PICTURES, LABELS, files, "regression")


def test_one_score_is_no_classifier() -> None:
    """Its softmax would be 1 for every picture."""
    one = msgspec.structs.replace(
        PICTURES, signature=Signature(PICTURES.signature.inputs, (TensorSpec("logits", DataType.FP32, (-1, 1)),))
    )
    with pytest.raises(Unsupported, match="at least two classes"):
        from_folder(one, {"0": "LABEL_0"}, {"preprocessor_config.json": CONFIG})


def test_an_encoder_of_pictures_gives_embeddings() -> None:
    states = TensorSpec("last_hidden_state", DataType.FP32, (-1, 17, 16))
    encoder = msgspec.structs.replace(PICTURES, signature=Signature(PICTURES.signature.inputs, (states,)))
    crop = {"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": {"height": 8, "width": 8}}
    found = from_folder(encoder, {}, {"preprocessor_config.json": CONFIG | crop})
    assert (found.kind, found.labels) == ("embedding", ())
    steps = steps_of(found.text)
    assert (steps["resize"]["shortest"], steps["crop"]["size"], steps["normalise"]["in"]) == (9, [8, 8], "cropped")
    assert steps["pool"]["in"] == {"value": "encoded"}
