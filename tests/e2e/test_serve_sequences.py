"""Stateful models in a real server process, used with Triton's client library."""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import http_servers
import sequences
from processes import PATIENCE_S, ServerProcess

SETTINGS = """
[models.sums]
max_batch_size = 4
instance_group = [{ count = 2 }]
[models.sums.sequence_batching]
max_sequence_idle_microseconds = 20000000
oldest = { max_candidate_sequences = 3, max_queue_delay_microseconds = 500 }
control_input = [{ name = "START", control = [{ kind = "CONTROL_SEQUENCE_START", int32_false_true = [0, 1] }] }]
state = [{ input_name = "state_in", output_name = "state_out", data_type = "TYPE_FP32", dims = [1] }]

[models.shown]
max_batch_size = 4
output = [{ name = "state_out", data_type = "TYPE_FP32", dims = [1] }]
[models.shown.sequence_batching]
max_sequence_idle_microseconds = 20000000
control_input = [{ name = "START", control = [{ kind = "CONTROL_SEQUENCE_START", int32_false_true = [0, 1] }] }]
[[models.shown.sequence_batching.state]]
input_name = "state_in"
output_name = "state_out"
data_type = "TYPE_FP32"
dims = [1]
initial_state = [{ name = "none", data_type = "TYPE_FP32", dims = [1], zero_data = true }]

[models.controls]
max_batch_size = 4
[models.controls.sequence_batching]
max_sequence_idle_microseconds = 20000000
direct = {}
[[models.controls.sequence_batching.control_input]]
name = "START"
control = [{ kind = "CONTROL_SEQUENCE_START", int32_false_true = [0, 1] }]
[[models.controls.sequence_batching.control_input]]
name = "END"
control = [{ kind = "CONTROL_SEQUENCE_END", fp32_false_true = [-1, 2] }]
[[models.controls.sequence_batching.control_input]]
name = "READY"
control = [{ kind = "CONTROL_SEQUENCE_READY", bool_false_true = [false, true] }]
[[models.controls.sequence_batching.control_input]]
name = "CORRID"
control = [{ kind = "CONTROL_SEQUENCE_CORRID", data_type = "TYPE_UINT64" }]
"""
SEQUENCES, LENGTH = 8, 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Its addresses."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("sums", "shown"):
        (folder / f"{name}.onnx").write_bytes(sequences.implicit_accumulator().data)
    (folder / "controls.onnx").write_bytes(sequences.controls_as_outputs().data)
    config = folder / "server.toml"
    config.write_text(SETTINGS)
    arguments = ("--config", str(config), "--json", "--grpc-port", "0")
    with ServerProcess(*sorted(folder.glob("*.onnx")), arguments=arguments) as server:
        yield json.loads(server.line)


def one(protocol: Any, value: float) -> list[Any]:
    tensor = protocol.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
    return [tensor]


def place(step: int, length: int = LENGTH) -> dict[str, bool]:
    return {"sequence_start": step == 0, "sequence_end": step == length - 1}


def one_after_another(protocol: Any, address: str, model: str, identity: int) -> list[float]:
    """The responses of one sequence; each request is sent after the previous response."""
    with protocol.InferenceServerClient(address) as client:
        answers = [
            client.infer(model, one(protocol, identity * 100 + step), sequence_id=identity, **place(step))
            for step in range(LENGTH)
        ]
    return [float(answer.as_numpy("y").item()) for answer in answers]


def all_at_once(address: str, model: str, identity: int) -> list[float]:
    """The same over one stream, without waiting."""
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        for step in range(LENGTH):
            inputs = one(tritonclient.grpc, identity * 100 + step)
            client.async_stream_infer(model, inputs, sequence_id=identity, request_id=str(step), **place(step))
        answers = [got.get(timeout=PATIENCE_S) for _ in range(LENGTH)]
        client.stop_stream()
    assert [error for _, error in answers] == [None] * LENGTH
    assert [result.get_response().id for result, _ in answers] == [str(step) for step in range(LENGTH)]
    return [float(result.as_numpy("y").item()) for result, _ in answers]


ASKED: dict[str, Callable[[dict[str, str], str, int], list[float]]] = {
    "http": lambda at, model, identity: one_after_another(tritonclient.http, at["http"], model, identity),
    "grpc": lambda at, model, identity: one_after_another(tritonclient.grpc, at["grpc"], model, identity),
    "stream": lambda at, model, identity: all_at_once(at["grpc"], model, identity),
}


@pytest.mark.parametrize("model", ["sums", "shown"])
@pytest.mark.parametrize("way", list(ASKED))
def test_sequences_at_the_same_time_each_have_their_own_sum(server: dict[str, str], way: str, model: str) -> None:
    with ThreadPoolExecutor(SEQUENCES) as pool:
        got = list(pool.map(lambda identity: ASKED[way](server, model, identity), range(1, SEQUENCES + 1)))
    assert got == [
        np.cumsum([identity * 100 + step for step in range(LENGTH)]).tolist() for identity in range(1, SEQUENCES + 1)
    ]


