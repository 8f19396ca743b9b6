"""What an operator of a model rejects while the model runs is the client's error, with the engine's reason, over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import models
from penstock.artifact import Artifact
from penstock.engines.registry import is_available
from processes import ServerProcess

MODELS: dict[str, tuple[Artifact, str]] = {
    "ids": (models.embedding(), ""),
    "ids_apart": (models.embedding(), 'parameters { key: "isolation" value { string_value: "process" } }'),
    "sizes": (models.fails_on_odd_batch(), "max_batch_size: 0"),
    "memory": (models.filled(), "max_batch_size: 0"),
}
if is_available("openvino"):
    MODELS["sizes_openvino"] = (models.fails_on_odd_batch(), 'backend: "openvino" max_batch_size: 0')
ODD = np.ones((3, 2), np.float32)
REJECTED = {
    "ids": ({"ids": np.array([[100]])}, "idx=100 must be within the inclusive range [-10,9]"),
    "ids_apart": ({"ids": np.array([[-11]])}, "idx=-11 must be within the inclusive range [-10,9]"),
    "sizes": ({"x": ODD}, "{3,2}"),
    "sizes_openvino": ({"x": ODD}, "Reshape"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("repository")
    for name, (model, config) in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(model.data)
        (folder / name / "config.pbtxt").write_text(config)
    with ServerProcess(arguments=("--model-repository", str(folder))) as started:
        if not started.line:
            pytest.fail(started.end()[1])
        yield started


def ask(server: ServerProcess, kind: ModuleType, model: str, inputs: dict[str, np.ndarray]) -> np.ndarray:
    with kind.InferenceServerClient("{}:{}".format(*server.address)) as client:
        given = [kind.InferInput(name, list(a.shape), np_to_triton_dtype(a.dtype)) for name, a in inputs.items()]
        for tensor, array in zip(given, inputs.values(), strict=True):
            tensor.set_data_from_numpy(array)
        found: np.ndarray = client.infer(model, given).as_numpy("y")
        return found


@pytest.mark.parametrize(("kind", "status"), [(over_http, "400"), (over_grpc, "StatusCode.INVALID_ARGUMENT")])
@pytest.mark.parametrize("model", REJECTED)
def test_the_client_gets_the_reason(
    server: ServerProcess, kind: ModuleType, status: str, model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if model not in MODELS:
        pytest.skip("the engine is not installed")
    inputs, reason = REJECTED[model]
    with pytest.raises(InferenceServerException) as caught:
        ask(server, kind, model, inputs)
    assert caught.value.status() == status
    message = caught.value.message()
    assert "the model rejects these inputs: " in message
    assert reason in message
    assert str(tmp_path_factory.getbasetemp()) not in message
    assert ".cc" not in message
    assert ".cpp" not in message


@pytest.mark.parametrize(("kind", "status"), [(over_http, "500"), (over_grpc, "StatusCode.INTERNAL")])
def test_a_lack_of_memory_is_the_servers_failure(server: ServerProcess, kind: ModuleType, status: str) -> None:
    with pytest.raises(InferenceServerException, match="the model failed") as caught:
        ask(server, kind, "memory", {"count": np.array([1 << 45])})
    assert caught.value.status() == status
    assert ask(server, kind, "memory", {"count": np.array([3])}).tolist() == [0, 0, 0]


def test_only_the_request_with_the_wrong_id_is_rejected(server: ServerProcess) -> None:
    def answer(number: int) -> float | str:
        try:
            return float(ask(server, over_http, "ids", {"ids": np.array([[number]])})[0, 0, 0])
        except InferenceServerException as error:
            return str(error.status())

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(answer, [number % 11 for number in range(110)]))
    assert found == [float(number % 11) if number % 11 < 10 else "400" for number in range(110)]
