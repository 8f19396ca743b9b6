"""What the tests of the dialects serve: models with and without batches, texts, halves, classes, versions and labels."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from handles import make_handle
from http_servers import PATIENCE_S, Answer, Client, GatedServer, get, post
from penstock.tensor import Array, DataType, Signature, TensorSpec
from penstock.testing import FakeModel

FP32, FP16, INT64, BYTES = DataType.FP32, DataType.FP16, DataType.INT64, DataType.BYTES
Specs = list[tuple[str, DataType, tuple[int, ...]]]


def _model(inputs: Specs, outputs: Specs, forward: Any) -> FakeModel:
    specs = [tuple(TensorSpec(*one) for one in some) for some in (inputs, outputs)]
    return FakeModel(Signature(*specs), forward)


def _pair(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"y": inputs["x"] + 1, "z": inputs["n"] * 2}


def _classify(inputs: Mapping[str, Array]) -> dict[str, Array]:
    age = inputs["age"]
    return {"scores": np.concatenate([age, 1 - age], 1)}


def _plus(number: float) -> Any:
    return lambda inputs: {"y": inputs["x"] / 2 + np.float32(number)}


def _models() -> dict[str, FakeModel]:
    vector: Specs = [("x", FP32, (-1,))]
    return {
        "half_plus_two": _model(vector, [("y", FP32, (-1,))], _plus(2)),
        "pair": _model([("x", FP32, (-1, 2)), ("n", INT64, (-1,))], [("y", FP32, (-1, 2)), ("z", INT64, (-1,))], _pair),
        "words": _model(
            [("t", BYTES, (-1, 1))],
            [("s", BYTES, (-1, 1)), ("s_bytes", BYTES, (-1, 1))],
            lambda inputs: {"s": inputs["t"], "s_bytes": inputs["t"]},
        ),
        "halves": _model([("x", FP16, (-1, 2))], [("y", FP16, (-1, 2))], lambda inputs: {"y": inputs["x"]}),
        "same": _model([("x", FP32, (-1, -1))], [("y", FP32, (-1, -1))], lambda inputs: {"y": inputs["x"]}),
        "ages": _model([("age", FP32, (-1, 1))], [("scores", FP32, (-1, 2))], _classify),
        "prices": _model(
            [("age", FP32, (-1, 1))], [("price", FP32, (-1, 1))], lambda inputs: {"price": inputs["age"] * 10}
        ),
    }


@contextmanager
def dialect_server(**config: Any) -> Iterator[GatedServer]:
    """A server with ``m`` (doubles), those above, ``plain`` (without batches) and ``many`` (versions 1 and 2, with labels)."""
    with GatedServer(also=_models(), **config) as server:
        server.call(lambda: _add(server))
        yield server


def _add(server: GatedServer) -> None:
    plain = _model(
        [("p", FP32, (3,))],
        [("sum", FP32, ()), ("q", FP32, (3,))],
        lambda inputs: {"sum": inputs["p"].sum(), "q": inputs["p"] * 2},
    )
    labels = {"parameters": {"version_labels": {"string_value": "stable:1, canary:2,gone:7"}}}
    vector: Specs = [("x", FP32, (-1,))]
    handles = [make_handle(plain, "plain", max_batch=None)]
    for version in ("1", "2"):
        model = _model(vector, [("y", FP32, (-1,))], _plus(int(version)))
        handles.append(make_handle(model, "many", version, settings=labels))
    for handle in handles:
        handle.start()
        server.repository.add(handle)
    server.repository.find("ages").labels = {"scores": ["old"]}


def ask(client: Client, path: str, body: Any = None, method: str = "", headers: str = "") -> Answer:
    """GET without a body, else POST; what is not bytes becomes JSON."""
    if body is None:
        return client.ask(get(path, headers, method=method or "GET"))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = post(data, headers, path)
    return client.ask(request.replace(b"POST", method.encode(), 1) if method else request)


def wait_for(server: GatedServer, pending: int) -> None:
    """Until model ``m`` has so many requests unanswered."""
    deadline = time.monotonic() + PATIENCE_S
    while server.call(lambda: server.repository.find("m").statistics.pending) != pending:
        assert time.monotonic() < deadline


def read(answer: Answer, status: int = 200) -> Any:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)
