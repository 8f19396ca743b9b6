"""``penstock serve`` with clients that remove their shared memory: the server keeps running, and its error names the region."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import models
from http_servers import Answer, Client, get, post
from penstock.tensor import DataType
from processes import ServerProcess

SIZES = (4 << 10, 1 << 20, 4 << 20)
"""Tensors that the event loop copies at once, at most, and that a thread copies."""
ROUNDS = 150


@pytest.fixture
def region() -> Iterator[Path]:
    """An object of ours alone, as clients create it."""
    path = Path("/dev/shm", f"penstock-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(2 * max(SIZES)))
    path.chmod(0o600)
    yield path
    path.unlink()


def infer(size: int) -> bytes:
    """The identity of ``size`` bytes in the region, to the bytes after them."""
    place = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    tensor = {"name": "x", "shape": [1, size // 4], "datatype": "FP32", "parameters": place}
    output = {"name": "y", "parameters": place | {"shared_memory_offset": size}}
    return post(json.dumps({"inputs": [tensor], "outputs": [output]}).encode(), path="/v2/models/pair/infer")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_region_truncated_under_load_is_an_error_that_names_it(tmp_path: Path, region: Path, isolation: str) -> None:
    target = tmp_path / "pair.onnx"
    value = (DataType.FP32.onnx, ["N", "M"])
    target.write_bytes(models.artifact([("Identity", ["x"], ["y"])], [("x", *value)], [("y", *value)]).data)
    with ServerProcess(target, arguments=("--json",), isolation=isolation) as server:
        host, _, port = json.loads(server.line)["http"].rpartition(":")
        address, answers, is_over = (host, int(port)), list[Answer](), threading.Event()

        def load(size: int) -> None:
            with Client(address) as client:
                while not is_over.is_set():
                    answers.append(client.ask(infer(size)))

        with Client(address) as client:
            about = {"key": region.name, "offset": 0, "byte_size": 2 * max(SIZES)}
            register = post(json.dumps(about).encode(), path="/v2/systemsharedmemory/region/r/register")
            assert client.ask(register).status == 200
            threads = [threading.Thread(target=load, args=(size,)) for size in SIZES]
            for thread in threads:
                thread.start()
            for number in range(ROUNDS):
                os.truncate(region, 0 if number % 2 else 2 * max(SIZES))
                assert client.ask(get("/v2/health/live")).status == 200
            is_over.set()
            for thread in threads:
                thread.join()
            os.truncate(region, 0)
            answers += [client.ask(infer(size)) for size in SIZES]
            assert client.ask(get("/v2/health/ready")).status == 200
        refused = [answer for answer in answers if answer.status != 200]
        assert len(refused) >= len(SIZES)
        for answer in refused:
            assert answer.status == 400
            assert b"shared memory region 'r' is smaller than at its registration" in answer.body
        assert server.process.poll() is None
