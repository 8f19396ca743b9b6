from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from penstock.errors import InvalidArgument
from penstock.online.repository.handle import Handle
from penstock.online.repository.layout import Layout
from penstock.online.repository.loading.assembly import Assembler, RequestLimits
from penstock.online.repository.loading.loader import load
from penstock.online.repository.resolved_version import LoadOptions, find
from penstock.online.repository.served import ServedModels
from penstock.online.scheduler.ensemble import Models
from penstock.online.scheduler.rate_limiter import RateLimiter, ResourceGate
from penstock.request import InferRequest
from penstock.telemetry.trace_settings import TraceSettings
from penstock.telemetry.tracing import Tracer

Found = TypeVar("Found")


def identity(root: Path, config: str, limiter: RateLimiter | None = None) -> str:
    return assemble(root, config, lambda handle: handle.identity, limiter)


def assemble(root: Path, config: str, look: Callable[[Handle], Found], limiter: RateLimiter | None = None) -> Found:
    folder = root / "m" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(models.linear().data)
    (root / "m" / "config.pbtxt").write_text(config)
    loaded = load(find(Layout((root,), "", False, {}).define("m"), "1", LoadOptions()))

    async def run() -> Found:
        nobody = Models(ServedModels().find, lambda *_: None)
        return look(Assembler(RequestLimits(), Tracer(TraceSettings()), None, nobody, limiter).assemble(loaded))

    try:
        return asyncio.run(run())
    finally:
        loaded.drop()


def test_a_model_that_answers_in_other_shapes_is_another(tmp_path: Path) -> None:
    text = 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ DIMS ] reshape { shape: [ 3 ] } }'
    plain = identity(tmp_path, text.replace("DIMS", "3, 1"))
    assert identity(tmp_path, text.replace("DIMS", "3, 1") + ' metric_tags { key: "a" value: "b" }') == plain
    assert identity(tmp_path, text.replace("DIMS", "1, 3")) != plain


class RecordingLimiter(RateLimiter):
    def __init__(self) -> None:
        super().__init__({})
        self.asked: list[tuple[str, dict[str, int], int]] = []

    def gate(self, name: str, needs: Mapping[str, int], priority: int = 1) -> ResourceGate | None:
        self.asked.append((name, dict(needs), priority))
        return super().gate(name, needs, priority)


GROUPS = """
instance_group [
  { count: 2 rate_limiter { resources [ { name: "r" count: 3 }, { name: "s" count: 1 } ] priority: 2 } },
  { count: 1 }
]
"""


def check(root: Path, config: str, rows: int) -> None:
    """Check a request of ``rows`` on the model with ``config``."""
    request = InferRequest("m", {"x": np.zeros((rows, 3), np.float32)})
    assemble(root, config, lambda handle: handle.check(request))


@settings(max_examples=20, deadline=None)
@given(most=st.integers(1, 1100), more=st.integers(0, 3))
def test_a_configured_batch_size_bounds_every_request(
    tmp_path_factory: pytest.TempPathFactory, most: int, more: int
) -> None:
    root = tmp_path_factory.mktemp("repository")
    refusal = pytest.raises(InvalidArgument, match=f"batch-size must be <= {most} for 'm'") if more else nullcontext()
    with refusal:
        check(root, f"max_batch_size: {most}", most + more)


def test_a_batch_size_that_the_server_chose_bounds_no_request(tmp_path: Path) -> None:
    check(tmp_path, "", 1024)
    with pytest.raises(InvalidArgument, match="batch-size must be <= 1024"):
        check(tmp_path, "", 1025)


def test_each_instance_has_the_gate_of_its_group(tmp_path: Path) -> None:
    limiter = RecordingLimiter()
    assert identity(tmp_path, GROUPS, limiter)
    assert limiter.asked == [("m", {"r": 3, "s": 1}, 2)] * 2 + [("m", {}, 0)]
