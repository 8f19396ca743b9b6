"""The programs that the pipeline is compared with do the same work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks import servers
from benchmarks.models import GraphBuilder
from benchmarks.peers.catalog import PEERS, running
from benchmarks.pipelines import by_hand
from benchmarks.pipelines.pictures import jpegs, pack
from benchmarks.requests import post
from penstock import runtime
from penstock.perf.http_client import HttpAnswer, HttpSession

(JPEG,) = jpegs(1, 320, 240)


def network(folder: Path) -> Path:
    """A small network of pictures, with twelve classes."""
    graph = GraphBuilder()
    x = graph.classify(graph.conv("input", 3, 8, 7, 4), 8, 12)
    return graph.save(folder / "net.onnx", x, [3, by_hand.SIDE, by_hand.SIDE], [12])


@contextmanager
def server(name: str, model: Path) -> Iterator[servers.Server]:
    cores, app = servers.split_cores()[0], f"benchmarks.pipelines.{name}_app"
    if name == "fastapi":
        with servers.serving(["-m", app, str(model)], cores) as found:
            yield found
    else:
        with running(PEERS[name], model, cores, app) as found:
            yield found


def classified(server: servers.Server) -> dict[str, list[object]]:
    async def main() -> HttpAnswer:
        session = HttpSession(server.address)
        try:
            return await session.ask(post(server.address, "/classify", JPEG, "image/jpeg"))
        finally:
            session.close()

    answer = asyncio.run(main())
    assert answer.status == 200, answer.body
    found: dict[str, list[object]] = json.loads(answer.body)
    return found


def test_a_program_by_hand_answers_as_the_pipeline(tmp_path: Path) -> None:
    model = network(tmp_path)
    with runtime.open(pack(tmp_path, model)) as ours:
        found = ours(JPEG)
    expected = by_hand.answer(onnxruntime.InferenceSession(str(model)), by_hand.opened(JPEG))
    assert found["labels"] == expected["labels"]
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5)
    np.testing.assert_allclose(found["best"], expected["best"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fastapi", "bentoml"])
def test_a_server_answers_as_the_program_by_hand(name: str, tmp_path: Path) -> None:
    if PEERS[name].python() is None:
        pytest.skip(PEERS[name].missing)
    model = network(tmp_path)
    expected = by_hand.answer(onnxruntime.InferenceSession(str(model)), by_hand.opened(JPEG))
    with server(name, model) as started:
        found = classified(started)
    assert found["labels"] == expected["labels"]
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5)
