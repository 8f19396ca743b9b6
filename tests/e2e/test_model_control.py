"""Models loaded, reloaded and unloaded in a real server by the client libraries that users have."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

import models
from processes import PATIENCE_S, ServerProcess

_ENDS = (("input", "x", 3), ("output", "y", 2))
X = np.array([[1, 2, 3]], np.float32)


def write(root: Path, name: str, seed: int = 0, version: int = 1, config: str = "") -> None:
    folder = root / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".new").write_bytes(models.linear(seed=seed).data)
    (folder / ".new").replace(folder / "model.onnx")
    if config:
        (root / name / "config.pbtxt").write_text(config)


class Client:
    """Over one protocol."""

    def __init__(self, server: ServerProcess, protocol: str) -> None:
        self._kind: Any = over_http if protocol == "http" else over_grpc
        self.is_http = protocol == "http"
        self.triton = self._kind.InferenceServerClient("{}:{}".format(*server.address))

    def infer(self, name: str, version: str = "") -> np.ndarray:
        tensor = self._kind.InferInput("x", [1, 3], "FP32")
        tensor.set_data_from_numpy(X)
        return self.triton.infer(name, [tensor], model_version=version).as_numpy("y")

    def index(self) -> dict[tuple[str, str], str]:
        if self.is_http:
            rows = self.triton.get_model_repository_index()
        else:
            rows = self.triton.get_model_repository_index(as_json=True).get("models", [])
        return {(row["name"], row.get("version", "")): row.get("state", "") for row in rows}

    def config(self, name: str) -> dict[str, Any]:
        if self.is_http:
            return self.triton.get_model_config(name)
        return self.triton.get_model_config(name, as_json=True)["config"]

    def count(self, name: str) -> int:
        """How many requests it has answered since it was loaded."""
        if self.is_http:
            return self.triton.get_inference_statistics(name)["model_stats"][0]["inference_count"]
        return self.triton.get_inference_statistics(name).model_stats[0].inference_count

    def load(self, name: str, **parameters: Any) -> None:
        self.triton.load_model(name, **parameters)

    def unload(self, name: str, **parameters: Any) -> None:
        self.triton.unload_model(name, **parameters)

    def refused(self, what: Callable[[], object], code: tuple[str, str]) -> str:
        with pytest.raises(InferenceServerException) as caught:
            what()
        assert caught.value.status() in (*code, f"StatusCode.{code[1]}")
        return str(caught.value.message())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def answer(seed: int) -> np.ndarray:
    return X @ models.linear_weight(seed=seed)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    write(root, "first")
    arguments = ("--model-repository", str(root), "--model-control-mode", "explicit", "--load-model", "first")
    with ServerProcess(arguments=arguments, allow_model_upload=True) as server:
        assert server.line.endswith("models=first"), server.end()[1]
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    client = Client(server, request.param)
    yield client
    client.triton.close()


def test_a_model_comes_changes_and_goes(root: Path, client: Client) -> None:
    write(root, "m", seed=1)
    assert client.index()["m", ""] == ""
    client.load("m")
    assert client.index()["m", "1"] == "READY"
    np.testing.assert_allclose(client.infer("m"), answer(1), rtol=1e-5)
    write(root, "m", seed=2)
    np.testing.assert_allclose(client.infer("m"), answer(1), rtol=1e-5)
    client.load("m")
    np.testing.assert_allclose(client.infer("m"), answer(2), rtol=1e-5)
    write(root, "m", seed=3, version=2)
    client.load("m")
    assert client.index()["m", "2"] == "READY"
    client.refused(lambda: client.infer("m", "1"), ("404", "NOT_FOUND"))
    client.unload("m")
    client.refused(lambda: client.infer("m"), ("404", "NOT_FOUND"))
    until(lambda: client.index()["m", "2"] == "UNAVAILABLE")
    assert client.triton.is_server_ready(), "a model that was unloaded is none that is missing"
    client.unload("m")
    client.unload("never-seen")
    shutil.rmtree(root / "m")
    assert ("m", "2") not in client.index()


def test_a_configuration_and_files_in_place_of_those_on_the_disk(root: Path, client: Client) -> None:
    write(root, "given", seed=1)
    client.load("given", config=json.dumps({"max_batch_size": 3}))
    assert client.config("given")["max_batch_size"] == 3
    np.testing.assert_allclose(client.infer("given"), answer(1), rtol=1e-5)
    client.load("given", config="{}", files={"file:7/model.onnx": models.linear(seed=5).data})
    np.testing.assert_allclose(client.infer("given", "7"), answer(5), rtol=1e-5)
    client.refused(lambda: client.infer("given", "1"), ("404", "NOT_FOUND"))
    client.load("given")
    client.refused(lambda: client.infer("given", "7"), ("404", "NOT_FOUND"))
    np.testing.assert_allclose(client.infer("given"), answer(1), rtol=1e-5)
    client.load("unheard-of", config="{}", files={"file:1/model.onnx": models.linear(seed=6).data})
    np.testing.assert_allclose(client.infer("unheard-of"), answer(6), rtol=1e-5)
    client.unload("unheard-of")
    client.unload("given")


def test_what_is_wrong_is_told_and_changes_nothing(root: Path, client: Client, tmp_path: Path) -> None:
    write(root, "broken")
    (root / "broken/1/model.onnx").write_bytes(b"no model")
    said = client.refused(lambda: client.load("broken"), ("400", "INVALID_ARGUMENT"))
    assert said.startswith("load failed for model 'broken': version 1 is at UNAVAILABLE state: ")
    said = client.refused(lambda: client.load("absent"), ("500", "INTERNAL"))
    assert said.startswith("failed to load 'absent', failed to poll from model repository")
    assert "the repositories contain no model 'absent'" in said
    for name in ("..", " ") if client.is_http else ("..", " ", "", "../first"):
        for operation in (client.load, client.unload):
            client.refused(lambda name=name, operation=operation: operation(name), ("400", "INVALID_ARGUMENT"))
    data = models.linear().data
    for parameters in (
        {"config": "{}", "files": {f"file:{tmp_path}/stolen": data}},
        {"config": "{}", "files": {"file:1/../../../stolen": data}},
        {"config": "no JSON"},
        {"config": '{"no_such_field": 1}'},
        {"files": {"file:1/model.onnx": data}},
    ):
        client.refused(lambda parameters=parameters: client.load("first", **parameters), ("400", "INVALID_ARGUMENT"))
    assert not list(tmp_path.iterdir())
    np.testing.assert_allclose(client.infer("first"), answer(0), rtol=1e-5)
    assert client.triton.is_server_ready()
    shutil.rmtree(root / "broken")


def test_the_number_of_instances_changes_in_place(root: Path, client: Client) -> None:
    write(root, "many", config="instance_group { count: 1 }")
    client.load("many")
    for count in (3, 2):
        client.infer("many")
        (root / "many/config.pbtxt").write_text(f"instance_group {{ count: {count} }}")
        client.load("many")
        assert client.config("many")["instance_group"][0]["count"] == count
    assert client.count("many") == 2, "of a model loaded anew the statistics begin anew"
    client.unload("many")


def test_reloads_unloads_and_instances_cost_no_request(root: Path, server: ServerProcess) -> None:
    write(root, "busy", config="instance_group { count: 1 }")
    write(root, "other")
    operator = Client(server, "http")
    operator.load("busy")
    done, failures, answered = threading.Event(), [], []

    def ask() -> None:
        client = Client(server, "http")
        while not done.is_set():
            try:
                client.infer("busy")
                client.infer("first")
                answered.append(1)
            except InferenceServerException as error:
                failures.append(error)
        client.triton.close()

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for one in clients:
        one.start()
    try:
        for number in range(30):
            if number % 3 == 0:
                write(root, "busy", seed=number)
            (root / "busy/config.pbtxt").write_text(f"instance_group {{ count: {1 + number % 3} }}")
            operator.load("busy")
            operator.load("other")
            operator.unload("other")
    finally:
        done.set()
        for one in clients:
            one.join()
    assert not failures
    assert answered
    np.testing.assert_allclose(operator.infer("busy"), answer(27), rtol=1e-5)
    operator.triton.close()


def test_without_explicit_control_clients_change_nothing(root: Path, tmp_path: Path) -> None:
    write(tmp_path, "m")
    with ServerProcess(arguments=("--model-repository", str(tmp_path))) as server:
        for protocol in ("http", "grpc"):
            client = Client(server, protocol)
            for operation in (client.load, client.unload):
                said = client.refused(lambda operation=operation: operation("m"), ("503", "UNAVAILABLE"))
                assert said.startswith("explicit model load / unload is not allowed")
            client.triton.close()


def test_polling_follows_the_folders(tmp_path: Path) -> None:
    write(tmp_path, "m", seed=1)
    write(tmp_path, "goes")
    arguments = ("--model-repository", str(tmp_path), "--model-control-mode", "poll")
    with ServerProcess(arguments=arguments, repository_poll_secs=0.05) as server:
        client = Client(server, "http")
        write(tmp_path, "m", seed=2)
        write(tmp_path, "comes", seed=3)
        shutil.rmtree(tmp_path / "goes")
        until(lambda: client.index() == {("m", "1"): "READY", ("comes", "1"): "READY"})
        until(lambda: np.allclose(client.infer("m"), answer(2)))
        write(tmp_path, "bad")
        (tmp_path / "bad/1/model.onnx").write_bytes(b"no model")
        until(lambda: not client.triton.is_server_ready())
        write(tmp_path, "bad", seed=4)
        until(client.triton.is_server_ready)
        np.testing.assert_allclose(client.infer("bad"), answer(4), rtol=1e-5)
        client.triton.close()


def test_a_server_is_not_ready_while_an_ensemble_lacks_a_part_that_has_gone(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    write(root, "part")
    step = 'step { model_name: "part" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }'
    tensors = "".join(
        f'{field} {{ name: "{name}" data_type: TYPE_FP32 dims: [-1, {size}] }} ' for field, name, size in _ENDS
    )
    (root / "whole/1").mkdir(parents=True)
    (root / "whole/config.pbtxt").write_text(f'platform: "ensemble" {tensors} ensemble_scheduling {{ {step} }}')
    arguments = ("--model-repository", str(root), "--model-control-mode", "poll")
    with ServerProcess(arguments=arguments, repository_poll_secs=0.05) as server:
        client = Client(server, "http")
        assert client.triton.is_server_ready()
        (root / "part").rename(tmp_path / "away")
        until(lambda: client.index().get(("whole", "1")) == "UNAVAILABLE")
        assert not client.triton.is_server_ready()
        (tmp_path / "away").rename(root / "part")
        until(client.triton.is_server_ready)
        assert set(client.index().values()) == {"READY"}
        client.triton.close()


def test_a_repository_that_is_away_is_told_of_once(tmp_path: Path) -> None:
    root, log = tmp_path / "repository", tmp_path / "log"
    write(root, "m")
    arguments = ("--model-repository", str(root), "--model-control-mode", "poll")
    with ServerProcess(arguments=arguments, repository_poll_secs=0.001, log_file=log) as server:
        client = Client(server, "http")
        for times in (1, 2):
            root.rename(tmp_path / "away")
            until(lambda times=times: _told(log) == times)
            for _ in range(30):  # while the server looks again and again
                client.infer("m")
            (tmp_path / "away").rename(root)
            write(root, f"new{times}")
            until(lambda times=times: client.index().get((f"new{times}", "1")) == "READY")
        client.triton.close()
    assert _told(log) == 2


def _told(log: Path) -> int:
    return log.read_text().count("the repositories cannot be polled")


def test_a_server_ends_if_a_model_cannot_be_loaded_unless_it_is_told_not_to(tmp_path: Path) -> None:
    write(tmp_path, "good")
    for name in ("one", "two"):
        write(tmp_path, name)
        (tmp_path / name / "config.pbtxt").write_text("no_such_field: 1")
    arguments = ("--model-repository", str(tmp_path))
    with ServerProcess(arguments=arguments) as server:
        code, errors = server.end()
        assert code
        assert "2 models cannot be served: 'one': " in errors
        assert "'two': " in errors
        assert "no_such_field" in errors
    for strict in (True, False):
        with ServerProcess(arguments=arguments, exit_on_error=False, strict_readiness=strict) as server:
            client = Client(server, "http")
            assert client.triton.is_server_ready() is not strict
            assert client.triton.is_server_live()
            np.testing.assert_allclose(client.infer("good"), answer(0), rtol=1e-5)
            assert client.index() == {("good", "1"): "READY", ("one", ""): "UNAVAILABLE", ("two", ""): "UNAVAILABLE"}
            client.triton.close()


def test_targets_stand_beside_a_repository(tmp_path: Path) -> None:
    write(tmp_path / "repository", "m")
    (tmp_path / "hand.onnx").write_bytes(models.linear(seed=8).data)
    arguments = ("--model-repository", str(tmp_path / "repository"), "--model-control-mode", "explicit")
    with ServerProcess(tmp_path / "hand.onnx", arguments=arguments) as server:
        client = Client(server, "http")
        assert client.index() == {("hand", "1"): "READY", ("m", ""): ""}
        client.unload("hand")
        client.load("hand")
        np.testing.assert_allclose(client.infer("hand"), answer(8), rtol=1e-5)
        client.triton.close()


@pytest.mark.slow
def test_several_processes_serve_the_same_models_also_one_that_takes_anothers_place(tmp_path: Path) -> None:
    write(tmp_path, "first")
    write(tmp_path, "m", seed=1)
    arguments = ("--model-repository", str(tmp_path), "--model-control-mode", "explicit", "--load-model", "first")
    with ServerProcess(arguments=arguments, processes=2, allow_model_upload=True) as server:

        def everywhere(condition: Callable[[Client], bool]) -> bool:
            found = []
            for _ in range(12):  # connections are spread over the processes
                client = Client(server, "http")
                found.append(condition(client))
                client.triton.close()
            return all(found)

        client = Client(server, "http")
        client.load("m", config="{}", files={"file:2/model.onnx": models.linear(seed=7).data})
        client.unload("first")
        assert everywhere(lambda one: one.triton.is_model_ready("m", "2") and not one.triton.is_model_ready("first"))
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        client.triton.close()
        os.kill(int(children[0]), 9)
        until(
            lambda: len(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()) == 2
        )
        until(lambda: everywhere(lambda one: one.triton.is_server_ready()))
        assert everywhere(lambda one: np.allclose(one.infer("m"), answer(7)) and not one.triton.is_model_ready("first"))
        client = Client(server, "http")
        client.unload("m")
        assert everywhere(lambda one: not one.triton.is_model_ready("m"))
        client.triton.close()
