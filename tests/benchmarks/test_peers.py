"""Every peer that is installed answers as the model does, in every form that it is asked in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks import models, servers
from benchmarks.peers import catalog
from benchmarks.peers.catalog import PEERS, Form
from benchmarks.requests import grpc_answer, grpc_request
from penstock.artifact import Artifact
from penstock.engines.registry import get_engine
from penstock.perf.grpc_client import GrpcConnector
from penstock.perf.http_client import HttpAnswer, HttpSession
from penstock.perf.load import closed_loop, run
from penstock.perf.loops import LoadWindow
from penstock.tensor import Array

ROW = np.linspace(-1, 1, 32, dtype=np.float32)[None]


def ask(server: servers.Server, form: Form) -> Array:
    async def main() -> HttpAnswer:
        session = HttpSession(server.address)
        try:
            return await session.ask(form.request(server.address, "mlp", ROW))
        finally:
            session.close()

    answer = asyncio.run(main())
    assert answer.status == 200, answer.body
    return form.answer(answer.body, answer.json_size)


def ask_grpc(server: servers.Server) -> Array:
    assert server.grpc is not None
    found: list[bytes] = []

    def keep(index: int, body: bytes, json_size: int | None) -> bool:
        found.append(body)
        return True

    window = LoadWindow(duration_s=None, warmup_s=0.0, max_requests=1)
    request = grpc_request("mlp", {"input": ROW})
    result = run(closed_loop(server.grpc, [request], 1, window, keep, connect=GrpcConnector()))
    assert result.errors == 0, result.first_errors
    return grpc_answer(found[0])["output"]


def is_running(pid: int) -> bool:
    """Zombies whom nobody has collected yet are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_answers_as_the_model_does(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    if peer.python() is None:
        pytest.skip(peer.missing)
    model = models.mlp(tmp_path / "mlp.onnx")
    expected = (
        get_engine("onnxruntime").load(Artifact.from_file(model), {"threads": 1}).forward({"input": ROW})["output"]
    )
    with catalog.running(peer, model, servers.split_cores()[0]) as server:
        answers = [ask(server, form) for form in (peer.json, peer.binary) if form]
        if peer.grpc:
            answers.append(ask_grpc(server))
        assert server.cpu_seconds() > 0
        assert server.rss_bytes() > 10 << 20
        processes = server.processes()
    for answer in answers:
        np.testing.assert_allclose(answer.reshape(1, 8), expected, rtol=1e-5, atol=1e-6)
    assert not [pid for pid in processes if is_running(pid)]


def test_a_peer_is_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    monkeypatch.setenv("PENSTOCK_PEER_MOSEC", str(tmp_path))
    assert PEERS["mosec"].python() is None
    python.touch()
    assert PEERS["mosec"].python() == str(python)


def test_a_peer_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_MOSEC", str(tmp_path))
    with (
        pytest.raises(RuntimeError, match=r"not installed: python -m benchmarks\.peers\.install mosec"),
        catalog.running(PEERS["mosec"], tmp_path / "mlp.onnx", set()),
    ):
        pass
