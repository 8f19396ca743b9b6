"""A model repository whose files change, a server for it, and a client that loads and unloads the models."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from benchmarks.requests import post
from benchmarks.servers import Server, serving
from penstock.perf.http_client import Address, HttpSession

_PATIENCE_S = 120.0
_PAUSE_S = 0.01


def add(root: Path, name: str, file: Path, config: str = "") -> None:
    """Add a model with one version to repository ``root``. The version is a copy of ``file``."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    shutil.copyfile(file, folder / ("model.py" if file.suffix == ".py" else "model.onnx"))
    if config:
        (root / name / "config.pbtxt").write_text(config)


def replace(root: Path, name: str, file: Path) -> None:
    """Replace the model's file by ``file``, which must be on the same disk, atomically and without copying."""
    folder = root / name / "1"
    os.link(file, folder / ".new")
    os.replace(folder / ".new", folder / "model.onnx")


@contextmanager
def repository_server(root: Path, cores: set[int], *flags: str) -> Iterator[Server]:
    """Run ``penstock serve --model-repository ROOT`` on free ports."""
    with serving(
        ["-m", "penstock", "serve", "--model-repository", str(root), "--http-port", "0", *flags], cores
    ) as server:
        yield server


class Control:
    """A client of the model repository API. Every method raises RuntimeError if the server refuses the request."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._session = HttpSession(address, _PATIENCE_S)

    async def load(self, model: str, config: dict[str, Any] | None = None) -> None:
        """Load ``model``. ``config``, if given, replaces the model's own configuration."""
        body = {"parameters": {"config": orjson.dumps(config).decode()}} if config is not None else {}
        await self._post(f"models/{model}/load", body)

    async def unload(self, model: str) -> None:
        await self._post(f"models/{model}/unload")

    async def is_gone(self, model: str) -> None:
        """Return once no version of ``model`` is left in memory."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            rows = [row for row in await self._post("index") if row["name"] == model]
            if all(row.get("state") != "READY" and row.get("reason") in (None, "unloaded") for row in rows):
                return
            await asyncio.sleep(_PAUSE_S)
        raise RuntimeError(f"model '{model}' is not unloaded after {_PATIENCE_S:g} s")

    def close(self) -> None:
        self._session.close()

    async def _post(self, what: str, body: dict[str, Any] | None = None) -> Any:
        answer = await self._session.ask(post(self._address, f"/v2/repository/{what}", orjson.dumps(body or {})))
        if answer.status != 200:
            raise RuntimeError(f"{what}: HTTP {answer.status} {answer.body.decode(errors='replace')}")
        return orjson.loads(answer.body or b"null")
