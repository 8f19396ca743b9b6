"""A model on a server, called from threads, against a real HTTP server."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidArgument, NotFound, PenstockError, Unavailable, WrongResult
from penstock.offloading.server import ServedModel
from penstock.perf.http_client import Address
from penstock.tensor import DataType, Signature, TensorSpec
from servers import Request, answer, answering, double, serving_in_thread

_SIGNATURE = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), (TensorSpec("y", DataType.FP32, (-1, 3)),))
_X = np.arange(3, dtype=np.float32)[None]


def _started(address: Address, name: str = "double") -> ServedModel:
    served = ServedModel(address, name, 30)
    served.start()
    return served


@pytest.fixture
def served() -> Iterator[ServedModel]:
    with serving_in_thread(double) as address:
        model = _started(address)
        yield model
        model.close()


def test_the_signature_is_the_servers(served: ServedModel) -> None:
    assert served.signature().input_names == ["x"]


def test_threads_share_the_model(served: ServedModel) -> None:
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(lambda k: served.infer({"x": _X * k}).result(), k) for k in range(40)]
    for k, future in enumerate(futures):
        np.testing.assert_array_equal(future.result()["y"], _X * k * 2)


def test_errors_are_those_of_the_protocol() -> None:
    refusal = answering(answer(b'{"error":"wrong shape"}', "400 Bad Request"))
    with serving_in_thread(refusal) as address:
        model = _started(address)
        with pytest.raises(InvalidArgument, match="wrong shape"):
            model.infer({"x": _X}).result()
        model.close()
    with serving_in_thread(double) as address:
        model = _started(address, "triple")
        with pytest.raises(NotFound, match="unknown model"):
            model.signature()
        model.close()


def test_a_server_that_hangs_up_is_unavailable() -> None:
    async def hang_up(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with serving_in_thread(hang_up) as address:
        model = _started(address)
        with pytest.raises(Unavailable):
            model.infer({"x": _X}).result()
        model.close()


def test_close_cancels_what_runs() -> None:
    async def silent(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with serving_in_thread(silent) as address:
        model = _started(address)
        future = model.infer({"x": _X})
        model.close()
        assert future.cancelled()
        model.close()


def _outputs(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"model_name": "double", "outputs": [*entries]}).encode()


_Y = {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [0, 2, 4]}
_HOSTILE = {
    "another shape": (_outputs({**_Y, "shape": [3, 1]}), WrongResult, r"'y' is float32 \[3, 1\], not FP32 \[-1, 3\]"),
    "another datatype": (_outputs({**_Y, "datatype": "FP64"}), WrongResult, "'y' is float64"),
    "no output": (_outputs(), WrongResult, "'y' is missing"),
    "a shape without data": (_outputs({**_Y, "shape": [1 << 40, 3]}), PenstockError, "response is invalid"),
    "no shape": (_outputs({**_Y, "shape": [-1, 3]}), PenstockError, "is invalid|is float32"),
    "text": (_outputs({**_Y, "data": ["a", "b", "c"]}), PenstockError, "response is invalid"),
    "no JSON": (b"<html>", PenstockError, "response is invalid"),
    "deep JSON": (b"[" * 100_000, PenstockError, "response is invalid"),
    "a negative size": (
        _outputs({**_Y, "parameters": {"binary_data_size": -12}}),
        PenstockError,
        "response is invalid|bytes after",
    ),
}


@pytest.mark.parametrize("kind", sorted(_HOSTILE))
def test_answers_that_do_not_fit_are_errors(kind: str) -> None:
    body, error, words = _HOSTILE[kind]
    with serving_in_thread(answering(answer(body))) as address:
        model = ServedModel(address, "double", 30, _SIGNATURE)
        model.start()
        with pytest.raises(error, match=words):
            model.infer({"x": _X}).result()
        model.close()


def test_outputs_that_nobody_expects_are_left_out() -> None:
    body = _outputs({**_Y, "name": "z"}, _Y)
    with serving_in_thread(answering(answer(body))) as address:
        model = ServedModel(address, "double", 30, _SIGNATURE)
        model.start()
        outputs = model.infer({"x": _X}).result()
        assert (list(outputs), outputs["y"].tolist()) == (["y"], [[0, 2, 4]])
        model.close()


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (f"HTTP/1.1 200 OK\r\nContent-Length: {1 << 40}\r\n\r\n", "the answer is too large"),
        (f"HTTP/1.1 200 OK\r\nContent-Length: {'9' * 5000}\r\n\r\n", "unreadable answer"),
        ("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "HTTP 302"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "connection dropped"),
        ("HTTP/1.1 200 OK\r\nX: " + "a" * 100_000, "unreadable answer"),
    ],
    ids=["huge", "digits", "redirect", "cut", "endless head"],
)
def test_hostile_heads_are_errors(head: str, words: str) -> None:
    async def hostile(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(head.encode())
        await writer.drain()
        writer.close()

    with serving_in_thread(hostile) as address:
        model = ServedModel(address, "double", 30, _SIGNATURE)
        model.start()
        with pytest.raises(PenstockError, match=words):
            model.infer({"x": _X}).result()
        model.close()
