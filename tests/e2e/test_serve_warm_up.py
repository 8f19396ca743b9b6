"""Requests that one server records warm up the next one, and can be sent again unchanged."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np

import models
import python_models
from http_servers import Client, get, post
from penstock.online.repository.loading.recorded_requests import encode
from penstock.request import InferRequest
from penstock.tensor import Array
from processes import ServerProcess

# ``y`` is how many requests the model has been given since it was loaded.
COUNTING = """
def initialize(self, args):
    self.count = 0

def execute(self, requests):
    self.count += len(requests)
    ys = [request.inputs()[0].as_numpy() * 0 + self.count for request in requests]
    return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in ys]
"""
CONFIG = """backend: "python" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""


def resend(content: bytes, name: str = "counting") -> bytes:
    """The file's first line is a header, and the rest the body."""
    header, _, body = content.partition(b"\n")
    return post(body, f"{header.decode()}\r\n", f"/v2/models/{name}/infer")


def ask(client: Client, x: Array) -> set[float]:
    answer = client.ask(resend(encode(InferRequest("counting", {"x": x}))))
    assert answer.status == 200, answer.body
    return set(answer.data)


def test_recorded_requests_warm_the_next_server_up(tmp_path: Path) -> None:
    root, recorded = tmp_path / "models", tmp_path / "recorded"
    python_models.write(root / "counting", COUNTING)
    (root / "counting" / "config.pbtxt").write_text(CONFIG)
    arguments = ("--model-repository", str(root))
    with ServerProcess(arguments=arguments, warmup_folder=recorded, warmup_record=3) as server:
        with Client(server.address) as client:
            for number, rows in enumerate((1, 1, 2, 3, 4), start=1):
                assert ask(client, np.full((rows, 2), rows, np.float32)) == {number}
            assert client.ask(resend(encode(InferRequest("counting", {"z": np.ones((5, 2))})))).status == 400
        server.process.terminate()
        assert server.end()[0] == 0
    files = sorted((recorded / "counting").iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}

    with ServerProcess(arguments=arguments, warmup_folder=recorded) as server:
        with Client(server.address) as client:
            assert ask(client, np.zeros((1, 2), np.float32)) == {4}, "the model has seen the three"
            assert client.ask(resend(files[0].read_bytes())).status == 200
        server.process.terminate()
        code, log = server.end()
    assert code == 0
    assert "model 'counting' warmed up with 3 recorded requests" in log


FAILING = """max_batch_size: 4
model_warmup { name: "odd" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 5 zero_data: true } } }
"""


def test_a_warm_up_that_fails_leaves_the_old_version_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "linear"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(models.linear().data)
    arguments = ("--model-repository", str(tmp_path))
    explicit = {"model_control_mode": "explicit", "load_models": "linear"}
    with ServerProcess(arguments=arguments, **explicit) as server, Client(server.address) as client:
        x = encode(InferRequest("linear", {"x": np.ones((1, 3), np.float32)}))
        before = client.ask(resend(x, "linear")).data
        (folder / "config.pbtxt").write_text(FAILING)
        refused = client.ask(post(b"", path="/v2/repository/models/linear/load"))
        assert refused.status == 400
        assert "version 1 is at UNAVAILABLE state: model 'linear': failed to run warmup sample 'odd': " in refused.error
        assert client.ask(resend(x, "linear")).data == before
        (folder / "config.pbtxt").write_text(FAILING.replace("dims: 5", "dims: 3"))
        assert client.ask(post(b"", path="/v2/repository/models/linear/load")).status == 200
        statistics = json.loads(client.ask(get("/v2/models/linear/stats")).body)["model_stats"][0]
        assert statistics["inference_count"] == 0, "a warm-up is no client's request"
