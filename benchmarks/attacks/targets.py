"""The attacked server: ``penstock serve`` with default settings and three small models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import innocents, models
from benchmarks.attacks import bombs, unread
from benchmarks.repository.control import add, repository_server
from benchmarks.servers import Server

KEY = "innocent-0123456789"


def make_models(folder: Path) -> Path:
    """Create a repository with the models for the innocent clients and for the attacks."""
    root = folder / "models"
    graph = models.GraphBuilder()
    wide = graph.op("MatMul", "input", graph.normal(1.0, 1, unread.COLUMNS))
    add(root, innocents.MODEL, models.identity(folder / "identity.onnx", innocents.COLUMNS))
    add(root, bombs.MODEL, models.identity(folder / "wide.onnx", bombs.COLUMNS))
    add(root, unread.MODEL, graph.save(folder / "widen.onnx", wide, [1], [unread.COLUMNS]))
    add(root, "reloaded", models.mlp(folder / "reloaded.onnx"))
    return root


@contextmanager
def targets(folder: Path, count: int, *flags: str, keys: bool = False) -> Iterator[list[Server]]:
    """``count`` equal servers, on all cores. With ``keys``, only clients that send ``KEY`` may use the servers."""
    root = make_models(folder)
    if keys:
        file = folder / "keys.toml"
        file.write_text(f'[clients.innocent]\nkey = "{KEY}"\n')
        flags = (*flags, "--keys-file", str(file))
    with ExitStack() as held:
        cores = os.sched_getaffinity(0)
        yield [held.enter_context(repository_server(root, cores, *flags)) for _ in range(count)]
