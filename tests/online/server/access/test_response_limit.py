from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_servers import GatedServer, post
from penstock.online.server.access.response_limit import ResponseLimit, ResponseTooLarge
from penstock.online.server.answer_form import TEXT
from penstock.online.server.grpc.encoder import GrpcAnswerEncoder
from penstock.online.server.http.codec.encoder import HttpAnswerEncoder
from penstock.online.server.http.codec.json_tensor import to_json
from penstock.online.server.to_thread import finish
from penstock.request import InferResponse
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel

_KINDS = st.sampled_from(["u1", "i8", "f2", "f4", "f8", "?", "O"])


def _array(kind: str, size: int, seed: int) -> Array:
    drawn = np.random.default_rng(seed).integers(0, 1 << 40, size)
    if kind == "O":
        texts = np.empty(size, np.object_)
        texts[:] = [b"x" * int(one % 50) for one in drawn]
        return texts
    return (drawn % 60_000 / 7).astype(kind) if kind[0] == "f" else drawn.astype(kind)


@given(_KINDS, st.sampled_from([1, 100, 5_000, 40_000]), st.integers(0, 99), st.integers(1, 1 << 20))
def test_no_text_that_fits_is_refused_and_none_that_is_far_too_large_is_encoded(
    kind: str, size: int, seed: int, limit: int
) -> None:
    array = _array(kind, size, seed)
    text = to_json("y", array.astype("f4") if kind == "f2" else array)
    try:
        ResponseLimit(limit).check_text({"y": array})
    except ResponseTooLarge:
        assert len(text) > limit
    else:
        assert len(text) <= 1.6 * limit + 2


@given(_KINDS.filter(lambda kind: kind != "f2"), st.integers(0, 9_000), st.integers(0, 99), st.integers(-2, 2))
def test_the_limit_is_exact_for_every_protocol(kind: str, size: int, seed: int, over: int) -> None:
    response = InferResponse("m", "1", {"y": _array(kind, size, seed)})
    http = finish(HttpAnswerEncoder().in_steps(response, TEXT))
    for encode, parts in (
        (lambda limit: finish(HttpAnswerEncoder(limit).in_steps(response, TEXT)), http[2]),
        (lambda limit: GrpcAnswerEncoder(limit)(response, TEXT), GrpcAnswerEncoder()(response, TEXT) or []),
    ):
        whole = sum(map(len, parts))
        if whole < 5_000:
            continue  # small messages are not counted
        if over > 0:
            with pytest.raises(ResponseTooLarge, match=r"output 'y' has the shape \[") as caught:
                encode(ResponseLimit(whole - over))
            assert f"may have at most {whole - over}" in caught.value.message
        else:
            encode(ResponseLimit(whole - over))


def _wide() -> FakeModel:
    signature = Signature((TensorSpec("x", DataType.FP32, (-1, 1)),), (TensorSpec("y", DataType.FP32, (-1, -1)),))
    return FakeModel(signature, lambda inputs: {"y": np.full((1, int(inputs["x"][0, 0])), 1.25, np.float32)})


def _requests(size: int) -> list[tuple[str, Any]]:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [size]}
    binary = {"outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    return [
        ("/v2/models/wide/infer", {"inputs": [tensor]}),
        ("/v2/models/wide/infer", {"id": "a", "inputs": [tensor]}),
        ("/v2/models/wide/infer", {"inputs": [tensor], "parameters": {"binary_data_output": True}}),
        ("/v2/models/wide/infer", {"inputs": [tensor], **binary}),
        ("/v2/models/wide/generate", {"x": size}),
        ("/v1/models/wide:predict", {"instances": [[size]]}),
        ("/predictions/wide", [size]),
    ]


def test_every_route_refuses_what_is_too_large_and_goes_on() -> None:
    with GatedServer(also={"wide": _wide()}, max_response_bytes=90_000) as server:
        client = server.connect()
        for path, body in _requests(50_000):
            answer = client.ask(post(json.dumps(body).encode(), path=path))
            assert answer.status == 413, path
            assert "retry-after" not in answer.headers
            assert b"output 'y' has the shape [1, 50000]" in answer.body
            assert b"max_response_bytes" in answer.body
        for path, body in _requests(17_000):
            answer = client.ask(post(json.dumps(body).encode(), path=path))
            assert answer.status == 200, path
            assert 68_000 <= len(answer.body) <= 90_000
