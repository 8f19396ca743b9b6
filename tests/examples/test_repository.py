"""The example repository passes the doctor, and the server answers as its README shows."""

from __future__ import annotations

import http.client
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from penstock.online.repository.layout import Layout
from penstock.online.repository.triton.doctor import diagnose
from processes import PATIENCE_S, ServerProcess

WRITE = Path(__file__).parents[2] / "examples" / "repository" / "write.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """The repository, the request, and the digit that it shows."""
    folder = tmp_path_factory.mktemp("example")
    digit = runpy.run_path(str(WRITE))["write"](folder / "models", folder / "request.json")
    return folder / "models", (folder / "request.json").read_bytes(), digit


def test_the_doctor_finds_nothing_wrong(written: tuple[Path, bytes, int]) -> None:
    models = Layout((written[0],)).models()
    assert {name: diagnose(models, name).findings for name in models} == {"network": [], "prepare": [], "read": []}


def ask(address: tuple[str, int], path: str, body: bytes = b"") -> Any:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    assert answer.status == 200, data
    return json.loads(data or b"null")


def test_it_is_served_and_reloaded(written: tuple[Path, bytes, int]) -> None:
    repository, request, digit = written
    flags = ("--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "read")
    with ServerProcess(arguments=flags) as server:
        (labels,) = repository.glob("*/labels.txt")
        names = labels.read_text().splitlines()
        (text,) = ask(server.address, "/v2/models/read/infer", request)["outputs"][0]["data"]
        assert text.split(":")[1:] == [str(digit), names[digit]]
        labels.write_text(labels.read_text().upper())
        ask(server.address, "/v2/repository/models/network/load")
        (text,) = ask(server.address, "/v2/models/read/infer", request)["outputs"][0]["data"]
        assert text.split(":")[1:] == [str(digit), names[digit].upper()]
        index = ask(server.address, "/v2/repository/index")
        assert [(row["name"], row["state"]) for row in index] == [
            (name, "READY") for name in ("network", "prepare", "read")
        ]
