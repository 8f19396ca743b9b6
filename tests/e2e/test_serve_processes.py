"""``penstock serve --processes N``: clients see one server, regardless of the process that has their connection."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from h2_servers import Peer
from http_servers import Client, get, post
from penstock.protocol import messages
from processes import PATIENCE_S, ServerProcess

COUNT = 2
LISTEN = "0A"
"""How /proc/net/tcp says it."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    return path


def infer(value: int) -> bytes:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [value, 0, 0]}
    return post(json.dumps({"id": str(value), "inputs": [tensor]}).encode(), path="/v2/models/linear/infer")


def children(server: ServerProcess) -> set[int]:
    """The kernel's ids of the server's processes, without the supervisor."""
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
        assert "ended with signal 9; it restarts in" in errors
        assert code == 0


# Clients do not choose a process: with this many connections each has some, but for one time in 2 ** (CONNECTIONS - 1).
CONNECTIONS = 24


def start(*targets: Path, **settings: object) -> ServerProcess:
    return ServerProcess(*targets, arguments=("--json",), processes=COUNT, **settings)


def address(server: ServerProcess, name: str = "http") -> tuple[str, int]:
    host, _, port = json.loads(server.line)[name].rpartition(":")
    return host, int(port)


@contextmanager
def crowd(server: ServerProcess, name: str = "http") -> Iterator[list[Client]]:
    """Connected clients, with some on each process."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address(server, name))) for _ in range(CONNECTIONS)]
        for client in clients:
            assert client.ask(get("/v2/health/live" if name == "http" else "/metrics")).status == 200
        yield clients


def ask(client: Client, path: str, body: object = None) -> Any:
    answer = client.ask(get(path) if body is None else post(json.dumps(body).encode(), path=path))
    assert answer.status == 200, answer.body
    return json.loads(answer.body or b"null")


def restarted(server: ServerProcess, victim: int) -> None:
    """Kill a process, and return once its replacement answers."""
    os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + PATIENCE_S
    while victim in (now := children(server)) or len(now) < COUNT:
        assert time.monotonic() < end
    while listeners(address(server)[1]) < COUNT:
        assert time.monotonic() < end


def listeners(port: int) -> int:
    """How many sockets listen on ``port``: each process has its own."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == LISTEN for row in rows)


SLOW_AGAIN = """
import os, sys, time
from penstock.online.repository.loading import loader
from penstock.online.repository.loading.loader import LoadedVersion, ResolvedVersion
from penstock.online.repository.loading.warm_up import effective_config
from penstock.online.server import app
from penstock.online.server.config import ServerConfig
from penstock.testing import FakeModel

loaded, go = sys.argv[2:]

def warm(source, model):
    return LoadedVersion(source, (model,), effective_config(source, [model], 8))

def load(source):
    if os.path.exists(loaded):
        while not os.path.exists(go):
            time.sleep(0.01)
    return warm(source, FakeModel())

def on_ready(ready):
    open(loaded, "w").close()
    print(ready.http, flush=True)

loader.load = load
ResolvedVersion.has_own_threads = property(lambda source: True)
app.serve(ServerConfig(http_port=0, processes=2, shutdown_grace_s=0), [sys.argv[1]], on_ready)
"""


