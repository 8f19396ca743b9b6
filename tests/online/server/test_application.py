"""The start-up models. ``tests/e2e`` tests the rest of an application with complete servers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

import models
from penstock.errors import NotFound
from penstock.online.repository.layout import Layout
from penstock.online.server.app import build
from penstock.online.server.application import Ready, models_at_start
from penstock.online.server.config import ServerConfig


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    for name in ("a", "b"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(models.linear().data)
    return Layout((tmp_path,))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ServerConfig(), ["a", "b"]),
        (ServerConfig(model_control_mode="poll"), ["a", "b"]),
        (ServerConfig(model_control_mode="explicit"), []),
        (ServerConfig(model_control_mode="explicit", load_models=("b",)), ["b"]),
        (ServerConfig(model_control_mode="explicit", load_models=("*",)), ["a", "b"]),
        (ServerConfig(model_control_mode="explicit", load_models=("z",), exit_on_error=False), ["z"]),
    ],
)
def test_models_of_start_up(layout: Layout, config: ServerConfig, names: list[str]) -> None:
    assert sorted(models_at_start(config, layout)) == names


def test_an_unknown_model_ends_the_server(layout: Layout) -> None:
    with pytest.raises(NotFound, match="'z'"):
        models_at_start(ServerConfig(model_control_mode="explicit", load_models=("z",)), layout)


def test_one_thread_decodes_beside_the_event_loop() -> None:
    names: set[str] = set()
    tasks = []

    async def look() -> None:
        loop = asyncio.get_running_loop()
        try:
            works = [loop.run_in_executor(None, threading.current_thread) for _ in range(8)]
            names.update(thread.name for thread in await asyncio.gather(*works))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(ready: Ready) -> None:
        tasks.append(asyncio.get_running_loop().create_task(look()))

    config = ServerConfig(http_port=0, allow_grpc=False, allow_metrics=False)
    asyncio.run(asyncio.wait_for(build(config, Layout(())).run(on_ready), 60))
    assert names == {"decode_0"}
