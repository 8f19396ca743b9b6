"""TensorFlow Serving's REST API and KServe v1, as their clients use them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dialect_models import ask, dialect_server, read, wait_for
from http_servers import PATIENCE_S, Client, GatedServer, get, infer, post
from penstock.clock import ManualClock
from penstock.online.server.access.auth import Access

M = "/v1/models/half_plus_two"


@pytest.fixture(scope="module")
def server() -> Iterator[GatedServer]:
    with dialect_server() as server:
        yield server


@pytest.fixture
def client(server: GatedServer) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        assert client.ask(infer(21)).data == [42, 0]


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (f"{M}:predict", {"instances": [1.0, 2.0, 5.0]}, {"predictions": [2.5, 3.0, 4.5]}),
        (f"{M}:predict", {"inputs": [1.0, 2.0]}, {"outputs": [2.5, 3.0]}),
        (f"{M}/versions/1:predict", {"signature_name": "serving_default", "instances": [1]}, {"predictions": [2.5]}),
        (
            "/v1/models/pair:predict",
            {"instances": [{"x": [1, 2], "n": 3}, {"x": [4, 5], "n": 6}]},
            {"predictions": [{"y": [2, 3], "z": 6}, {"y": [5, 6], "z": 12}]},
        ),
        (
            "/v1/models/pair:predict",
            {"inputs": {"x": [[1, 2]], "n": [3]}},
            {"outputs": {"y": [[2, 3]], "z": [6]}},
        ),
        (
            "/v1/models/words:predict",
            {"instances": [["hi"], [{"b64": "/w=="}]]},
            {
                "predictions": [
                    {"s": [{"b64": "aGk="}], "s_bytes": [{"b64": "aGk="}]},
                    {"s": [{"b64": "/w=="}], "s_bytes": [{"b64": "/w=="}]},
                ]
            },
        ),
        (
            "/v1/models/words:predict",
            {"inputs": [["hi"]]},
            {"outputs": {"s": [["hi"]], "s_bytes": [[{"b64": "aGk="}]]}},
        ),
        ("/v1/models/halves:predict", {"instances": [[1.5, -2]]}, {"predictions": [[1.5, -2]]}),
        ("/v1/models/plain:predict", {"instances": [[1, 2, 3]]}, {"predictions": [{"sum": 6, "q": [2, 4, 6]}]}),
        ("/v1/models/plain:predict", {"inputs": [1, 2, 3]}, {"outputs": {"sum": 6, "q": [2, 4, 6]}}),
        ("/v1/models/many:predict", {"instances": [0]}, {"predictions": [2]}),
        ("/v1/models/many/versions/1:predict", {"instances": [0]}, {"predictions": [1]}),
        ("/v1/models/many/labels/stable:predict", {"instances": [0]}, {"predictions": [1]}),
        ("/v1/models/many/labels/canary:predict", {"instances": [0]}, {"predictions": [2]}),
        (
            "/v1/models/ages:classify",
            {"context": {"age": 0.25}, "examples": [{"age": [0.75]}, {}]},
            {"results": [[["old", 0.75], ["1", 0.25]], [["old", 0.25], ["1", 0.75]]]},
        ),
        ("/v1/models/prices:regress", {"examples": [{"age": 2}, {"age": [3.5]}]}, {"results": [20, 35]}),
        ("/v1/models/prices/versions/1:regress", {"examples": [{"age": 2}]}, {"results": [20]}),
    ],
)
def test_inference(client: Client, path: str, body: Any, answer: Any) -> None:
    assert read(ask(client, path, body)) == answer


def test_nan_and_infinities_go_in_and_out_as_bare_words(client: Client) -> None:
    answer = ask(client, "/v1/models/same:predict", b'{"instances": [[NaN, Infinity, -Infinity, 0.5]]}')
    assert answer.body == b'{"predictions":[[NaN,Infinity,-Infinity,0.5]]}'
    (row,) = json.loads(answer.body)["predictions"]
    assert math.isnan(row[0])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (f"{M}:predict", b"{", 400, "JSON Parse error"),
        (f"{M}:predict", {}, 400, "Missing 'inputs' or 'instances' key"),
        (f"{M}:predict", {"instances": [[1]]}, 400, "unexpected shape for input 'x'"),
        (f"{M}:predict", {"instances": ["a"]}, 400, "do not fit FP32"),
        (f"{M}:predict", {"instances": [1] * 9}, 400, "batch-size must be <= 8"),
        (f"{M}:predict", {"instances": [1], "signature_name": "z"}, 400, "not found"),
        ("/v1/models/pair:predict", {"inputs": {"x": [[1, 2]]}}, 400, "missing required input(s) ['n']"),
        ("/v1/models/plain:predict", {"instances": [[1, 2, 3]] * 2}, 400, "no batch dimension"),
        ("/v1/models/nobody:predict", {"instances": [1]}, 404, "'nobody' is not found"),
        (f"{M}/versions/9:predict", {"instances": [1]}, 404, "version 9 is not found"),
        ("/v1/models/many/labels/gone:predict", {"instances": [1]}, 404, "version 7 is not found"),
        ("/v1/models/many/labels/none:predict", {"instances": [1]}, 400, "Unrecognized servable version label: none"),
        (f"{M}/labels/stable:predict", {"instances": [1]}, 400, "Unrecognized servable version label: stable"),
        (f"{M}:classify", {"examples": [{"x": 1}]}, 400, "not a classification"),
        ("/v1/models/pair:regress", {"examples": [{"x": [1, 2], "n": 1}]}, 400, "not a regression"),
        ("/v1/models/ages:classify", {"examples": [{}]}, 400, "neither example 0 nor the context has a feature 'age'"),
        (f"{M}:explain", {"instances": [1]}, 501, "no explainer"),
        (f"{M}/versions/1:other", {}, 404, "Not Found"),
    ],
)
def test_errors(client: Client, path: str, body: Any, status: int, message: str) -> None:
    error = read(ask(client, path, body), status)
    assert list(error) == ["error"]
    assert message in error["error"]


def test_status(client: Client) -> None:
    available = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    assert read(ask(client, "/v1/models/many")) == {
        "model_version_status": [{"version": "1", **available}, {"version": "2", **available}],
        "name": "many",
        "ready": True,
    }
    for path in ("/v1/models/many/versions/2", "/v1/models/many/labels/canary"):
        assert read(ask(client, path))["model_version_status"] == [{"version": "2", **available}]
    assert read(ask(client, "/v1/models/n"), 404)["error"] == "Could not find any versions of model n"
    assert read(ask(client, "/v1/models/many/versions/3"), 404)["error"] == "Could not find version 3 of model many"
    assert read(ask(client, "/v1/models/many/labels/gone"), 404)["error"] == "Could not find version 7 of model many"


def test_states_of_the_index_in_other_words(
    server: GatedServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "a", "version": "2", "state": "UNAVAILABLE", "reason": "the file is cut off"},
        {"name": "a", "version": "3", "state": "LOADING"},
        {"name": "b", "state": "UNAVAILABLE", "reason": "no file"},
    ]

    async def index(ready: bool = False) -> list[dict[str, str]]:
        return rows

    monkeypatch.setattr(server.control, "repository_index", index)
    found = read(ask(client, "/v1/models/a"))
    assert found["ready"] is False
    assert [(one["version"], one["state"]) for one in found["model_version_status"]] == [
        ("1", "END"),
        ("2", "END"),
        ("3", "LOADING"),
    ]
    assert [one["status"]["error_message"] for one in found["model_version_status"]] == ["", "the file is cut off", ""]
    assert [one["status"]["error_code"] for one in found["model_version_status"]] == ["OK", "UNKNOWN", "OK"]
    assert ask(client, "/v1/models/b").status == 404


def test_metadata(client: Client) -> None:
    found = read(ask(client, "/v1/models/pair/metadata"))
    assert found["model_spec"] == {"name": "pair", "signature_name": "", "version": "1"}
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    shape = {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False}
    assert signature["inputs"]["x"] == {"dtype": "DT_FLOAT", "tensor_shape": shape, "tensorShape": shape, "name": "x"}
    assert signature["outputs"]["z"]["dtype"] == "DT_INT64"
    assert read(ask(client, "/v1/models/many/labels/stable/metadata"))["model_spec"]["version"] == "1"
    assert read(ask(client, "/v1/models/many/metadata"))["model_spec"]["version"] == "2"
    assert ask(client, "/v1/models/n/metadata").status == 404


def test_what_ovmsclient_asks(client: Client) -> None:
    found = read(ask(client, "/v1/models/pair/versions/0/metadata"))
    assert found["modelSpec"]["version"] == "1"
    tensors = found["metadata"]["signature_def"]["signatureDef"]["serving_default"]
    assert [int(size["size"]) for size in tensors["inputs"]["x"]["tensorShape"]["dim"]] == [-1, 2]
    (state,) = read(ask(client, "/v1/models/pair/versions/0"))["model_version_status"]
    assert (state["version"], state["state"], state["status"]["error_code"]) == ("1", "AVAILABLE", "OK")
    assert ask(client, "/v1/models/pair/versions/7/metadata").status == 404
    states = read(ask(client, "/v1/config"))
    assert states["pair"] == {"model_version_status": [state]}
    assert {"m", "many", "pair"} <= states.keys()


def test_the_server_itself(client: Client) -> None:
    assert read(ask(client, "/")) == {"status": "alive"}
    assert {"m", "many", "pair"} <= set(read(ask(client, "/v1/models"))["models"])
    page = ask(client, "/monitoring/prometheus/metrics")
    assert (page.status, b"# TYPE" in page.body) == (200, True)
    assert ask(client, f"{M}:predict").headers["allow"] == "POST"


def test_the_data_plane_is_the_same(server: GatedServer, client: Client) -> None:
    def count() -> int:
        return int(read(ask(client, "/v2/models/half_plus_two/stats"))["model_stats"][0]["inference_count"])

    before = count()
    read(ask(client, f"{M}:predict", {"instances": [1, 2]}))
    assert count() == before + 2


def test_a_client_that_goes_is_not_waited_for() -> None:
    with dialect_server() as server:
        server.gate.clear()
        request = post(b'{"instances": [[1, 2]]}', path="/v1/models/m:predict")
        with Client(server.address) as first, Client(server.address) as second:
            first.send(request)
            assert server.entered.acquire(timeout=PATIENCE_S)
            second.send(request)
            wait_for(server, 2)
            second.close()
            wait_for(server, 1)
            server.gate.set()
            assert read(first.read()) == {"predictions": [[2, 4]]}
        assert len(server.model.calls) == 1


def test_a_large_body_is_refused() -> None:
    with dialect_server(max_request_bytes=1000) as server:
        answer = server.connect().ask(post(b" " * 1001, path=f"{M}:predict"))
        assert (answer.status, "larger than 1000 bytes" in answer.error) == (413, True)


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        '[clients.alice]\nkey = "alice key 012345"\nmodels = ["half*"]\n'
        '[clients.root]\nkey = "root key 0123456"\nadmin = true\n'
    )
    alice, root = "Authorization: Bearer alice key 012345\r\n", "X-API-Key: root key 0123456\r\n"
    body = {"instances": [1]}
    with dialect_server(access=Access(file, ManualClock())) as server:
        client = server.connect()
        assert ask(client, f"{M}:predict", body).status == 401
        assert read(ask(client, f"{M}:predict", body, headers=alice)) == {"predictions": [2.5]}
        for path in ("/v1/models/many:predict", "/v1/models/many/labels/stable:predict", "/v1/models/nobody:predict"):
            assert ask(client, path, body, headers=alice).status == 403
        assert ask(client, "/v1/models/many", headers=alice).status == 403
        assert read(ask(client, "/v1/models", headers=alice))["models"] == ["half_plus_two"]
        assert len(read(ask(client, "/v1/models", headers=root))["models"]) > 5
        assert ask(client, "/v1/models").status == 401
        assert ask(client, "/").status == 200
        assert ask(client, "/monitoring/prometheus/metrics", headers=alice).status == 403
        assert ask(client, "/monitoring/prometheus/metrics", headers=root).status == 200


def test_only_the_dialects_that_are_switched_on() -> None:
    with dialect_server(dialects=()) as server:
        client = server.connect()
        assert client.ask(infer(21)).data == [42, 0]
        for path in ("/", M, "/v1/models", "/ping", "/models"):
            assert ask(client, path).status == 404
        assert "/v1/models" not in json.loads(client.ask(get("/openapi.json")).body)["paths"]
    with dialect_server(dialects=("kserve-v1",)) as server:
        client = server.connect()
        assert read(ask(client, f"{M}:predict", {"instances": [1]})) == {"predictions": [2.5]}
        assert ask(client, f"{M}/metadata").status == 404
        assert ask(client, "/ping").status == 404


def test_metrics_that_are_off_are_off_here_too() -> None:
    with dialect_server(allow_metrics=False) as server:
        assert read(ask(server.connect(), "/monitoring/prometheus/metrics"), 404)["error"].startswith("metrics are")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just({"b64": "YQ=="}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "n", "age", "b64"]), inner),
    max_leaves=8,
)
BODIES = st.one_of(
    st.dictionaries(st.sampled_from(["instances", "inputs", "examples", "context", "signature_name"]), JSON).map(
        lambda body: json.dumps(body).encode()
    ),
    JSON.map(lambda body: json.dumps({"instances": [body, body]}).encode()),
    st.binary(max_size=30),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.sampled_from(["m", "pair", "words", "halves", "plain", "ages", "nobody"]),
    verb=st.sampled_from(["predict", "classify", "regress", "explain"]),
    body=BODIES,
)
def test_nothing_that_is_sent_is_a_fault_of_ours(server: GatedServer, model: str, verb: str, body: bytes) -> None:
    with Client(server.address) as client:
        answer = client.ask(post(body, path=f"/v1/models/{model}:{verb}"))
        assert answer.status in (200, 400, 404, 501), answer.body
