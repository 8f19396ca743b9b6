"""``penstock serve`` with models whose loading never ends: it can be shut down, and the other models are served."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import models
from http_servers import Client, post
from processes import ServerProcess

HUNG_MODEL = """
import sys, threading

class TritonPythonModel:
    def initialize(self, args):
        print("the load hangs", file=sys.stderr, flush=True)
        threading.Event().wait()

    def execute(self, requests):
        return []
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
QUICK = {"drain_timeout_s": 0.3, "shutdown_grace_s": 0}


def write_endless(folder: Path) -> str:
    """A model whose warm-up never ends; returns the log message that precedes the warm-up."""
    folder.joinpath("model.onnx").write_bytes(models.endless_on_zeros().data)
    return "requests to model 'hung' are not merged"


def write_python(folder: Path) -> str:
    """A Python model whose ``initialize`` never ends."""
    folder.joinpath("model.py").write_text(HUNG_MODEL)
    folder.parent.joinpath("config.pbtxt").write_text(CONFIG)
    return "the load hangs"


def await_lines(server: ServerProcess, text: str, count: int) -> str:
    """Read the log until ``text`` has appeared ``count`` times."""
    assert server.process.stderr is not None
    read = ""
    while read.count(text) < count:
        line = server.process.stderr.readline()
        assert line, read
        read += line
    return read


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("write", [write_endless, write_python])
def test_a_server_ends_while_a_model_is_still_being_loaded(
    tmp_path: Path, write: Callable[[Path], str], processes: int, signals: int
) -> None:
    folder = tmp_path / "hung" / "1"
    folder.mkdir(parents=True)
    (tmp_path / "good" / "1").mkdir(parents=True)
    (tmp_path / "good" / "1" / "model.onnx").write_bytes(models.linear().data)
    sign = write(folder)
    repository = ("--model-repository", str(tmp_path), "--processes", str(processes))
    with ServerProcess(arguments=repository, wait=False, **QUICK) as server:
        begun = await_lines(server, sign, processes)
        for _ in range(signals):
            server.signal(signal.SIGTERM)
        code, rest = server.end()
    errors = begun + rest
    assert "Traceback" not in errors
    if signals == 2:
        return  # the second signal may end it at once, with code 1
    assert code == 0, errors
    ends = errors.count("model 'hung' was still being loaded") + errors.count("loading of model 'hung' was ended")
    assert ends == processes, errors


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_never_ends_its_warm_up_is_served_cold(tmp_path: Path, processes: int) -> None:
    for name, artifact in (("endless", models.endless_on_zeros()), ("linear", models.linear())):
        (tmp_path / f"{name}.onnx").write_bytes(artifact.data)
    with ServerProcess(*sorted(tmp_path.iterdir()), processes=processes) as server, Client(server.address) as client:
        for name, columns in (("endless", 2), ("linear", 3)):
            tensor = {"name": "x", "shape": [1, columns], "datatype": "FP32", "data": [1] * columns}
            body = json.dumps({"inputs": [tensor]}).encode()
            assert client.ask(post(body, path=f"/v2/models/{name}/infer")).status == 200
        server.signal(signal.SIGTERM)
        code, errors = server.end()
    assert code == 0
    assert (
        errors.count("model 'endless' is served without warm-up: it rejects a guessed batch of 1 zero rows")
        == processes
    )
    assert "describe a valid request in 'model_warmup'" in errors
    assert "Traceback" not in errors
