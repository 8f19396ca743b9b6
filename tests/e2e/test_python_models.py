"""Python models behind a server process, asked over both protocols by Triton's own clients."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from processes import PATIENCE_S, ServerProcess
from python_models import HEAD, write

TENSORS = """
@staticmethod
def auto_complete_config(config):
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
    config.set_max_batch_size(8)
    return config

def answer(self, x):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""

DOUBLE = """
def execute(self, requests):
    answers = []
    for one in requests:
        x = one.inputs()[0].as_numpy()
        if x[0, 0] < 0:
            import os
            os._exit(1)
        answers.append(self.answer(x * 2))
    return answers
"""

# It asks `double` for every row of its answer, and sends them one by one.
COUNT = """
def execute(self, requests):
    import threading
    for one in requests:
        x, sender = one.inputs()[0].as_numpy(), one.get_response_sender()
        threading.Thread(target=self.count, args=(x, sender)).start()

def count(self, x, sender):
    for number in range(int(x[0, 0])):
        inputs = [pb_utils.Tensor("x", x * 0 + number)]
        reply = pb_utils.InferenceRequest(model_name="double", inputs=inputs, requested_output_names=["y"]).exec()
        sender.send(self.answer(reply.output_tensors()[0].as_numpy()))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

DECOUPLED = "model_transaction_policy { decoupled: true }"

SUM = """
import penstock
from penstock import Context, Tensor


@penstock.model
def total(x: Tensor["FP32", -1, 2], context: Context) -> Tensor["FP32", -1]:
    with context.stage("ask"):
        y = context.infer("double", {"x": x})["y"]
    return y.sum(axis=1)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    write(folder / "double", TENSORS + DOUBLE, HEAD)
    write(folder / "count", TENSORS + COUNT, HEAD)
    (folder / "count" / "config.pbtxt").write_text(DECOUPLED)
    write(folder / "total", SUM, "")
    with ServerProcess(arguments=("--model-repository", str(folder))) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[triton_http.InferenceServerClient]:
    host, port = server.address
    with triton_http.InferenceServerClient(f"{host}:{port}") as client:
        yield client


def inputs(module: Any, *values: float) -> list[Any]:
    tensor = module.InferInput("x", [len(values), 2], "FP32")
    tensor.set_data_from_numpy(np.array([[value, value] for value in values], np.float32))
    return [tensor]


def test_a_triton_model_needs_no_configuration(client: triton_http.InferenceServerClient) -> None:
    assert client.infer("double", inputs(triton_http, 1, 2)).as_numpy("y").tolist() == [[2, 2], [4, 4]]
    config = client.get_model_config("double")
    assert (config["backend"], config["max_batch_size"]) == ("python", 8)


def test_a_function_asks_another_model_and_tells_its_time(
    server: ServerProcess, client: triton_http.InferenceServerClient
) -> None:
    assert client.infer("total", inputs(triton_http, 1, 2)).as_numpy("output").tolist() == [4, 8]
    (statistics,) = client.get_inference_statistics("total")["model_stats"]
    assert {"ask", "transfer_in", "execute", "transfer_out"} <= set(statistics["stage_stats"])
    assert statistics["stage_stats"]["ask"]["ns"] <= statistics["stage_stats"]["execute"]["ns"]
    metrics = next(part for part in server.line.split() if part.startswith("metrics=")).removeprefix("metrics=")
    page = urllib.request.urlopen(f"http://{metrics}/metrics", timeout=PATIENCE_S).read().decode()
    assert 'penstock_stages_total{model="total",version="1",stage="ask"}' in page


def test_a_decoupled_model_streams_what_another_one_answers(server: ServerProcess) -> None:
    address = next(part for part in server.line.split() if part.startswith("grpc=")).removeprefix("grpc=")
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton_grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer("count", inputs(triton_grpc, 4), enable_empty_final_response=True)
        values = []
        while (
            not (result := answers.get(timeout=PATIENCE_S))
            .get_response()
            .parameters["triton_final_response"]
            .bool_param
        ):
            values.append(result.as_numpy("y")[0, 0])
    assert values == [0, 2, 4, 6]


