"""Templates that are filled in from a signature alone."""

from __future__ import annotations

import re

import pytest

from penstock.errors import InvalidArgument
from penstock.pipeline.templates.fill import Given, fill
from penstock.tensor import DataType, Signature, TensorSpec


def given(*shape: int) -> Given:
    """A sound classifier of an input of ``shape``."""
    scores = TensorSpec("y", DataType.FP32, (-1, 4))
    return Given(
        name="sounds", model="net.onnx", signature=Signature((TensorSpec("x", DataType.FP32, (-1, *shape)),), (scores,))
    )


@pytest.mark.parametrize(
    ("shape", "n_mels", "pattern", "guessed"),
    [
        ((64, -1), 64, "", False),
        ((-1, 7), 7, "mels frames -> frames mels", False),
        ((1, -1, 64), 64, "mels frames -> 1 frames mels", False),
        ((1, 64, -1), 64, "mels frames -> 1 mels frames", False),
        ((1024, 128), 128, "mels frames -> frames mels", True),
        ((1, 128, 128), 128, "mels frames -> 1 mels frames", True),
        ((1, -1), 0, "samples -> 1 samples", False),
        ((-1,), 0, "", False),
    ],
)
def test_the_axes_of_a_sound_classifier(shape: tuple[int, ...], n_mels: int, pattern: str, guessed: bool) -> None:
    text = fill("audio-classifier", given(*shape))
    assert re.findall(r"n_mels: (\d+)", text) == ([str(n_mels)] if n_mels else [])
    assert re.findall(r'pattern: "(.*)"', text) == ([pattern] if pattern else [])
    assert bool(re.search("rearrange.*CHECK", text)) == guessed


@pytest.mark.parametrize(
    ("shape", "message"),
    [((-1, -1), "does not tell the number of mel bands"), ((3, 64, 100), "needs one input: samples")],
)
def test_sound_classifiers_that_no_template_fits(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        fill("audio-classifier", given(*shape))
