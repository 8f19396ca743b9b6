"""``penstock tritonserver`` as start scripts use it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tritonclient.grpc as triton

import models

PATIENCE_S = 30


def repository(folder: Path) -> Path:
    (folder / "models" / "linear" / "1").mkdir(parents=True)
    (folder / "models" / "linear" / "1" / "model.onnx").write_bytes(models.linear(3, 2).data)
    return folder / "models"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model-repository=nowhere",), "no model repository 'nowhere'"),
        (("--http-prt=1",), "did you mean 'http-port'?"),
        (("--http-port=70000",), "--http-port: "),
        (("--load-model=a", "--model-repository=x"), "'load_models' requires 'model_control_mode' explicit"),
        (("--model-repository=.", "--rate-limit-resource=R"), "'R' is not a resource"),
        ((), "nothing to serve"),
    ],
)
def test_whatever_is_wrong_ends_with_1(penstock, folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = penstock("tritonserver", *arguments)
    assert done.code == 1
    assert message in done.err


def test_notes_go_before_what_is_wrong(penstock, folder: Path) -> None:
    done = penstock("tritonserver", "--model-store", "nowhere", "--http-thread-count", "8", "--json")
    assert done.err.startswith("note: --http-thread-count has no effect here")
    assert done.json["error"]["code"] == "NOT_FOUND"


def test_a_model_that_cannot_be_loaded_ends_it(penstock, tmp_path: Path) -> None:
    (repository(tmp_path) / "linear" / "1" / "model.onnx").write_bytes(b"no model")
    done = penstock(
        "tritonserver", f"--model-repository={tmp_path / 'models'}", "--http-port=0", "--http-address=127.0.0.1"
    )
    assert done.code == 1
    assert "linear" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_starts_asks_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    flags = ["--model-repository", str(repository(tmp_path)), "--http-port=0", "--http-address", "127.0.0.1"]
    flags += [
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
        "--grpc-restricted-protocol=health:key=value",
        "--json",
    ]
    command = [sys.executable, "-m", "penstock.cli.tritonserver", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            connection = http.client.HTTPConnection(ready["http"], timeout=PATIENCE_S)
            connection.request("GET", "/v2")
            metadata = json.loads(connection.getresponse().read())
            connection.request("GET", "/v2/health/ready")
            assert connection.getresponse().status == 200
            connection.close()
            with triton.InferenceServerClient(ready["grpc"]) as client:
                assert client.is_server_ready(headers={"triton-grpc-protocol-key": "value"})
        finally:
            process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert f"Started HTTPService at {ready['http']}\n" in errors
    assert "Started Metrics" not in errors
    assert (metadata["name"], ready["metrics"], ready["models"]) == ("triton", "", ["linear"])
    assert not [name for name in metadata["extensions"] if "shared_memory" in name]
