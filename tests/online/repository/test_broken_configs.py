"""The error of every broken configuration names the file, the field and the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import models
from online.repository.broken_configs import BROKEN, Broken
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.online.repository.triton.auto_complete import complete
from penstock.online.repository.triton.backend import backend_of, engine_options
from penstock.online.repository.triton.check import check
from penstock.online.repository.triton.schema import typed
from penstock.online.repository.triton.text import read_config


def load(folder: Path) -> None:
    """Load a model's configuration as the server does."""
    name, where, artifact = folder.name, f"{folder.name}/config.pbtxt", models.linear(3, 2)
    message = read_config(folder)
    check(message, name, where)
    given = typed(message)
    backend = backend_of(given, name, os.listdir(folder / "1"), where)
    model = get_engine(backend.engine).load(artifact, engine_options(given, name, backend.engine, where))
    complete(given, name, backend.platform, model.signature, 8, 1, where=where)
    model.unload()


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_is_refused(broken: Broken, tmp_path: Path) -> None:
    folder = tmp_path / broken.name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").touch()
    (folder / "config.pbtxt").write_text(broken.text)
    with pytest.raises(PenstockError) as refused:
        load(folder)
    told = str(refused.value)
    assert f"{broken.name}/config.pbtxt" in told
    assert broken.field in told
    assert broken.reason in told
    assert str(tmp_path) not in told
    assert len(told) < 1000


def test_there_are_enough_and_no_two_alike() -> None:
    assert len({broken.name for broken in BROKEN}) == len(BROKEN) >= 100
    assert len({broken.text for broken in BROKEN}) == len(BROKEN)
