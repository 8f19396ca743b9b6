"""Tests of penstock.perf.oip_client, against the encoder and decoder of the genuine Triton client where it has them."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferResult

from penstock.errors import InvalidArgument, InvalidData, NotFound, PenstockError, Unavailable, Unsupported
from penstock.perf.http_client import Address
from penstock.perf.load import run
from penstock.perf.oip_client import (
    decode_answer,
    fetch_signature,
    infer_all,
    infer_request,
    random_inputs,
    request_shapes,
)
from penstock.tensor import Array, DataType, Signature, TensorSpec
from servers import answer, answering, double, serving

ADDRESS = Address("localhost", 8000)


def split(request: bytes) -> tuple[list[str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    return head.decode().split("\r\n"), body


def signature(datatype: DataType, *shape: int) -> Signature:
    spec = TensorSpec("x", datatype, shape)
    return Signature((spec,), (spec,))


@pytest.mark.parametrize("datatype", DataType)
def test_binary_requests_are_those_of_the_triton_client(datatype: DataType) -> None:
    (inputs,) = random_inputs(signature(datatype, -1, 3), {"x": (2, 3)}, count=1)
    tensor = InferInput("x", [2, 3], datatype.value)
    tensor.set_data_from_numpy(inputs["x"], binary_data=True)
    wanted, json_size = InferenceServerClient.generate_request_body([tensor])
    lines, body = split(infer_request(ADDRESS, "my model", inputs, binary=True))
    assert lines[:2] == ["POST /v2/models/my%20model/infer HTTP/1.1", "Host: localhost:8000"]
    assert f"Content-Length: {len(body)}" in lines
    (size,) = (int(line.split(": ")[1]) for line in lines if line.startswith("Inference-Header-Content-Length"))
    assert json.loads(body[:size]) == json.loads(wanted[:json_size])
    assert body[size:] == wanted[json_size:]


@pytest.mark.parametrize("datatype", [kind for kind in DataType if kind not in (DataType.FP16, DataType.BF16)])
def test_json_requests_hold_the_values(datatype: DataType) -> None:
    (inputs,) = random_inputs(signature(datatype, 2, -1, 2), {"x": (2, 1, 2)}, count=1)
    lines, body = split(infer_request(ADDRESS, "m", inputs, binary=False))
    assert f"Content-Length: {len(body)}" in lines
    assert not any(line.startswith("Inference") for line in lines)
    (sent,) = json.loads(body)["inputs"]
    assert (sent["name"], sent["datatype"], sent["shape"]) == ("x", datatype.value, [2, 1, 2])
    decoded = decode_answer(json.dumps({"outputs": [sent]}).encode(), None)["x"]
    assert decoded.dtype == inputs["x"].dtype
    np.testing.assert_array_equal(decoded, inputs["x"])


@pytest.mark.parametrize("datatype", DataType)
def test_binary_answers_are_read_as_the_triton_client_reads_them(datatype: DataType) -> None:
    (inputs,) = random_inputs(signature(datatype, -1, 3), {"x": (2, 3)}, count=1)
    lines, body = split(infer_request(ADDRESS, "m", inputs, binary=True))
    size = int(lines[3].split(": ")[1])
    (tensor,) = json.loads(body[:size])["inputs"]
    mixed = {"name": "z", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]}
    head = json.dumps({"outputs": [mixed, tensor]}).encode()
    decoded = decode_answer(head + body[size:], len(head))
    np.testing.assert_array_equal(decoded["x"], inputs["x"])
    assert decoded["z"].tolist() == [b"a", "ü".encode()]
    theirs = InferResult.from_response_body(head + body[size:], header_length=len(head)).as_numpy("x")
    np.testing.assert_array_equal(theirs.astype(decoded["x"].dtype), decoded["x"])


def test_what_json_cannot_say_is_refused_with_the_way_out() -> None:
    for array in (np.float16([1]), np.array([1], DataType.BF16.dtype)):
        with pytest.raises(Unsupported, match=r"no JSON form .*--binary"):
            infer_request(ADDRESS, "m", {"x": array}, binary=False)
    for array in (np.float32([np.nan]), np.array([b"\xff"], np.object_)):
        with pytest.raises(InvalidData, match="--binary"):
            infer_request(ADDRESS, "m", {"x": array}, binary=False)


@pytest.mark.parametrize("binary", [False, True])
def test_a_request_carries_parameters(binary: bool) -> None:
    (inputs,) = random_inputs(signature(DataType.FP32, 2), {"x": (2,)}, count=1)
    lines, body = split(infer_request(ADDRESS, "m", inputs, binary=binary, parameters={"timeout": 50_000}))
    size = int(lines[3].split(": ")[1]) if binary else None
    assert json.loads(body[:size])["parameters"] == {"timeout": 50_000} | (
        {"binary_data_output": True} if binary else {}
    )


def test_an_answers_parameters_may_be_null() -> None:
    body = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":null,"data":[2.5]}]}'
    np.testing.assert_array_equal(decode_answer(body, None)["y"], np.float32([2.5]))


def test_bare_nan_in_an_answer_is_read() -> None:
    body = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[NaN,-Infinity]}]}'
    np.testing.assert_array_equal(decode_answer(body, None)["y"], np.float32([np.nan, -np.inf]))


@pytest.mark.parametrize(
    ("body", "json_size"),
    [
        (b"<html>", None),
        (b"[]", None),
        (b"{}", None),
        (b'{"outputs":[{"name":"y","datatype":"FP33","shape":[1],"data":[1]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[2],"data":[1]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":["a"]}]}', None),
        (b'{"outputs":[{"name":"y","datatype":"UINT8","shape":[1],"data":[999]}]}', None),
        (b'{"outputs":[]}extra', 14),
        (b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]}12', 92),
    ],
)
def test_what_is_no_answer_is_an_error(body: bytes, json_size: int | None) -> None:
    with pytest.raises(PenstockError, match="server's response"):
        decode_answer(body, json_size)


def test_random_inputs_have_the_given_shapes() -> None:
    found = Signature((TensorSpec("ids", DataType.INT64, (-1, -1)), TensorSpec("x", DataType.FP16, (-1, 4))), ())
    shapes = request_shapes(found, {"ids": (5, 7)}, 5)
    first, second = random_inputs(found, shapes, count=2)
    found.check(first)
    assert (first["ids"].shape, first["x"].shape) == ((5, 7), (5, 4))
    assert not np.array_equal(first["x"], second["x"])
    # Without the model, the number of ids is unknown; 0 and 1 are the most likely to be valid.
    assert set(np.unique(first["ids"])) <= {0, 1}


@pytest.mark.parametrize(
    ("shape", "given", "batch", "shapes"),
    [
        ((-1, 3), {}, None, (1, 3)),
        ((-1, 3), {}, 4, (4, 3)),
        ((2, 3), {}, 2, (2, 3)),
        ((1, 3), {}, 1, (1, 3)),
        ((), {}, None, ()),
        ((-1, -1), {"x": (2, 5)}, None, (2, 5)),
        ((-1, -1), {"x": (2, 5)}, 2, (2, 5)),
        ((7, -1), {"x": (7, 5)}, None, (7, 5)),
    ],
)
def test_shapes_of_a_request(
    shape: tuple[int, ...], given: dict[str, tuple[int, ...]], batch: int | None, shapes: tuple[int, ...]
) -> None:
    assert request_shapes(signature(DataType.FP32, *shape), given, batch) == {"x": shapes}


@pytest.mark.parametrize(
    ("shape", "given", "batch", "message"),
    [
        ((1, 3), {}, 2, "does not accept a batch of 2"),
        (
            (-1, 3, -1, -1),
            {},
            None,
            r"any size in dimension\(s\) 2, 3 .*--shape x=1,3,SIZE,SIZE; .*--data",
        ),
        ((-1, -1), {}, 4, r"--shape x=4,SIZE"),
        ((-1, 3), {"y": (1, 3)}, None, "names the input 'y'"),
        ((-1, 3), {"x": (1, 4)}, None, r"the shape \[1, 4\], but the model takes \[-1, 3\]"),
        ((-1, 3), {"x": (1,)}, None, r"the shape \[1\]"),
        ((-1, 3), {"x": (2, 3)}, 4, "2 rows, but --batch is 4"),
    ],
)
def test_no_size_is_invented(
    shape: tuple[int, ...], given: dict[str, tuple[int, ...]], batch: int | None, message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        request_shapes(signature(DataType.FP32, *shape), given, batch)
    assert re.search(message, f"{caught.value.message} {caught.value.hint}")


@pytest.mark.parametrize("binary", [False, True])
def test_infer_all_keeps_the_order(binary: bool) -> None:
    requests = [{"x": np.full((1, 3), number, np.float32)} for number in range(50)]

    async def main() -> tuple[Signature, list[dict[str, Array]]]:
        async with serving(double) as address:
            return await fetch_signature(address, "double"), await infer_all(address, "double", requests, binary=binary)

    found, outputs = run(main())
    assert found.inputs == (TensorSpec("x", DataType.FP32, (-1, 3)),)
    assert [output["y"][0, 0] for output in outputs] == [2 * number for number in range(50)]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("400 Bad", InvalidArgument),
        ("404 Not", NotFound),
        ("501 Not", Unsupported),
        ("503 Not", Unavailable),
        ("500 Bad", PenstockError),
    ],
)
def test_a_refusal_is_raised_with_the_servers_own_words(status: str, error: type[PenstockError]) -> None:
    async def main(call: Any) -> None:
        async with serving(answering(answer(b'{"error":"too bad"}', status))) as address:
            await call(address)

    inputs = [{"x": np.zeros(1, np.float32)}] * 20
    with pytest.raises(error, match=rf"'m' failed: HTTP {status[:3]}, too bad"):
        run(main(lambda address: infer_all(address, "m", inputs)))
    with pytest.raises(error, match=rf"does not describe model 'm': HTTP {status[:3]}, too bad"):
        run(main(lambda address: fetch_signature(address, "m")))


def test_metadata_that_is_none_is_an_error() -> None:
    async def main() -> None:
        async with serving(answering(answer(b"<html>hello</html>"))) as address:
            await fetch_signature(address, "m")

    with pytest.raises(PenstockError, match="Open Inference Protocol"):
        run(main())
