"""A repository full of broken models: each is refused with what is wrong, and the server and the sound model live on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import models
from online.repository.broken_configs import BROKEN
from processes import ServerProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, config in [("sound", None), *((broken.name, broken.text) for broken in BROKEN)]:
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.onnx").write_bytes(models.linear().data)
        if config is not None:
            (root / name / "config.pbtxt").write_text(config)
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[triton.InferenceServerClient]:
    arguments = ("--model-repository", str(folder), "--no-exit-on-error")
    # Not to stderr: nobody reads that pipe while the server runs, and it would fill.
    with ServerProcess(arguments=arguments, log_file=folder.parent / "log") as server:
        if not server.line:
            pytest.fail(server.end()[1])
        with triton.InferenceServerClient("{}:{}".format(*server.address)) as client:
            yield client


def ask_the_sound(client: triton.InferenceServerClient) -> None:
    x = np.ones((1, 3), np.float32)
    tensor = triton.InferInput("x", [1, 3], "FP32").set_data_from_numpy(x)
    np.testing.assert_allclose(client.infer("sound", [tensor]).as_numpy("y"), x @ models.linear_weight(), rtol=1e-5)


def test_there_are_a_hundred_ways_to_go_wrong() -> None:
    assert len(BROKEN) >= 100


def test_the_index_tells_of_each_what_is_wrong(client: triton.InferenceServerClient) -> None:
    reasons = {row["name"]: row.get("reason", "") for row in client.get_model_repository_index()}
    states = {row["name"]: row.get("state", "") for row in client.get_model_repository_index()}
    assert states.pop("sound") == "READY"
    assert set(states) == {broken.name for broken in BROKEN}
    vague = [
        (broken.name, broken.field, broken.reason, reasons[broken.name])
        for broken in BROKEN
        if states[broken.name] != "UNAVAILABLE"
        or not all(
            part in reasons[broken.name] for part in (f"{broken.name}/config.pbtxt", broken.field, broken.reason)
        )
    ]
    assert not vague, f"{len(vague)} are not told well"


def test_loading_one_says_the_same_and_harms_nobody(folder: Path) -> None:
    arguments = ("--model-repository", str(folder), "--model-control-mode", "explicit", "--load-model", "sound")
    with (
        ServerProcess(arguments=arguments, log_file=folder.parent / "log") as server,
        triton.InferenceServerClient("{}:{}".format(*server.address)) as client,
    ):
        for broken in BROKEN:
            with pytest.raises(InferenceServerException) as refusal:
                client.load_model(broken.name)
            assert broken.field in refusal.value.message(), broken.name
            assert not client.is_model_ready(broken.name)
        ask_the_sound(client)
        assert client.is_server_ready(), "what was not asked for at the start may be missing"


def test_the_server_lives_but_is_not_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert not client.is_server_ready()
    ask_the_sound(client)


def test_by_default_the_server_ends_and_names_every_broken_model(folder: Path) -> None:
    with ServerProcess(arguments=("--model-repository", str(folder)), wait=False) as server:
        code, errors = server.end()
    assert code != 0
    assert "Traceback" not in errors
    assert all(broken.name in errors for broken in BROKEN)
