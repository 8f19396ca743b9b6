"""Pipelines served: every way of asking gives the same answer, bit for bit."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from penstock.artifact import file_entries
from penstock.bundle.open import read_bundle
from penstock.bundle.pack import pack
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.bundle.pipeline import load_models, local_models, open_pipeline
from penstock.pipeline.streaming.stages import Stages
from picture_pipelines import DECLARATION, LABELS, pack_corners, picture
from processes import ServerProcess


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_corners(tmp_path_factory.mktemp("corners"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[ServerProcess]:
    with ServerProcess(bundle, arguments=("--grpc-port", "0")) as process:
        yield process


def ask(
    server: ServerProcess,
    body: bytes,
    content_type: str,
    path: str = "/v2/models/corners/run",
    authorization: str = "",
) -> tuple[int, dict[str, Any]]:
    with closing(HTTPConnection(*server.address, timeout=30)) as connection:
        given = {"Content-Type": content_type, "Authorization": authorization}
        connection.request("POST", path, body, {name: value for name, value in given.items() if value})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def form(name: str, content: bytes, kind: str = "image/png") -> tuple[bytes, str]:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"; filename="x"\r\nContent-Type: {kind}\r\n\r\n'
    return head.encode() + content + b"\r\n--b--\r\n", "multipart/form-data; boundary=b"


def local(bundle: Path, content: bytes) -> dict[str, Any]:
    opened = open_pipeline(bundle)
    loaded = load_models(opened.models)
    return Stages(opened.function(), local_models(opened.models, loaded)).call({"image": content})


def grpc_address(server: ServerProcess) -> str:
    return next(word for word in server.line.split() if word.startswith("grpc=")).removeprefix("grpc=")


def triton(client: Any, module: Any, content: bytes) -> dict[str, np.ndarray]:
    tensor = module.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([content], object))
    result = client.infer("corners", [tensor])
    return {name: result.as_numpy(name) for name in ("labels", "scores", "probabilities")}


@pytest.mark.parametrize("corner", range(4))
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_all_ways_give_the_same_answer(server: ServerProcess, bundle: Path, corner: int, format: str) -> None:
    content = picture(corner, format=format)
    here = local(bundle, content)
    assert here["labels"][0] == LABELS[corner]
    plain = {
        "labels": here["labels"],
        "scores": here["scores"].tolist(),
        "probabilities": here["probabilities"].tolist(),
    }
    encoded = base64.b64encode(content).decode()
    bodies = [
        form("image", content, f"image/{format.lower()}"),
        (content, f"image/{format.lower()}"),
        (content, ""),
        (json.dumps({"image": encoded}).encode(), "application/json"),
        (json.dumps({"image": f"data:image/png;base64,{encoded}"}).encode(), "application/json; charset=utf-8"),
    ]
    for body, kind in bodies:
        status, answer = ask(server, body, kind)
        assert (status, answer) == (200, plain), kind
        for name in ("scores", "probabilities"):
            assert np.float32(answer[name]).tobytes() == here[name].tobytes()
    assert ask(server, content, "image/png", "/v2/models/corners/versions/1/run") == (200, plain)
    host, port = server.address
    over_http = triton(http_client.InferenceServerClient(f"{host}:{port}"), http_client, content)
    over_grpc = triton(grpc_client.InferenceServerClient(grpc_address(server)), grpc_client, content)
    for found in (over_http, over_grpc):
        assert [text.decode() for text in found["labels"]] == here["labels"]
        assert found["scores"].tobytes() == here["scores"].tobytes()
        assert found["probabilities"].tobytes() == here["probabilities"].tobytes()


def test_many_clients_at_once(server: ServerProcess) -> None:
    failures: list[object] = []

    def work(first: int) -> None:
        for number in range(10):
            corner = (first + number) % 4
            status, answer = ask(server, picture(corner), "image/png")
            if status != 200 or answer["labels"][0] != LABELS[corner]:
                failures.append((status, answer))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_signature_is_that_of_the_pipeline(server: ServerProcess) -> None:
    host, port = server.address
    client = http_client.InferenceServerClient(f"{host}:{port}")
    metadata = client.get_model_metadata("corners")
    assert metadata["platform"] == "pipeline"
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [1]}]
    assert metadata["outputs"] == [
        {"name": "labels", "datatype": "BYTES", "shape": [-1]},
        {"name": "scores", "datatype": "FP32", "shape": [2]},
        {"name": "probabilities", "datatype": "FP32", "shape": [4]},
    ]
    config = client.get_model_config("corners")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("corners", "pipeline", 0)
    statistics = client.get_inference_statistics("corners")["model_stats"]
    assert [one["name"] for one in statistics] == ["corners"]


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        (b"no picture", "image/png", 400, "step 'decode_image'"),
        (b"", "image/png", 400, "step 'decode_image'"),
        (b"hello", "text/plain", 415, "the content type is 'text/plain'"),
        (b'{"picture": "AA=="}', "application/json", 400, "no input 'picture'"),
        (b'{"image": "?"}', "application/json", 400, "not valid base64"),
        (b'{"image": 3}', "application/json", 400, "write a file in base64"),
        (b"{}", "application/json", 400, "image"),
        (b"[]", "application/json", 400, "not a JSON object"),
        (b"{", "application/json", 400, "JSON"),
        (b"x", "multipart/form-data; boundary=b", 400, "multipart"),
    ],
)
def test_wrong_bodies_are_refused(server: ServerProcess, body: bytes, kind: str, status: int, words: str) -> None:
    found, answer = ask(server, body, kind)
    assert found == status
    assert words in answer["error"]


def test_only_pipelines_run(server: ServerProcess, bundle: Path) -> None:
    assert ask(server, b"x", "image/png", "/v2/models/other/run")[0] == 404
    with ServerProcess(bundle.parent / "corners.onnx") as process:
        status, answer = ask(process, b"x", "image/png")
        assert (status, answer["error"]) == (501, "model 'corners' is not a pipeline (use '/infer')")


def test_in_a_repository_and_metrics(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "found" / "3").mkdir(parents=True)
    (tmp_path / "found" / "3" / "model.bundle").write_bytes(bundle.read_bytes())
    arguments = ("--model-repository", str(tmp_path), "--metrics-port", "0")
    with ServerProcess(arguments=arguments) as process:
        status, answer = ask(process, picture(2), "image/png", "/v2/models/found/versions/3/run")
        assert (status, answer["labels"][0]) == (200, "bottom left")
        metrics = next(word for word in process.line.split() if word.startswith("metrics=")).removeprefix("metrics=")
        with closing(HTTPConnection(metrics, timeout=30)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        assert 'nv_inference_request_success{model="found",version="3"} 1' in text
        assert 'nv_inference_request_success{model="found/classifier",version="3"} 1' in text


def test_golden_samples_that_no_longer_match_are_refused(bundle: Path, tmp_path: Path) -> None:
    opened = open_pipeline(bundle)
    (before,) = opened.golden.examples
    other = msgspec.structs.replace(before.values["logits"], sample=b"\0" * len(before.values["logits"].sample))
    example = msgspec.structs.replace(before, values={**before.values, "logits": other})
    golden = msgspec.json.encode(msgspec.structs.replace(opened.golden, examples=(example,)), order="sorted")
    everything = {name: read_bundle(bundle).files[name] for name in read_bundle(bundle).files} | {"golden.json": golden}
    manifest = msgspec.structs.replace(opened.manifest, files=file_entries(everything))
    pack(manifest, everything, tmp_path / "changed.bundle")
    with ServerProcess(tmp_path / "changed.bundle", wait=False) as process:
        code, text = process.end()
    assert code != 0
    assert "step 'classifier' is the first that differs" in text
    assert "Traceback" not in text


PYTHON = """\
name: shout
inputs:
  text: {media: text}
