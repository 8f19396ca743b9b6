"""Bodies of ``POST .../run`` as tensors."""

from __future__ import annotations

import base64
import json
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelines
from penstock.errors import InvalidArgument
from penstock.online.server.http.dialects.run import WrongMedia, read, write
from penstock.online.server.to_thread import finish
from penstock.pipeline.function import Function
from penstock.pipeline.value import ValueType
from penstock.pipeline.wire import signature_of, to_json
from penstock.tensor import Array, DataType

FORM = b"multipart/form-data; boundary=b"
JSON = b"application/json"
NUMBERS = pipelines.function()
TWO = pipelines.function(pipelines.TEXT_AND_FEATURES)


def tensors(kind: bytes, body: bytes, function: Function = NUMBERS) -> dict[str, Array]:
    return finish(read(kind, memoryview(body), function, signature_of(function).inputs))


def part(name: str, content: bytes, kind: str = "") -> bytes:
    extra = f"Content-Type: {kind}\r\n" if kind else ""
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n{extra}\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--"


@pytest.mark.parametrize("kind", [JSON, FORM])
@pytest.mark.parametrize(
    ("given", "text", "shape"),
    [
        ({}, "2", (1,)),
        ({}, "[2]", (1,)),
        ({"shape": [-1, 4]}, "[]", (0, 4)),
        ({"shape": [-1, -1]}, "[[], []]", (2, 0)),
        ({"shape": [-1], "datatype": "BYTES"}, '["a", "\u00fc"]', (2,)),
        ({"datatype": "BYTES"}, '"a"', (1,)),
    ],
)
def test_tensors_in_the_form_of_answers(kind: bytes, given: dict[str, Any], text: str, shape: tuple[int, ...]) -> None:
    empty: dict[str, Any] = {"models": None, "labels": None, "examples": None}
    steps = [{"step": "constant", "value": 1, "out": "y"}]
    function = pipelines.function(inputs={"x": given}, steps=steps, outputs=["x", "y"], **empty)
    body = f'{{"x": {text}}}'.encode() if kind is JSON else form(part("x", text.encode(), "application/json"))
    assert tensors(kind, body, function)["x"].shape == shape


def giving(datatype: DataType) -> Function:
    """A function whose output ``x`` is a list of numbers."""
    return msgspec.structs.replace(NUMBERS, outputs={"x": ValueType(datatype=datatype, shape=(-1,))})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"", b"[1, 2.5, NaN]"),
        (b"text/plain", b" [1, 2.5, NaN] "),
        (JSON, b'{"features": [1, 2.5, NaN]}'),
        (FORM, form(part("features", b"[1, 2.5, NaN]"))),
    ],
)
def test_numbers_in_every_form(kind: bytes, body: bytes) -> None:
    np.testing.assert_array_equal(tensors(kind, body)["features"], np.array([1, 2.5, np.nan], np.float32))


@given(
    st.text(st.characters(exclude_characters="-")),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
)
def test_a_form_and_json_give_the_same_tensors(text: str, numbers: list[float]) -> None:
    content = text.encode()
    found = tensors(
        FORM, form(part("text", content), part("features", json.dumps(numbers).encode(), "application/json")), TWO
    )
    other = tensors(JSON, json.dumps({"text": content.decode(), "features": numbers}).encode(), TWO)
    for one in (found, other):
        assert one["text"].tolist() == [content]
        assert one["features"].tolist() == numbers


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (b"", b"[1,2,3]", "no input names"),
        (FORM, form(part("text", b"a"), part("text", b"b")), "two parts called 'text'"),
        (FORM, form(part("txt", b"a")), "no input 'txt'"),
        (FORM, form(part("features", b"one, two")), "'features' is .*, and its content is not JSON"),
        (JSON, b'{"text": 1}', "write text as a JSON string"),
        (JSON, b'{"features": ["a"]}', "features"),
        (JSON, b'{"features": [[1], [1, 2]]}', "features"),
    ],
)
def test_wrong_bodies(kind: bytes, body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        tensors(kind, body, TWO)


def test_the_media_type_of_each_part_counts() -> None:
    with pytest.raises(WrongMedia, match="'text' is text, but the content type is 'image/png'"):
        tensors(FORM, form(part("text", b"a", "image/png")), TWO)


def test_json_from_curl_is_not_taken_for_a_picture() -> None:
    """``curl -d`` sends its own content type, whatever the body is."""
    steps = [{"step": "decode_image", "in": "image", "out": "pixels"}]
    empty: dict[str, Any] = {"models": None, "labels": None, "examples": None}
    picture = pipelines.function(inputs={"image": {"media": "image"}}, steps=steps, outputs=["pixels"], **empty)
    kind = b"application/x-www-form-urlencoded"
    for body in (b'{"image": "AAAA"}', memoryview(b'{"image": "' + b"A" * 100_000 + b'"}')):
        with pytest.raises(WrongMedia, match="is a JSON object, but .*curl -d.*Content-Type: application/json"):
            tensors(kind, body, picture)  # type: ignore[arg-type]
    assert tensors(kind, b"\x89PNG", picture)["image"][0] == b"\x89PNG"
    assert tensors(b"application/json", b'{"image": "AAAA"}', picture)["image"][0] == bytes(3)


def test_a_large_list_is_charged_and_read_in_short_steps() -> None:
    numbers = np.arange(300_000) % 997
    body = form(part("features", json.dumps(numbers.tolist()).encode(), "application/json"))
    steps = read(FORM, memoryview(body), TWO, signature_of(TWO).inputs)
    charges = []
    while True:
        try:
            charges.append(next(steps))
        except StopIteration as end:
            found = end.value
            break
    assert found["features"].tolist() == numbers.tolist()
    assert charges[0] == 2 * len(body)
    assert len(charges) > 5, "one step would block the other threads"
    assert max(charges) >= len(body) + 8 * numbers.size, "the text and the numbers are in memory together"


@given(st.sampled_from(["FP32", "FP16", "BF16", "FP64", "UINT8", "INT64", "UINT64", "BOOL"]), st.data())
def test_outputs_are_written_as_plain_data(name: str, data: st.DataObject) -> None:
    datatype = DataType(name)
    function = giving(datatype)
    values = data.draw(st.lists(st.integers(0, 1 if name == "BOOL" else 255), max_size=9))
    array = (np.array(values, np.float64) / 7 if "F" in name else np.array(values)).astype(datatype.dtype)
    written = json.loads(write(function, {"x": array}))
    assert written == to_json(function, {"x": array})
    assert np.array(written["x"]).astype(datatype.dtype).tobytes() == array.tobytes()


def test_a_large_output_takes_little_memory() -> None:
    function = giving(DataType.UINT8)
    array = np.arange(3_000_000).astype(np.uint8)
    tracemalloc.start()
    try:
        written = write(function, {"x": array})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert json.loads(written) == {"x": array.tolist()}
    assert peak < 3 * len(written)


@given(st.sampled_from([b"", JSON, FORM, b"image/png"]), st.binary(max_size=60), st.sampled_from([NUMBERS, TWO]))
def test_any_body_is_read_or_refused(kind: bytes, body: bytes, function: Function) -> None:
    for one in (body, base64.b64encode(body), b'{"features": %b}' % body, form(part("features", body))):
        with suppress(InvalidArgument):
            assert set(tensors(kind, one, function)) <= {"features", "text"}
