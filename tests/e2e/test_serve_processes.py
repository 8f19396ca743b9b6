"""``penstock serve --processes N``: one server to its clients, whichever process has their connection."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

import models
from http_servers import Client, get, post
from processes import PATIENCE_S, ServerProcess

COUNT = 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    return path


def infer(value: int) -> bytes:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [value, 0, 0]}
    return post(json.dumps({"id": str(value), "inputs": [tensor]}).encode(), path="/v2/models/linear/infer")


def children(server: ServerProcess) -> set[int]:
    """The server's processes but for the supervisor, as the kernel knows them."""
    pid = server.process.pid
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize("shared_memory", ["true", "false"])
def test_the_statistics_are_of_all_processes_and_they_end_together(model: Path, shared_memory: str) -> None:
    with ServerProcess(model, processes=COUNT, allow_client_shm=shared_memory) as server:
        assert server.line.startswith("ready ")
        assert len(children(server)) == COUNT
        for value in range(16):
            with Client(server.address) as client:
                assert json.loads(client.ask(infer(value)).body)["id"] == str(value)
        with Client(server.address) as client:
            (statistics,) = json.loads(client.ask(get("/v2/models/linear/stats")).body)["model_stats"]
        assert statistics["inference_stats"]["success"]["count"] == 16
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "")


def test_a_process_that_dies_is_started_again_and_the_others_go_on(model: Path) -> None:
    with ServerProcess(model, processes=COUNT) as server:
        before = children(server)
        victim = max(before)
        os.kill(victim, signal.SIGKILL)
        end = time.monotonic() + PATIENCE_S
        while victim in (now := children(server)) or len(now) < COUNT:
            assert time.monotonic() < end
        assert before - {victim} < now
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert "ended with signal 9; it is started again" in errors
        assert code == 0