steps:
  - {python: "steps.py:shout", in: {text: text}, out: {value: loud}}
outputs: [loud]
"""


def test_python_code_runs_only_with_permission(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("def shout(text: str) -> str:\n    return text.upper()\n")
    (tmp_path / "shout.yaml").write_text(PYTHON)
    pack_pipeline(tmp_path / "shout.yaml", target := tmp_path / "shout.bundle", allow_python=True)
    with ServerProcess(target, wait=False) as process:
        code, text = process.end()
    assert code != 0
    assert "runs Python code" in text
    with ServerProcess(target, arguments=("--allow-python",)) as process:
        path = "/v2/models/shout/run"
        assert ask(process, "größer".encode(), "text/plain", path) == (200, {"loud": "GRÖSSER"})
        assert ask(process, b'{"text": "a"}', "application/json", path) == (200, {"loud": "A"})
        assert ask(process, b"\xff", "text/plain", path)[0] == 400


def client_of(letter: str, rights: str) -> str:
    """A client in the keys file, whose key is its ``letter``, 40 times."""
    return f'[clients.{letter}]\nkey_sha256 = "{hashlib.sha256(letter.encode() * 40).hexdigest()}"\n{rights}\n'


def test_the_limits_hold_for_run(tmp_path: Path) -> None:
    bundle = pack_corners(tmp_path, DECLARATION.replace("colour: grey", "colour: grey, max_pixels: 5000"))
    keys = tmp_path / "keys.toml"
    few = 'models = ["corners"]\nrequests_per_second = 0.001\nburst = 2'
    keys.write_text(client_of("a", 'models = ["other"]') + client_of("b", few) + client_of("c", 'models = ["corners"]'))
    keys.chmod(0o600)
    with ServerProcess(bundle, keys_file=keys, max_request_bytes=100_000) as process:

        def status(key: str, body: bytes, kind: str = "image/png") -> tuple[int, dict[str, Any]]:
            return ask(process, body, kind, authorization=f"Bearer {key * 40}")

        assert ask(process, picture(0), "image/png")[0] == 401
        assert status("a", picture(0))[0] == 403
        assert [status("b", picture(0))[0] for _ in range(3)] == [200, 200, 429]
        assert status("c", bytes(100_001))[0] == 413
        for huge in (picture(0, 128), form("image", picture(0, 128))[0]):
            code, answer = status("c", huge, "image/png" if huge.startswith(b"\x89") else form("", b"")[1])
            assert code == 400
            assert "the picture has 128 × 128 pixels, but the limit is 5000" in answer["error"]
        assert status("c", picture(0))[0] == 200


SLOW = """\
name: slow
inputs:
  text: {media: text}
