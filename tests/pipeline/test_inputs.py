from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument
from penstock.pipeline.inputs import check_inputs
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType

IMAGE = ValueType(Media.IMAGE, DataType.BYTES)
TYPES = {"image": IMAGE, "question": TEXT, "scores": ValueType(shape=(-1, 2)), "extra": FILE}
GOOD: dict[str, Any] = {"scores": np.zeros((5, 2), np.float32), "image": b"jpeg", "question": "what", "extra": b""}


def test_inputs_come_in_the_declared_order() -> None:
    assert list(check_inputs(TYPES, GOOD)) == list(TYPES)
    assert check_inputs({"image": IMAGE}, {"image": bytearray(b"x")}) == {"image": b"x"}
    assert check_inputs({"image": IMAGE}, {"image": GOOD["scores"]})["image"] is GOOD["scores"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "input 'image' must be the content of a file, or an array of pixels, not NoneType"),
        ({"question": b"bytes"}, "input 'question' must be a text, not bytes"),
        ({"extra": np.zeros(3)}, "input 'extra' must be the content of a file, not ndarray"),
        ({"scores": [1, 2]}, "input 'scores' must be an array, not list"),
        ({"scores": np.zeros((5, 2))}, "data-type is 'FP64', but model expects 'FP32'"),
        ({"scores": np.zeros((5, 3), np.float32)}, "unexpected shape"),
        ({"imagee": b""}, "unexpected input 'imagee'.*did you mean 'image'"),
    ],
)
def test_wrong_inputs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_inputs(TYPES, {**GOOD, **changes})


def test_a_missing_input() -> None:
    with pytest.raises(InvalidArgument, match="input 'extra' is missing"):
        check_inputs(TYPES, {name: value for name, value in GOOD.items() if name != "extra"})
