"""A server whose models run in separate processes, which are killed one by one."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import numpy as np
import tritonclient.http as client

import models
from processes import PATIENCE_S, ServerProcess

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def children(pid: int) -> list[int]:
    return [
        int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
    ]


def infer(server: client.InferenceServerClient) -> None:
    tensor = client.InferInput("x", X.shape, "FP32")
    tensor.set_data_from_numpy(X)
    answer = server.infer("linear", [tensor]).as_numpy("y")
    np.testing.assert_allclose(answer, X @ models.linear_weight(), rtol=1e-6)


def test_the_server_outlives_its_models_and_they_do_not_outlive_it(tmp_path: Path) -> None:
    path = tmp_path / "linear.onnx"
    path.write_bytes(models.linear().data)
    with ServerProcess(path, isolation="process", instances=2) as process:
        host, port = process.address
        server = client.InferenceServerClient(f"{host}:{port}")
        infer(server)
        first = children(process.process.pid)
        assert len(first) == 2
        ended = os.pidfd_open(first[0])
        os.kill(first[0], signal.SIGKILL)
        assert select.select([ended], [], [], PATIENCE_S)[0]
        os.close(ended)
        while not server.is_model_ready("linear"):
            pass
        infer(server)
        second = children(process.process.pid)
        assert first[1] in second
        # As a terminal does with Ctrl-C.
        for pid in (*second, process.process.pid):
            os.kill(pid, signal.SIGINT)
        server.close()
        assert process.end()[0] == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in second)