steps:
  - {python: "steps.py:touch", in: {path: text}, out: {value: done}}
outputs: [done]
"""
TOUCH = """\
import os, pathlib, time

def touch(path: str) -> str:
    pathlib.Path(path).touch()
    while os.path.exists(path):
        time.sleep(0.01)
    return path
"""


def test_a_full_queue_refuses_and_a_request_whose_client_disconnects_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(TOUCH)
    (tmp_path / "slow.yaml").write_text(SLOW)
    pack_pipeline(tmp_path / "slow.yaml", target := tmp_path / "slow.bundle", allow_python=True)
    started = tmp_path / "started"
    with ServerProcess(target, arguments=("--allow-python",), max_queue=1) as process:
        connection = HTTPConnection(*process.address, timeout=30)
        connection.request("POST", "/v2/models/slow/run", str(started).encode(), {"Content-Type": "text/plain"})
        while not started.exists():
            time.sleep(0.01)
        code, answer = ask(process, b"x", "text/plain", "/v2/models/slow/run")
        assert (code, answer["error"]) == (503, "the queue of model 'slow' is full (try again later)")
        client = http_client.InferenceServerClient("{}:{}".format(*process.address))

        def failures() -> int:
            (found,) = client.get_inference_statistics("slow")["model_stats"]
            return int(found["inference_stats"]["fail"]["count"])

        refused = failures()
        connection.close()
        while failures() == refused:
            time.sleep(0.01)
        started.unlink()


@pytest.mark.parametrize("settings", [{"processes": 2}, {"isolation": "process"}, {"instances": 2}])
def test_other_ways_to_run_the_models(bundle: Path, settings: dict[str, object]) -> None:
    with ServerProcess(bundle, **settings) as process:
        for corner in range(4):
            status, answer = ask(process, picture(corner), "image/png")
            assert (status, answer["labels"][0]) == (200, LABELS[corner])
