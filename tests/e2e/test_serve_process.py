"""``penstock serve`` as scripts and supervisors see it: its ready line, its end, its errors."""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import models
from http_servers import Client, get, post
from penstock.perf.http_client import Address
from penstock.perf.load import LoadWindow, closed_loop, run
from processes import PATIENCE_S, ServerProcess

LOOPS = ["asyncio", "uvloop"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    return path


def infer(value: int) -> bytes:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [value, 0, 0]}
    return post(json.dumps({"id": str(value), "inputs": [tensor]}).encode(), path="/v2/models/linear/infer")


def test_the_ready_line(model: Path) -> None:
    with ServerProcess(model) as server:
        pattern = r"ready http={}:{} grpc=127\.0\.0\.1:\d+ metrics=127\.0\.0\.1:\d+ models=linear".format(
            *server.address
        )
        assert re.fullmatch(pattern, server.line)
    with ServerProcess(model, arguments=("--json",)) as server:
        facts = json.loads(server.line)
        assert facts["models"] == ["linear"]
        assert facts["http"].startswith("127.0.0.1:")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_everything_sent_before_the_signal_is_answered(model: Path, loop: str, number: signal.Signals) -> None:
    with ServerProcess(model, event_loop=loop, shutdown_grace_s=0.3) as server:
        clients = [Client(server.address) for _ in range(8)]
        assert all(client.ask(get("/v2/health/ready")).status == 200 for client in clients)
        for n, client in enumerate(clients):
            client.send(b"".join(infer(8 * n + i) for i in range(8)))
        server.signal(number)
        for n, client in enumerate(clients):
            answers = [client.read() for _ in range(8)]
            assert [json.loads(answer.body)["id"] for answer in answers] == [str(8 * n + i) for i in range(8)]
            with client:
                assert client.is_closed
        assert server.end() == (0, "")


@pytest.mark.parametrize("loop", LOOPS)
def test_no_request_is_dropped_by_a_server_that_ends_under_load(model: Path, loop: str) -> None:
    """A client that reconnects after each last response gets a response or a refused connection."""
    with ServerProcess(model, event_loop=loop, shutdown_grace_s=0.2) as server:

        def end_after_some(index: int, body: bytes, json_size: int | None) -> bool:
            nonlocal answered
            answered += 1
            if answered == 200:
                server.signal(signal.SIGTERM)
            return True

        answered = 0
        window = LoadWindow(duration_s=1.2, warmup_s=0)
        result = run(closed_loop(Address(*server.address), [infer(1)], 16, window, end_after_some))
        assert answered >= 200
        assert set(result.errors_by_kind) <= {"no connection"}
        assert server.end() == (0, "")


@pytest.mark.parametrize("loop", LOOPS)
def test_readiness_goes_first_and_a_second_signal_stops_at_once(model: Path, loop: str) -> None:
    with ServerProcess(model, event_loop=loop, shutdown_grace_s=600) as server:
        server.signal(signal.SIGTERM)
        status = 200
        while status == 200:
            with Client(server.address) as client:
                answer = client.ask(get("/v2/health/ready"))
                status = answer.status
        assert status == 400
        assert answer.headers["connection"] == "close"
        with Client(server.address) as client:
            assert client.ask(infer(1)).status == 200, "what still comes in is answered"
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 1
        assert "Traceback" not in errors


def test_a_request_larger_than_what_is_merged_runs_alone(model: Path) -> None:
    def ask(rows: int) -> bytes:
        tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": [1] * 3 * rows}
        return post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/linear/infer")

    with (
        ServerProcess(model, arguments=("--max-batch", "1"), max_request_rows=4) as server,
        Client(server.address) as client,
    ):
        assert json.loads(client.ask(ask(4)).body)["outputs"][0]["shape"][0] == 4
        refused = client.ask(ask(5))
        assert (refused.status, "batch-size must be <= 4 for 'linear'" in refused.error) == (400, True)


HANGING = """
import sys, threading
from penstock.errors import PenstockError
from penstock.online.repository.loading import loader
from penstock.online.repository.loading.loader import LoadedVersion
from penstock.online.repository.loading.warm_up import effective_config
from penstock.online.server import app
from penstock.online.server.config import ServerConfig
from penstock.testing import FakeModel

def warm(source, model):
    return LoadedVersion(source, (model,), effective_config(source, [model], 8))

def hang(inputs):
    print("entered", flush=True)
    threading.Event().wait()

class Told(FakeModel):
    def unload(self):
        print("unloaded", flush=True)

def slow(source):
    print("entered", flush=True)
    sys.stdin.readline()
    return warm(source, Told())

drain_timeout_s = 0.1
if sys.argv[1] == "load":
    loader.load = hang
elif sys.argv[1] == "slow load":
    loader.load = slow
    drain_timeout_s = 30
else:
    loader.load = lambda source: warm(source, FakeModel(forward=hang))
config = ServerConfig(http_port=0, event_loop=sys.argv[2], shutdown_grace_s=0, drain_timeout_s=drain_timeout_s)
try:
    app.serve(config, [sys.argv[3]], lambda ready: print(ready.http, flush=True))
except PenstockError as error:
    sys.exit(str(error))
"""


def hanging(where: str, loop: str, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANGING, where, loop, str(model)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_model_that_hangs_does_not_keep_the_server(model: Path, loop: str) -> None:
    with hanging("forward", loop, model) as process:
        try:
            assert process.stdout
            host, _, port = process.stdout.readline().strip().partition(":")
            with Client((host, int(port))) as client:
                tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 0]}
                client.send(post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/linear/infer"))
                assert process.stdout.readline() == "entered\n"
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "a model was still running after the 0.1 s drain timeout; the server exited without waiting" in errors
    assert "Traceback" not in errors


def test_a_model_that_hangs_while_it_is_loaded_does_not_keep_the_server(model: Path) -> None:
    with hanging("load", "asyncio", model) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "entered\n"
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert errors.count("model 'linear' was still being loaded after the 0.1 s drain timeout") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("loop", LOOPS)
def test_a_server_that_is_to_end_while_it_loads_loads_that_model_to_the_end(model: Path, loop: str) -> None:
    with hanging("slow load", loop, model) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "entered\n"
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate("go on\n", timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, output, errors) == (0, "unloaded\n", "")


def fails(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, message = fails(str(model), "--http-port", port)
    assert code == 6
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert "choose another --http-port" in message


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine(model: Path, monkeypatch: pytest.MonkeyPatch, loop: str, host: str) -> None:
    monkeypatch.setenv("PENSTOCK_SERVER_EVENT_LOOP", loop)
    code, message = fails(str(model), "--host", host)
    assert code == 6
    assert f"cannot listen on {host}:8000" in message
    assert "--host must be an address of this machine" in message
    assert "--http-port" not in message


def test_targets_that_cannot_be_served(model: Path, tmp_path: Path) -> None:
    (tmp_path / "corrupt.onnx").write_bytes(b"nothing")
    (tmp_path / "model.txt").write_text("text")
    for arguments, code, message in [
        ((str(tmp_path / "absent.onnx"),), 3, "no model or bundle"),
        ((str(tmp_path / "corrupt.onnx"), "--http-port", "0"), 2, "refuses the model"),
        ((str(tmp_path / "model.txt"),), 2, "'model.txt' is a text, not a model"),
        ((str(model), str(model)), 8, "two targets are called 'linear'"),
        ((str(model), "--max-batch", "0"), 2, "'max_batch' from the flag"),
    ]:
        failed_with, said = fails(*arguments)
        assert failed_with == code
        assert message in said
