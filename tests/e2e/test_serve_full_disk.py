"""``penstock serve`` with a full disk: it continues to answer requests, and shuts down normally."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

import models
from http_servers import Client, get, post
from processes import ServerProcess

REQUESTS = 50


@pytest.mark.parametrize("logs", ["file", "device"])
def test_what_cannot_be_written_stops_neither_answers_nor_the_end(tmp_path: Path, logs: str) -> None:
    """A file-size limit of 0 bytes makes every later write fail, as a full disk does."""
    target = tmp_path / "linear.onnx"
    target.write_bytes(models.linear().data)
    files = {"log_file": "/dev/full", "access_log": "/dev/full"}
    if logs == "file":
        files = {name: str(tmp_path / name) for name in files}
    more = {"trace_file": str(tmp_path / "traces"), "warmup_folder": str(tmp_path / "requests"), "warmup_record": 8}
    traced = {"trace_level": "TIMESTAMPS", "trace_rate": 1, "log_verbose_level": 1}
    with ServerProcess(target, arguments=("--json",), **files, **more, **traced) as server:
        host, _, port = json.loads(server.line)["http"].rpartition(":")
        with Client((host, int(port))) as client:
            tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
            infer = post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/linear/infer")
            assert client.ask(infer).status == 200
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            for _ in range(REQUESTS):
                assert client.ask(infer).status == 200
            assert client.ask(get("/v2/health/ready")).status == 200
        server.signal(signal.SIGTERM)
        code, errors = server.end()
    assert code == 0, errors
    assert "Traceback" not in errors
    assert errors.count("\n") < REQUESTS, "one line for each file, not for each record"
