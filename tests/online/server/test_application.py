"""The start-up models. ``tests/e2e`` tests the rest of an application with complete servers."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from penstock.errors import NotFound
from penstock.online.repository.layout import Layout
from penstock.online.server.application import models_at_start
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
