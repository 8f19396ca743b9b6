"""A real server on a real repository, asked and controlled by the requests of TensorFlow Serving's and TorchServe's clients."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from models import identity
from penstock.tensor import DataType
from processes import ServerProcess

CONFIG = 'parameters { key: "version_labels" value { string_value: "stable:1" } }\nversion_policy { all {} }\n'


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("repository")
    for version in ("1", "2"):
        path = folder / "same" / version / "model.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(identity(DataType.FP32).data)
    (folder / "same" / "config.pbtxt").write_text(CONFIG)
    flags = ("--model-repository", str(folder), "--model-control-mode", "explicit", "--load-model", "same")
    with ServerProcess(arguments=flags) as server:
        if not server.line:
            pytest.fail(server.end()[1])
        yield "http://{}:{}".format(*server.address)


def ask(address: str, request: str, body: Any = None) -> tuple[int, Any]:
    """``request`` is a method and a path."""
    method, path = request.split()
    data = None if body is None else orjson.dumps(body)
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, method=method)) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def test_a_model_is_asked_in_each_dialect(address: str) -> None:
    rows = [[1.0, 2.5], [3.0, 4.5]]
    assert ask(address, "POST /v1/models/same:predict", {"instances": rows}) == (200, {"predictions": rows})
    assert ask(address, "POST /v1/models/same/labels/stable:predict", {"inputs": rows}) == (200, {"outputs": rows})
    assert ask(address, "POST /predictions/same/2", rows) == (200, rows)


def test_a_model_is_scaled_unloaded_and_loaded_again(address: str) -> None:
    assert ask(address, "PUT /models/same?min_worker=2&synchronous=true")[1] == {
        "status": "Workers scaled to 2 for model: same"
    }
    versions = ask(address, "GET /models/same/all")[1]
    assert [(one["modelVersion"], len(one["workers"])) for one in versions] == [("1", 2), ("2", 2)]
    assert ask(address, "DELETE /models/same") == (200, {"status": 'Model "same" unregistered'})
    found = ask(address, "GET /v1/models/same")[1]
    assert found["ready"] is False
    # Unloading may go on for a while.
    states = {(one["version"], one["state"]) for one in found["model_version_status"]}
    assert states <= {(version, state) for version in ("1", "2") for state in ("UNLOADING", "END")}
    assert all(one["status"]["error_code"] == "OK" for one in found["model_version_status"])
    assert ask(address, "GET /models/same")[0] == 404
    status, error = ask(address, "POST /models?url=nobody")
    assert status == error["code"] != 200
    assert "failed to load 'nobody'" in error["message"]
    assert ask(address, "POST /models?url=same.mar")[0] == 200
    assert ask(address, "GET /v1/models/same/labels/stable")[1]["ready"] is True