def test_sequences_of_one_stream_do_not_mix(server: dict[str, str]) -> None:
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server["grpc"]) as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        for step in range(LENGTH):
            for identity in ("a", "b", "zwölf"):
                inputs = one(tritonclient.grpc, len(identity) * 10)
                client.async_stream_infer("sums", inputs, sequence_id=identity, request_id=identity, **place(step))
        answers = [got.get(timeout=PATIENCE_S) for _ in range(3 * LENGTH)]
        client.stop_stream()
    for identity in ("a", "b", "zwölf"):
        mine = [result.as_numpy("y").item() for result, _ in answers if result.get_response().id == identity]
        assert mine == [len(identity) * 10 * (step + 1) for step in range(LENGTH)]


def test_controls_tell_of_the_request(server: dict[str, str]) -> None:
    greatest = 2**63 + 7
    with tritonclient.http.InferenceServerClient(server["http"]) as client:
        answers = [
            client.infer("controls", one(tritonclient.http, 1), sequence_id=greatest, **place(step, 3))
            for step in range(3)
        ]
    for name, expected in (
        ("START", [1, 0, 0]),
        ("END", [-1, -1, 2]),
        ("READY", [True] * 3),
        ("CORRID", [greatest] * 3),
    ):
        assert [answer.as_numpy(f"{name}_given").tolist() for answer in answers] == [[[value]] for value in expected]


def test_rows_are_slots(server: dict[str, str]) -> None:
    """As many sequences as slots, all in progress at the same time."""
    together = threading.Barrier(4, timeout=PATIENCE_S)

    def ask(identity: int) -> list[Any]:
        answers = []
        with tritonclient.http.InferenceServerClient(server["http"]) as client:
            for step in range(LENGTH):
                together.wait()
                inputs = one(tritonclient.http, identity)
                answers.append(client.infer("controls", inputs, sequence_id=identity, **place(step)))
        return [(answer.as_numpy("y").item(), answer.as_numpy("CORRID_given").item()) for answer in answers]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, range(1, 5)))
    assert got == [[(identity, identity)] * LENGTH for identity in range(1, 5)]


def test_controls_and_states_are_not_for_clients(server: dict[str, str]) -> None:
    with tritonclient.http.InferenceServerClient(server["http"]) as client:
        assert "sequence" in client.get_server_metadata()["extensions"]
        for model, outputs in (("sums", ["y"]), ("shown", ["state_out", "y"])):
            metadata = client.get_model_metadata(model)
            assert [tensor["name"] for tensor in metadata["inputs"]] == ["x"]
            assert sorted(tensor["name"] for tensor in metadata["outputs"]) == outputs
        answer = client.infer("shown", one(tritonclient.http, 5), sequence_id=5, **place(0, 1))
        assert answer.as_numpy("state_out").tolist() == [[5]]
        extra = [*one(tritonclient.http, 1), tritonclient.http.InferInput("START", [1, 1], "INT32")]
        extra[1].set_data_from_numpy(np.ones((1, 1), np.int32))
        with pytest.raises(InferenceServerException, match="unexpected inference input 'START'"):
            client.infer("sums", extra, sequence_id=1, **place(0))


@pytest.mark.parametrize(
    ("model", "parameters", "message"),
    [
        ("sums", {}, "must specify a non-zero or non-empty correlation ID"),
        ("sums", {"sequence_id": 0}, "must specify a non-zero or non-empty correlation ID"),
        ("sums", {"sequence_id": 99}, "inference request for sequence 99 to model 'sums' must specify the START flag"),
        ("sums", {"sequence_id": "x", "sequence_start": 1}, "parameter 'sequence_start' has invalid value 1"),
        ("sums", {"sequence_id": True}, "parameter 'sequence_id' has invalid value True"),
        ("sums", {"sequence_id": 2**64}, "parameter 'sequence_id' has invalid value"),
        ("sums", {"sequence_id": "x" * 129}, "parameter 'sequence_id' is longer than 128 bytes"),
        (
            "controls",
            {"sequence_id": "x", "sequence_start": True},
            "data-type is 'BYTES', but model 'controls' expects",
        ),
    ],
    ids=["none", "zero", "unknown", "start", "bool", "large", "long", "text"],
)
def test_requests_that_are_of_no_sequence(
    server: dict[str, str], model: str, parameters: dict[str, Any], message: str
) -> None:
    host, _, port = server["http"].rpartition(":")
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    with http_servers.Client((host, int(port))) as client:
        answer = client.ask(http_servers.post(body, "", f"/v2/models/{model}/infer"))
    assert answer.status == 400
    assert message in json.loads(answer.body)["error"]
