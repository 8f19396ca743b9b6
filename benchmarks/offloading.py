"""Offloading over simulated links: ResNet-18 on a device that runs it four times per call, and so is four times slower than the
server. Each link speed is measured with calls that stay on the device, that go to the server, and that Penstock places, in turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.link import Link
from benchmarks.models import resnet18
from benchmarks.results import Row, claim, fact
from benchmarks.servers import penstock, split_cores
from penstock.artifact import Artifact
from penstock.engines.base import LoadedModel
from penstock.engines.registry import get_engine
from penstock.offloading.offloaded import OffloadedModel, OffloadOptions
from penstock.offloading.server import ServedModel
from penstock.runtime import Model
from penstock.tensor import Array

_MBITS = (2, 5, 10, 20, 50, 100, 300, 1000)
_ROUND_TRIP_S = 0.01
_SLOWER = 4
_WARM_UP, _CALLS = 12, 12
_WITHIN = 1.1


class _SlowDevice:
    """The model of a device that is slower than this machine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        for _ in range(_SLOWER - 1):
            self._loaded.forward(inputs)
        return self._loaded.forward(inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)


def rows(quick: bool) -> list[Row]:
    """The rows of all link speeds."""
    found, worst = [], 0.0
    server_core, _ = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        model = resnet18(Path(folder, "resnet18.onnx"))
        with (
            penstock(model, server_core) as server,
            Model("resnet18", _SlowDevice(get_engine("onnxruntime").load(Artifact.from_file(model), {}))) as device,
        ):
            for mbits in _MBITS[::3] if quick else _MBITS:
                with Link(server.address, mbits * 1e6, _ROUND_TRIP_S) as link:
                    times = _measured(device, ServedModel(link.address, "resnet18", 60), 4 if quick else _CALLS)
                better = min(times["device"], times["server"])
                worst = max(worst, times["placed"] / better)
                note = f"device {times['device'] * 1e3:.0f} ms, server {times['server'] * 1e3:.0f} ms"
                found.append(
                    fact(f"{mbits} Mbit/s: offloaded call / better side", times["placed"] / better, "×", note=note)
                )
    return [*found, claim("offloaded call / better side, at the worst link speed", worst, "×", "<=", _WITHIN)]


def _measured(device: Model, server: ServedModel, calls: int) -> dict[str, float]:
    """The mean seconds of a call on each side, and where Penstock places it, after it has measured both sides."""
    image = {"input": np.random.default_rng(0).random((1, 3, 224, 224), np.float32)}
    server.start()
    placed = OffloadedModel(device, server, OffloadOptions(timeout_s=60))
    for _ in range(_WARM_UP):
        placed.infer(image)
    sides: dict[str, Callable[[], object]] = {
        "device": lambda: device.infer(image),
        "server": lambda: server.infer(image).result(),
        "placed": lambda: placed.infer(image),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(calls):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    server.close()
    return {name: statistics.fmean(values) for name, values in times.items()}
