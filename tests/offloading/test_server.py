"""A model on a server, called from threads, against a real HTTP server."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.errors import InvalidArgument, NotFound, Unavailable
from penstock.offloading.server import ServedModel
from penstock.perf.http_client import Address
from servers import Request, answer, answering, double, serving_in_thread

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
