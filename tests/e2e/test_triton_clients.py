"""What Triton's public client examples show, done with its client library against the models that they ask for."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, shared_memory

from processes import ServerProcess
from triton_models import write_custom, write_examples

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), np.int32)
VALUES = [11, 7, 5, 3, 2, 0, 1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("repositories")
    folders = write_examples(root / "examples"), write_custom(root / "custom")
    arguments = [word for folder in folders for word in ("--model-repository", str(folder))]
    with ServerProcess(arguments=tuple(arguments)) as server:
        if not server.line:
            pytest.fail(server.end()[1])
        yield "{}:{}".format(*server.address)


@pytest.fixture
def grpc(url: str) -> Iterator[over_grpc.InferenceServerClient]:
    options = over_grpc.KeepAliveOptions(
        keepalive_time_ms=200, keepalive_timeout_ms=2000, keepalive_permit_without_calls=True
    )
    with over_grpc.InferenceServerClient(url, keepalive_options=options) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[over_http.InferenceServerClient]:
    with over_http.InferenceServerClient(url, concurrency=4) as client:
        yield client


def pair(kind: Any, a: np.ndarray = A, b: np.ndarray = B, datatype: str = "INT32") -> list[Any]:
    inputs = [kind.InferInput(name, [1, 16], datatype) for name in ("INPUT0", "INPUT1")]
    for tensor, array in zip(inputs, (a, b), strict=True):
        tensor.set_data_from_numpy(array)
    return inputs


def check(answer: Any) -> None:
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), A - B)


def test_infer(http: over_http.InferenceServerClient, grpc: over_grpc.InferenceServerClient) -> None:
    check(http.infer("simple", pair(over_http)))
    check(grpc.infer("simple", pair(over_grpc)))
    for answer in [http.async_infer("simple", pair(over_http)) for _ in range(4)]:
        check(answer.get_result())


def test_asynchronous_infer_over_grpc(grpc: over_grpc.InferenceServerClient) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(4):
        grpc.async_infer("simple", pair(over_grpc), lambda result, error: answers.put(error or result))
    for _ in range(4):
        check(answers.get(timeout=30))


def test_aio(url: str) -> None:
    async def main() -> None:
        async with over_grpc_aio.InferenceServerClient(url) as client:
            check(await client.infer("simple", pair(over_grpc_aio)))
            assert (await client.get_model_metadata("simple")).name == "simple"
        async with over_http_aio.InferenceServerClient(url) as client:
            check(await client.infer("simple", pair(over_http_aio)))

    asyncio.run(main())


@pytest.mark.parametrize("kind", [over_http, over_grpc], ids=["http", "grpc"])
def test_strings(url: str, kind: Any) -> None:
    def text(array: np.ndarray) -> np.ndarray:
        return np.array([[str(value).encode() for value in array.ravel()]], np.object_)

    with kind.InferenceServerClient(url) as client:
        answer = client.infer("simple_string", pair(kind, text(A), text(B), "BYTES"))
        assert [int(value) for value in answer.as_numpy("OUTPUT0").ravel()] == (A + B).ravel().tolist()
        same = kind.InferInput("INPUT0", [1, 2], "BYTES")
        same.set_data_from_numpy(np.array([["\0π".encode(), b""]], np.object_))
        assert client.infer("simple_identity", [same]).as_numpy("OUTPUT0").tolist() == [["\0π".encode(), b""]]


@pytest.mark.parametrize("kind", [over_http, over_grpc], ids=["http", "grpc"])
def test_shared_memory(url: str, kind: Any) -> None:
    key = f"/penstock-{uuid.uuid4().hex}"
    region = shared_memory.create_shared_memory_region("in", key, 256)
    try:
        shared_memory.set_shared_memory_region(region, [A, B])
        with kind.InferenceServerClient(url) as client:
            client.register_system_shared_memory(key[1:], key, 256)
            inputs = [kind.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            outputs = [kind.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
            for number, (into, out) in enumerate(zip(inputs, outputs, strict=True)):
                into.set_shared_memory(key[1:], 64, 64 * number)
                out.set_shared_memory(key[1:], 64, 128 + 64 * number)
            client.infer("simple", inputs, outputs=outputs)
            client.unregister_system_shared_memory(key[1:])
        got = shared_memory.get_contents_as_numpy(region, np.int32, [2, 16], 128)
        np.testing.assert_array_equal(got, np.concatenate([A + B, A - B]))
    finally:
        shared_memory.destroy_shared_memory_region(region)


@pytest.mark.parametrize(
    ("model", "field", "kind"),
    [
        ("simple", "int_contents", "INT32"),
        ("simple_int8", "int_contents", "INT8"),
        ("simple_string", "bytes_contents", "BYTES"),
    ],
)
def test_explicit_contents(url: str, grpc: over_grpc.InferenceServerClient, model: str, field: str, kind: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in (("INPUT0", A), ("INPUT1", B)):
        tensor = request.inputs.add(name=name, datatype=kind, shape=[1, 16])
        values = array.ravel().tolist()
        getattr(tensor.contents, field).extend([str(v).encode() for v in values] if kind == "BYTES" else values)
    answer = over_grpc.InferResult(grpc._client_stub.ModelInfer(request))
    assert [int(value) for value in answer.as_numpy("OUTPUT0").ravel()] == (A + B).ravel().tolist()


# Sequences


def number(value: int) -> list[Any]:
    tensor = over_grpc.InferInput("INPUT", [1, 1], "INT32")
    return [tensor.set_data_from_numpy(np.array([[value]], np.int32))]


def ends(values: list[int]) -> list[dict[str, bool]]:
    return [{"sequence_start": n == 0, "sequence_end": n == len(values) - 1} for n in range(len(values))]


@pytest.mark.parametrize("kind", [over_http, over_grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("sequence", [1001, str(uuid.UUID(int=5))], ids=["number", "text"])
def test_a_sequence_one_request_after_the_other(url: str, kind: Any, sequence: int | str) -> None:
    got = []
    with kind.InferenceServerClient(url) as client:
        for value, flags in zip([0, *VALUES], ends([0, *VALUES]), strict=True):
            tensor = kind.InferInput("INPUT", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[value]], np.int32))
            got.append(
                client.infer("simple_sequence", [tensor], sequence_id=sequence, **flags).as_numpy("OUTPUT")[0, 0]
            )
    assert got == [1, *VALUES], "one more at the start"


def test_sequences_side_by_side_over_a_stream(grpc: over_grpc.InferenceServerClient) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put(error or result))
    ids = range(2001, 2009)
    for value, flags in zip([100, *VALUES], ends([0, *VALUES]), strict=True):
        for sequence in ids:
            request_id = f"{sequence}_{value}"
            grpc.async_stream_infer(
                "simple_dyna_sequence", number(value), request_id=request_id, sequence_id=sequence, **flags
            )
    got: dict[int, list[int]] = {sequence: [] for sequence in ids}
    for _ in range(len(ids) * (1 + len(VALUES))):
        result = answers.get(timeout=30)
        got[int(result.get_response().id.partition("_")[0])].append(int(result.as_numpy("OUTPUT")[0, 0]))
    grpc.stop_stream()
    for sequence, outputs in got.items():
        assert outputs == [101, *VALUES[:-1], VALUES[-1] + sequence], "and the sequence's id at the end"


def test_the_state_of_a_sequence_is_kept_by_the_server(grpc: over_grpc.InferenceServerClient) -> None:
    total, sums = 0, []
    for value, flags in zip(VALUES, ends(VALUES), strict=True):
        answer = grpc.infer("simple_string_dyna_sequence", number(value), sequence_id="1002", **flags)
        sums.append(int(answer.as_numpy("OUTPUT")[0, 0]))
        total += value
    assert sums[-1] == total + 1002
    assert sums[:-1] == np.cumsum(VALUES)[:-1].tolist()


def test_a_sequence_that_was_not_started_is_refused(grpc: over_grpc.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="START flag"):
        grpc.infer("simple_sequence", number(1), sequence_id=31)
    with pytest.raises(InferenceServerException, match="correlation ID"):
        grpc.infer("simple_sequence", number(1))


def test_many_answers_to_one_request(grpc: over_grpc.InferenceServerClient) -> None:
    values = np.arange(100, 106, dtype=np.int32)
    inputs = [
        over_grpc.InferInput("IN", [6], "INT32").set_data_from_numpy(values),
        over_grpc.InferInput("DELAY", [6], "UINT32").set_data_from_numpy(np.full(6, 2, np.uint32)),
        over_grpc.InferInput("WAIT", [1], "UINT32").set_data_from_numpy(np.zeros(1, np.uint32)),
    ]
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grpc.start_stream(lambda result, error: answers.put(error or result))
    grpc.async_stream_infer("repeat_int32", inputs)
    got = [int(answers.get(timeout=30).as_numpy("OUT")[0]) for _ in values]
    grpc.stop_stream()
    assert got == values.tolist()


def test_classification_of_an_image(grpc: over_grpc.InferenceServerClient) -> None:
    image = over_grpc.InferInput("data_0", [3, 224, 224], "FP32")
    image.set_data_from_numpy(np.random.default_rng(0).random((3, 224, 224), np.float32))
    outputs = [over_grpc.InferRequestedOutput("fc6_1", class_count=3)]
    top = grpc.infer("densenet_onnx", [image], outputs=outputs).as_numpy("fc6_1")
    assert top.shape == (3,)
    assert all(text.decode().split(":")[2] == f"CLASS {text.decode().split(':')[1]}" for text in top)


# Control


def test_model_control(tmp_path: Path) -> None:
    folder = write_examples(tmp_path / "examples")
    arguments = ("--model-repository", str(folder), "--model-control-mode", "explicit")
    with ServerProcess(arguments=arguments) as server:
        for kind in (over_http, over_grpc):
            with kind.InferenceServerClient("{}:{}".format(*server.address)) as client:
                _control(client)


def _control(client: Any) -> None:
    index = client.get_model_repository_index()
    assert len(index if isinstance(index, list) else index.models) == 8
    client.load_model("simple")
    assert client.is_model_ready("simple")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    assert client.is_model_ready("simple"), "what cannot be loaded leaves what was"
    client.load_model("simple", config='{"max_batch_size":"16"}')
    config = client.get_model_config("simple")
    assert (config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size) == 16
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("wrong_model_name")