def test_nobody_waits_for_a_process_that_is_being_started_again(model: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = [sys.executable, "-c", SLOW_AGAIN, str(model), str(tmp_path / "loaded"), str(go)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            host, _, port = process.stdout.readline().strip().rpartition(":")
            tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
            request = post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/linear/infer")
            folder = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            before = set(folder.read_text().split())
            victim = min(before)
            os.kill(int(victim), signal.SIGKILL)
            while victim in (now := set(folder.read_text().split())) or len(now) < COUNT:
                pass
            for _ in range(CONNECTIONS):
                with Client((host, int(port))) as client:
                    assert client.ask(request).data == [2, 4]
            assert listeners(int(port)) == 1
            go.touch()
            while listeners(int(port)) < COUNT:
                pass
            for _ in range(CONNECTIONS):
                with Client((host, int(port))) as client:
                    assert client.ask(request).data == [2, 4]
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors


def test_both_protocols_are_spoken_by_all_and_their_metrics_are_one_page(model: Path) -> None:
    request = messages.ModelInferRequest(model_name="linear")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    request.raw_input_contents.append(bytes(12))
    data = request.SerializeToString()
    with start(model) as server, crowd(server) as clients, crowd(server, "metrics") as scrapers:
        for value, client in enumerate(clients):
            assert json.loads(client.ask(infer(value)).body)["id"] == str(value)
        for _ in range(CONNECTIONS):
            with Peer(address(server, "grpc")) as peer:
                peer.greet()
                answer = peer.ask(1, data, path="/inference.GRPCInferenceService/ModelInfer")
                assert answer.status == 0
        line = f'nv_inference_request_success{{model="linear",version="1"}} {2 * CONNECTIONS}'
        pages = [scraper.ask(get("/metrics")).body.decode().splitlines() for scraper in scrapers]
        for page in pages:
            assert line in page
        for client in clients:
            (statistics,) = ask(client, "/v2/models/linear/stats")["model_stats"]
            assert statistics["inference_stats"]["success"]["count"] == 2 * CONNECTIONS
            assert statistics["inference_count"] == 2 * CONNECTIONS


def test_what_one_process_is_told_all_know_and_one_started_later_too(model: Path) -> None:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32"}
    tensor["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    x = np.array([[1, 2, 3]], np.float32)
    memory = SharedMemory(create=True, size=4096)
    try:
        memory.buf[:12] = x.tobytes()
        with start(model) as server:

            def check() -> None:
                with crowd(server) as clients:
                    for client in clients:
                        answer = ask(client, "/v2/models/linear/infer", {"inputs": [tensor]})
                        np.testing.assert_allclose(
                            answer["outputs"][0]["data"], (x @ models.linear_weight())[0], rtol=1e-5
                        )
                        assert ask(client, "/v2/models/linear/trace/setting")["trace_rate"] == "77"
                        assert ask(client, "/v2/logging")["log_verbose_level"] == 1

            with Client(address(server)) as client:
                region = {"key": f"/{memory.name}", "offset": 0, "byte_size": 4096}
                ask(client, "/v2/systemsharedmemory/region/r/register", region)
                ask(client, "/v2/models/linear/trace/setting", {"trace_rate": "77"})
                ask(client, "/v2/logging", {"log_verbose_level": 1})
            check()
            restarted(server, min(children(server)))
            check()
            with Client(address(server)) as client:
                ask(client, "/v2/systemsharedmemory/region/r/unregister", {})
            with crowd(server) as clients:
                assert [ask(client, "/v2/systemsharedmemory/status") for client in clients] == [[]] * CONNECTIONS
    finally:
        memory.close()
        memory.unlink()


def test_what_a_process_has_counted_outlives_it(model: Path) -> None:
    with start(model) as server:
        with crowd(server) as clients:
            for value, client in enumerate(clients):
                client.ask(infer(value))
            (found,) = ask(clients[0], "/v2/models/linear/stats")["model_stats"]
            assert found["inference_stats"]["success"]["count"] == CONNECTIONS
        for victim in children(server):
            restarted(server, victim)
            with crowd(server) as clients, crowd(server, "metrics") as scrapers:
                for client in clients:
                    (found,) = ask(client, "/v2/models/linear/stats")["model_stats"]
                    assert found["inference_stats"]["success"]["count"] == CONNECTIONS
                line = f'nv_inference_request_success{{model="linear",version="1"}} {CONNECTIONS}'
                for scraper in scrapers:
                    assert line in scraper.ask(get("/metrics")).body.decode().splitlines()


def test_connections_of_the_others_are_untouched_by_one_that_dies(model: Path) -> None:
    with start(model) as server, crowd(server) as clients:
        victim = min(children(server))
        restarted(server, victim)
        alive = 0
        for client in clients:
            try:
                assert client.ask(infer(1)).status == 200
            except (EOFError, ConnectionError):
                continue
            alive += 1
        assert 0 < alive < CONNECTIONS
        server.signal(signal.SIGTERM)
        code, errors = server.end()
        assert (code, "Traceback" in errors) == (0, False)


def test_all_processes_answer_what_they_have_accepted_before_they_end(tmp_path: Path) -> None:
    path = tmp_path / "count.onnx"
    path.write_bytes(models.count_to().data)
    tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [100_000]}
    request = post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/count/infer")
    with start(path, shutdown_grace_s=0) as server, crowd(server) as clients:
        for client in clients:
            client.send(request)
        with Client(address(server, "metrics")) as scraper:
            while (
                b'nv_inference_pending_request_count{model="count",version="1"} 0' in scraper.ask(get("/metrics")).body
            ):
                pass
        server.signal(signal.SIGTERM)
        assert [client.read().data for client in clients] == [[100_000]] * CONNECTIONS
        assert server.end_unmerged() == (0, "")


def test_they_end_when_the_supervisor_is_killed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", name)  # short, since the path of a socket may have 107 bytes
        _check_that_they_end(model, Path(name))


def _check_that_they_end(model: Path, folder: Path) -> None:
    with start(model) as server:
        assert len(list(folder.glob("*/*.sock"))) == COUNT
        ends = [os.pidfd_open(pid) for pid in children(server)]
        server.process.kill()
        for end in ends:
            assert select.select([end], [], [], PATIENCE_S)[0]
            os.close(end)
    assert list(folder.glob("penstock-*")) == []


@pytest.mark.parametrize(
    ("target", "port", "code", "message"), [("bad", 0, 2, "refuses the model"), ("linear", 1, 6, "")]
)
def test_what_keeps_them_from_starting(model: Path, target: str, port: int, code: int, message: str) -> None:
    (model.parent / "bad.onnx").write_bytes(models.unknown_operator().data)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1] if port else 0
        arguments = ("--http-port", str(number), "--grpc-port", "0", "--metrics-port", "0")
        with ServerProcess(model.parent / f"{target}.onnx", arguments=arguments, processes=COUNT) as server:
            assert server.line == ""
            ended, errors = server.end()
    assert (ended, "Traceback" in errors) == (code, False)
    assert (message or f"cannot listen on 127.0.0.1:{number}") in errors


def pss(pid: int) -> int:
    """The proportional memory (PSS) of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Models with one thread, which the supervisor can load before it forks."""
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear(5000, 5000).data)
    cores = os.sched_getaffinity(0)
    tensor = {"name": "x", "shape": [1, 5000], "datatype": "FP32", "data": [1] * 5000}
    request = post(json.dumps({"inputs": [tensor]}).encode(), path="/v2/models/linear/infer")
    taken = {}
    try:
        os.sched_setaffinity(0, {min(cores)})  # inherited by the server, which then gives the model one thread
        for count in (1, COUNT):
            with ServerProcess(path, arguments=("--json",), processes=count) as server:
                for _ in range(CONNECTIONS):
                    with Client(address(server)) as client:
                        assert client.ask(request).status == 200
                taken[count] = sum(map(pss, {server.process.pid, *children(server)}))
    finally:
        os.sched_setaffinity(0, cores)
    assert taken[1] > 100e6
    assert taken[COUNT] < 1.6 * taken[1], taken
