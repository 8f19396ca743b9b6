"""A real server on a real repository, asked by the requests of TensorFlow Serving's and TorchServe's clients."""

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
            return answer.status, orjson.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


def test_a_model_is_asked_in_each_dialect(address: str) -> None:
    rows = [[1.0, 2.5], [3.0, 4.5]]
    assert ask(address, "POST /v1/models/same:predict", {"instances": rows}) == (200, {"predictions": rows})
    assert ask(address, "POST /v1/models/same/labels/stable:predict", {"inputs": rows}) == (200, {"outputs": rows})
    assert ask(address, "POST /predictions/same/2", rows) == (200, rows)


def test_a_model_is_unloaded_and_loaded_again(address: str) -> None:
    assert ask(address, "POST /v2/repository/models/same/unload", {})[0] == 200
    found = ask(address, "GET /v1/models/same")[1]
    assert found["ready"] is False
    # Unloading may go on for a while.
    states = {(one["version"], one["state"]) for one in found["model_version_status"]}
    assert states <= {(version, state) for version in ("1", "2") for state in ("UNLOADING", "END")}
    assert all(one["status"]["error_code"] == "OK" for one in found["model_version_status"])
    status, error = ask(address, "POST /predictions/same", [[1.0]])
    assert (status, error["code"], error["type"]) == (404, 404, "ModelNotFoundException")
    assert ask(address, "POST /v2/repository/models/same/load", {})[0] == 200
    assert ask(address, "GET /v1/models/same/labels/stable")[1]["ready"] is True


def test_torchserve_s_management_is_not_there(address: str) -> None:
    assert ask(address, "GET /models/same")[0] == ask(address, "PUT /models/same?min_worker=2")[0] == 404