def test_a_death_is_told_and_forgotten(client: triton_http.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="process died in the middle of this batch"):
        client.infer("double", inputs(triton_http, -1))
    assert infer_after_restart(client, 3).as_numpy("y").tolist() == [[6, 6]]


def infer_after_restart(client: triton_http.InferenceServerClient, value: int) -> triton_http.InferResult:
    """Ask ``double`` until its process runs again. On a busy machine, this takes longer than the server lets a request wait."""
    for _ in range(int(PATIENCE_S)):
        try:
            return client.infer("double", inputs(triton_http, value))
        except InferenceServerException as error:
            if "is being restarted" not in str(error):
                raise
    raise AssertionError("the process of 'double' is still being restarted")


def test_what_cannot_be_loaded_is_told_with_its_line(tmp_path: Path) -> None:
    write(tmp_path / "bad", "def initialize(self, args):\n    self.nothing" + TENSORS + DOUBLE, HEAD)
    with ServerProcess(arguments=("--model-repository", str(tmp_path)), wait=False) as server:
        code, errors = server.end()
    assert code != 0
    assert "model 'bad': model.py failed in line 8 while it was loaded: AttributeError" in errors
    assert "Traceback" in errors


def ask_for(url: str, what: str) -> None:
    """``load`` or ``unload`` the model ``endless``."""
    with triton_http.InferenceServerClient(url, network_timeout=PATIENCE_S) as client:
        getattr(client, f"{what}_model")("endless")


ENDLESS = """
import penstock
from penstock import Tensor

def wait():
    open({!r}, "w").close()
    while True: pass
{}
@penstock.model
def f(x: Tensor["FP32", -1, 2]) -> Tensor["FP32", -1]:
    wait()
"""


WARM_UP = """
model_warmup {
  name: "zeros" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 zero_data: true } }
}
"""


@pytest.mark.parametrize("when", ["imported", "warmed up"])
@pytest.mark.parametrize("how", ["unload", "end of the server", "end of the server at its start"])
def test_a_load_without_end_is_ended(tmp_path: Path, how: str, when: str) -> None:
    begun = tmp_path / "begun"
    write(tmp_path / "models" / "endless", ENDLESS.format(str(begun), "wait()" if when == "imported" else ""), "")
    (tmp_path / "models" / "endless" / "config.pbtxt").write_text(WARM_UP)
    at_start = how.endswith("start")
    arguments = ("--model-repository", str(tmp_path / "models"))
    if not at_start:
        arguments += ("--model-control-mode", "explicit")
    os.mkfifo(begun)
    with (
        ServerProcess(arguments=arguments, wait=not at_start, drain_timeout_s=10 * PATIENCE_S) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        if not at_start:
            url = "{}:{}".format(*server.address)
            loading = threads.submit(ask_for, url, "load")
        begun.read_text()
        if how == "unload":
            ask_for(url, "unload")
            with pytest.raises(InferenceServerException, match="it is being unloaded"):
                loading.result(PATIENCE_S)
        server.signal(signal.SIGTERM)
        if how == "end of the server":
            with pytest.raises(InferenceServerException, match="the server is shutting down"):
                loading.result(PATIENCE_S)
        code, errors = server.end()
    assert code == 0
    why = "it is being unloaded" if how == "unload" else "the server is shutting down"
    assert f"was ended: {why}" in errors


def test_processes_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    write(tmp_path / "double", TENSORS + DOUBLE, HEAD)
    with ServerProcess(arguments=("--model-repository", str(tmp_path))) as server:
        found = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True, check=True)
        watched = [os.pidfd_open(int(pid)) for pid in found.stdout.split()]
        assert watched
        server.signal(signal.SIGKILL)
        server.end()
        for one in watched:
            assert select.select([one], [], [], PATIENCE_S)[0]
            os.close(one)
