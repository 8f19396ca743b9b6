"""A server on a repository of models that use every field of the configuration, asked over both protocols by Triton's clients."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from model_repository import CASES, Case, X, write_repository
from processes import ServerProcess

ASKED = [case for case in CASES if case.asked is not None]
BY_NAME = {case.name: case for case in CASES}


class Clients:
    """Of one server."""

    def __init__(self, server: ServerProcess) -> None:
        self.http = over_http.InferenceServerClient("{}:{}".format(*server.address), network_timeout=60)
        self.grpc = over_grpc.InferenceServerClient("{}:{}".format(*server.address))
        """On the same port: it understands both."""

    def ask(self, protocol: str, case: Case) -> Any:
        kind: ModuleType = over_http if protocol == "http" else over_grpc
        assert case.asked is not None
        inputs = [_input(kind, name, array) for name, array in case.asked.items()]
        return getattr(self, protocol).infer(case.name, inputs, case.version, **case.parameters)


def _input(kind: ModuleType, name: str, array: np.ndarray) -> Any:
    return kind.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    folder = write_repository(tmp_path_factory.mktemp("repository"))
    with ServerProcess(arguments=("--model-repository", str(folder)), cache_bytes=1 << 20) as server:
        if not server.line:
            pytest.fail(server.end()[1])
        yield Clients(server)


def test_every_model_is_ready_and_listed(clients: Clients) -> None:
    rows = clients.http.get_model_repository_index()
    assert {row["state"] for row in rows} == {"READY"}, [row for row in rows if row["state"] != "READY"]
    assert {row["name"] for row in rows} == set(BY_NAME)
    assert {model.name for model in clients.grpc.get_model_repository_index().models} == set(BY_NAME)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("case", ASKED, ids=lambda case: case.name)
def test_answers(clients: Clients, case: Case, protocol: str) -> None:
    answer = clients.ask(protocol, case)
    for name, expected in case.answered.items():
        got = answer.as_numpy(name)
        assert got is not None, f"no output '{name}'"
        assert got.shape == expected.shape
        if expected.dtype == np.object_:
            assert got.tolist() == expected.tolist()
        else:
            np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_configuration_and_metadata_agree_over_both_protocols(clients: Clients, case: Case) -> None:
    config = clients.http.get_model_config(case.name, case.version)
    assert config["name"] == case.name
    assert clients.grpc.get_model_config(case.name, case.version, as_json=True)["config"]["name"] == case.name
    metadata = clients.http.get_model_metadata(case.name, case.version)
    other = clients.grpc.get_model_metadata(case.name, case.version, as_json=True)
    assert [tensor["name"] for tensor in metadata["inputs"]] == [tensor["name"] for tensor in other["inputs"]]
    assert len(metadata["outputs"]) == len(config["output"])


def test_versions_are_chosen_by_policy(clients: Clients) -> None:
    def served(name: str) -> list[str]:
        return clients.http.get_model_metadata(name)["versions"]

    assert served("latest") == ["10"]
    assert served("latest_two") == ["2", "10"]
    assert served("all_versions") == ["1", "2", "10"]
    assert served("specific") == ["1", "2"]
    with pytest.raises(InferenceServerException, match="'latest' version 2 is not"):
        clients.http.infer("latest", [_input(over_http, "x", X)], "2")


def test_a_decoupled_python_model_answers_a_stream(clients: Clients) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    clients.grpc.start_stream(lambda result, error: answers.put(error or result.as_numpy("y")))
    x = np.arange(4, dtype=np.float32)
    clients.grpc.async_stream_infer("python_repeat", [_input(over_grpc, "x", x)])
    got = [answers.get(timeout=30) for _ in x]
    clients.grpc.stop_stream()
    assert np.concatenate(got).tolist() == x.tolist()


def test_labels_name_the_classes(clients: Clients) -> None:
    outputs = [over_http.InferRequestedOutput("y", class_count=1)]
    answer = clients.http.infer("labelled", [_input(over_http, "x", X)], outputs=outputs).as_numpy("y")
    assert {text.decode().split(":")[2] for text in answer.ravel()} <= {"cat", "dog"}


def test_statistics_of_an_ensemble_and_of_its_parts(clients: Clients) -> None:
    def count(name: str) -> int:
        return int(clients.http.get_inference_statistics(name)["model_stats"][0]["inference_stats"]["success"]["count"])

    before = count("chain"), count("bare")
    clients.ask("http", BY_NAME["chain"])
    assert (count("chain"), count("bare")) == (before[0] + 1, before[1] + 1)


def test_warm_up_is_no_request_of_a_client(clients: Clients) -> None:
    statistics = clients.http.get_inference_statistics("warm")["model_stats"][0]
    asked = int(statistics["inference_stats"]["success"]["count"])
    clients.ask("http", BY_NAME["warm"])
    after = clients.http.get_inference_statistics("warm")["model_stats"][0]
    assert int(after["inference_stats"]["success"]["count"]) == asked + 1
